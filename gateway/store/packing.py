"""Values as they are kept: deflated where that saves something. Knows not what they mean.

A packed value begins with zlib's first byte, with which no MessagePack map begins.
"""

from __future__ import annotations

import asyncio
import zlib

PACKED_BYTES = 1024
"""Smaller values stay as they are."""

INLINE_BYTES = 65_536
"""Larger ones are packed and unpacked in a thread."""

_MARK = zlib.compress(b"")[:1]


async def pack(value: bytes) -> bytes:
    """A MessagePack map, as it is to be kept."""
    if len(value) < PACKED_BYTES:
        return value
    if len(value) <= INLINE_BYTES:
        return zlib.compress(value)
    return await asyncio.to_thread(zlib.compress, value)


async def unpack(kept: bytes) -> bytes:
    """A MessagePack map that was kept, packed or not."""
    if not kept.startswith(_MARK):
        return kept
    if len(kept) <= INLINE_BYTES // 4:
        return zlib.decompress(kept)
    return await asyncio.to_thread(zlib.decompress, kept)
