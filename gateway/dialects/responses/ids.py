"""Ids of responses, their items and opaque reasoning: derived, so that each telling of a run has the same."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib

MAX_REASONING_BYTES = 4 << 20
_SEAL = "ttr1."


def response_id(run_id: str) -> str:
    """`resp_<32 hex>` of `run-<32 hex>`."""
    return f"resp_{run_id.removeprefix('run-')}"


def run_id_of(response: str) -> str | None:
    """The run behind a response's id; None for what is no id of ours."""
    found = re.fullmatch(r"resp_([0-9a-f]{32})", response)
    return f"run-{found[1]}" if found is not None else None


def item_id(prefix: str, response: str, index: int | str) -> str:
    """Of one item of a response, such as `msg_<48 hex>`."""
    digest = hashlib.blake2b(f"{response}/{index}".encode(), digest_size=24).hexdigest()
    return f"{prefix}_{digest}"


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
