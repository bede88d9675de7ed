"""The `signature` of a thinking block: whose thought it is, and the thought where it is not shown. Pure.

Opaque to clients, which send it back with the block. It proves nothing: what comes back is a client's text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from dataclasses import dataclass

VERSION = b"\x01"
RUN_BYTES = DIGEST_BYTES = 16
MAX_THOUGHT_BYTES = 4 << 20
"""A signature that unpacks to more is no longer believed: a thought is at most a context's text."""


@dataclass(frozen=True, slots=True)
class Thought:
    """A thinking block that came back. `is_changed`: it is not what was signed."""

    text: str
    is_changed: bool = False


def sign(run_id: str, text: str, *, carries_text: bool = False) -> str:
    """The signature of a run's thought; equal thoughts of a run have equal ones."""
    run = bytes.fromhex(run_id.removeprefix("run-"))
    carried = zlib.compress(_encoded(text)) if carries_text else b""
    return base64.b64encode(VERSION + run + _digest(run, text) + carried).decode()


def thought_of(text: str, signature: str) -> Thought:
    """The thought of a block as it came back. Signatures of others say nothing."""
    try:
        signed = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        return Thought(text)
    head = len(VERSION) + RUN_BYTES
    if not signed.startswith(VERSION) or len(signed) < head + DIGEST_BYTES:
        return Thought(text)
    run, digest = signed[len(VERSION) : head], signed[head : head + DIGEST_BYTES]
    found = text or _carried(signed[head + DIGEST_BYTES :])
    return Thought(found, is_changed=_digest(run, found) != digest)


def _digest(run: bytes, text: str) -> bytes:
    return hashlib.blake2b(run + _encoded(text), digest_size=DIGEST_BYTES).digest()


def _carried(packed: bytes) -> str:
    try:
        return zlib.decompressobj().decompress(packed, MAX_THOUGHT_BYTES).decode(errors="replace")
    except zlib.error:
        return ""


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")
