"""Ids of responses, their items and opaque reasoning: derived, so that each telling of a run has the same."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from dataclasses import dataclass

MAX_REASONING_BYTES = 4 << 20
_SEAL = "ttr1."
_INPUT = 1 << 31


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """An item of a response's output, or of its input."""

    response: str
    index: int
    is_input: bool


def response_id(run_id: str) -> str:
    """`resp_<32 hex>` of `run-<32 hex>`."""
    return f"resp_{run_id.removeprefix('run-')}"


def run_id_of(response: str) -> str | None:
    """The run behind a response's id; None for what is no id of ours."""
    found = re.fullmatch(r"resp_([0-9a-f]{32})", response)
    return f"run-{found[1]}" if found is not None else None


def item_id(prefix: str, response: str, index: int, *, is_input: bool = False) -> str:
    """Of one item of a response, such as `msg_<40 hex>`: it tells which response and which item."""
    place = index | _INPUT if is_input else index
    return f"{prefix}_{response.removeprefix('resp_')}{place:08x}"


def item_place(item: str) -> ItemPlace | None:
    """Where the item of that id is; None for what is no id of ours."""
    found = re.fullmatch(r"[a-z]+_([0-9a-f]{32})([0-9a-f]{8})", item)
    if found is None:
        return None
    place = int(found[2], 16)
    return ItemPlace(f"resp_{found[1]}", place & ~_INPUT, is_input=bool(place & _INPUT))


def seal_reasoning(text: str) -> str:
    """Reasoning as `encrypted_content`: opaque to clients, who send it back. It is packed, not secret."""
    return _SEAL + base64.urlsafe_b64encode(zlib.compress(text.encode(errors="replace"), 6)).decode()


def open_reasoning(sealed: str) -> str | None:
    """What was sealed; None for what another server made, and for what is too long to be ours."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        packed = base64.urlsafe_b64decode(sealed[len(_SEAL) :].encode("ascii"))
        reader = zlib.decompressobj()
        text = reader.decompress(packed, MAX_REASONING_BYTES)
        return text.decode() if reader.eof else None
    except (binascii.Error, UnicodeError, ValueError, zlib.error):
        return None
