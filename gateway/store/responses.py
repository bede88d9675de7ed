"""Responses of OpenAI's API that a caller may read or go on from: their input, and at the end their body.

Owns their shape and size in the bus. Knows neither runs nor items.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from gateway.bus import Bus

from .evictions import Evictions
from .keys import WEEK_SECONDS, run_key
from .shelf import Bound, Shelf

MAX_RESPONSE_BYTES = 1 << 20
"""Larger ones are not kept."""


class StoredResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`chain`: the ids of the responses that came before in the conversation, the first one first."""

    tenant: str = ""
    chain: tuple[str, ...] = ()
    items: bytes = b"[]"  # JSON: the input items of this one's own request
    body: bytes = b""  # JSON: the whole response; b"" before its end
    is_deleted: bool = False


DELETED = StoredResponse(is_deleted=True)


class ResponseStore:
    """Stored responses by id, for a week after they were last used."""

    def __init__(self, bus: Bus, *, max_bytes: int = 24 << 20, evictions: Evictions | None = None) -> None:
        self._shelf = Shelf(bus, "responses", Bound(max_bytes, WEEK_SECONDS, evictions), key=_key)

    async def put(self, response: str, stored: StoredResponse) -> None:
        """Keeps it, and all that its conversation needs as long. A repeat replaces. Raises BusLost."""
        await self._shelf.put(response, _encode(stored), stored.chain)

    async def end(self, response: str, stored: StoredResponse) -> bool:
        """Keeps it in the place of its beginning; False where that is gone, or deleted. Raises BusLost."""
        return await self._shelf.replace(response, _encode(stored), _is_there, stored.chain)

    async def delete(self, response: str, *, is_told: bool = False) -> None:
        """It cannot be read any more, if it is there, or if its run's events tell it as yet (`is_told`). Safe
        to repeat; raises BusLost.
        """
        if is_told:
            await self.put(response, DELETED)
        else:
            await self._shelf.replace(response, _encode(DELETED), _is_there)

    async def get(self, responses: Sequence[str]) -> list[StoredResponse | None]:
        """None for each that is not there, or no more. Raises BusLost."""
        return [None if found is None else _read(found) for found in await self._shelf.get(responses)]


def fits(stored: StoredResponse) -> bool:
    """Whether it is small enough to be kept."""
    return len(stored.items) + len(stored.body) <= MAX_RESPONSE_BYTES


def _key(response: str) -> str:
    return run_key(response, "response")


def _is_there(encoded: bytes) -> bool:
    found = _read(encoded)
    return found is not None and not found.is_deleted


def _read(encoded: bytes) -> StoredResponse | None:
    try:
        return _decode(encoded)
    except msgspec.MsgspecError:  # a newer gateway's
        return None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredResponse).decode
