"""The token ids of runs, for forks and further turns: each kept as what it adds to an earlier run's.

Owns the records and their chains. A record never changes, so what is based on it stays true; a run's newest
ids are a new record. Knows tokens as numbers only.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from gateway.bus import Bus

from .evictions import Evictions
from .keys import DAY_SECONDS, run_key
from .shelf import Bound, Shelf

MAX_CHAIN = 32
"""A record behind so many others is kept whole."""

INLINE_BYTES = 65_536
"""More ids are packed and unpacked in a thread."""

Given = TypeVar("Given")


class _Link(msgspec.Struct, frozen=True, array_like=True):
    """A record that another one is based on. `shared`: how many ids it took itself from the one before."""

    name: str
    shared: int


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """The first `shared` ids are those of the last record in `chain`; `delta` holds the others."""

    shared: int
    delta: bytes  # the uint32s' lowest bytes, then their second ones ..., deflated
    chain: tuple[_Link, ...] = ()  # from the one that is whole to the one that this is based on


@dataclass(frozen=True, slots=True)
class _Known:
    """A run's newest record as this process remembers it."""

    ids: bytes
    link: _Link
    chain: tuple[_Link, ...]

    def chain_for(self, shared: int) -> tuple[_Link, ...]:
        """What a record with so many ids in common is based on: the earliest one that holds them all."""
        links = [*self.chain, self.link]
        while len(links) > 1 and shared <= links[-1].shared:
            links.pop()
        return tuple(links)


class IdStore:
    """Ids by run, for a day after they were last used. All together stay under a bound, the oldest going
    first; then `get` finds nothing.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        max_bytes: int = 96 << 20,
        recent_bytes: int = 32 << 20,
        evictions: Evictions | None = None,
    ) -> None:
        self._bus = bus
        self._shelf = Shelf(bus, "ids", Bound(max_bytes, DAY_SECONDS, evictions))
        self._recent = _Recent(recent_bytes)

    async def put(self, run_id: str, ids: bytes, bases: Sequence[str] = ()) -> None:
        """Keeps a run's ids (little-endian uint32, prompt and all that was generated) as they are now.

        `bases`: runs that are likely to begin as it does; its own earlier ids are looked at anyway. Raises
        BusLost.
        """
        name = f"{run_id}:{hashlib.blake2b(ids, digest_size=8).hexdigest()}"
        known = await self._put_before(run_id, name) or await self._put_new(run_id, name, ids, bases)
        pipeline = self._bus.commands.pipeline(transaction=True)
        pipeline.set(_head_key(run_id), name, ex=DAY_SECONDS)
        pipeline.exists(_removed_key(run_id))
        *_, is_removed = await self._bus.execute(pipeline)
        if is_removed:
            await self.remove(run_id)
        else:
            self._recent.add(run_id, known)

    async def get(self, run_id: str) -> bytes | None:
        """A run's newest ids; None when they were never kept, or are gone. Raises BusLost."""
        known = await self._known(run_id)
        return None if known is None else known.ids

    async def remove(self, run_id: str) -> None:
        """No `get` finds the run's ids any more, though a `put` is on its way; what others are based on
        stays. Raises BusLost.
        """
        self._recent.remove(run_id)
        pipeline = self._bus.commands.pipeline(transaction=True)
        pipeline.set(_removed_key(run_id), b"", ex=DAY_SECONDS)
        pipeline.delete(_head_key(run_id))
        await self._bus.execute(pipeline)

    async def _put_before(self, run_id: str, name: str) -> _Known | None:
        """The record of that name, renewed. Written anew it would be based on itself, as the run's newest."""
        known = self._recent.get(run_id)
        if known is None or known.link.name != name:
            known = await self._read(name)
        if known is None:
            return None
        names = [link.name for link in (*known.chain, known.link)]
        return known if await self._shelf.renew(names) else None

    async def _put_new(self, run_id: str, name: str, ids: bytes, bases: Sequence[str]) -> _Known:
        shared, chain = await self._best_base(name, ids, dict.fromkeys((run_id, *bases)))
        delta = await _in_thread(_pack, len(ids) - 4 * shared, ids[4 * shared :])
        record = _Record(shared, delta, chain)
        await self._shelf.put(name, _encode(record), used=[link.name for link in chain])
        return _Known(ids, _Link(name, shared), chain)

    async def _best_base(
        self, name: str, ids: bytes, run_ids: Iterable[str]
    ) -> tuple[int, tuple[_Link, ...]]:
        """How many ids are another record's, and the chain to it; nothing where that grows too long, or where
        it has lost the record that is to be written.
        """
        best, best_chain = 0, tuple[_Link, ...]()
        for run_id in run_ids:
            known = await self._known(run_id)
            shared = shared_ids(ids, known.ids) if known is not None else 0
            if known is not None and shared > best:
                best, best_chain = shared, known.chain_for(shared)
        is_circle = any(link.name == name for link in best_chain)
        return (0, ()) if is_circle or len(best_chain) >= MAX_CHAIN else (best, best_chain)

    async def _known(self, run_id: str) -> _Known | None:
        head = await self._bus.get(_head_key(run_id))
        if head is None:
            self._recent.remove(run_id)
            return None
        known = self._recent.get(run_id)
        if known is None or known.link.name != head.decode():
            known = await self._read(head.decode())
            if known is not None:
                self._recent.add(run_id, known)
        return known

    async def _read(self, name: str) -> _Known | None:
        (encoded,) = await self._shelf.get([name])
        if encoded is None:
            return None
        record = _decode(encoded)
        before = await self._shelf.get([link.name for link in record.chain])
        records = [_decode(part) for part in before if part is not None]
        if len(records) < len(record.chain):
            return None
        records.append(record)
        ids = await _in_thread(_joined, sum(len(part.delta) for part in records), records)
        return _Known(ids, _Link(name, record.shared), record.chain)


class _Recent:
    """The ids that were used last, up to so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def get(self, run_id: str) -> _Known | None:
        if run_id in self._known:
            self._known.move_to_end(run_id)
        return self._known.get(run_id)

    def add(self, run_id: str, known: _Known) -> None:
        self.remove(run_id)
        self._known[run_id] = known
        self._num_bytes += len(known.ids)
        while self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._known)))

    def remove(self, run_id: str) -> None:
        known = self._known.pop(run_id, None)
        self._num_bytes -= len(known.ids) if known is not None else 0


def shared_ids(one: bytes, other: bytes) -> int:
    """How many ids both begin with."""
    length = min(len(one), len(other)) // 4
    differs = np.frombuffer(one, "<u4", length) != np.frombuffer(other, "<u4", length)
    return int(differs.argmax()) if differs.any() else length


async def _in_thread(work: Callable[[Given], bytes], num_bytes: int, given: Given) -> bytes:
    return work(given) if num_bytes <= INLINE_BYTES else await asyncio.to_thread(work, given)


def _joined(records: Sequence[_Record]) -> bytes:
    ids = b""
    for record in records:
        ids = ids[: 4 * record.shared] + _unpack(record.delta)
    return ids


def _pack(ids: bytes) -> bytes:
    """A third of their size for text: equal bytes stand together, the highest are mostly 0."""
    return zlib.compress(np.frombuffer(ids, np.uint8).reshape(-1, 4).T.tobytes(), 1)


def _unpack(packed: bytes) -> bytes:
    return np.frombuffer(zlib.decompress(packed), np.uint8).reshape(4, -1).T.tobytes()


def _head_key(run_id: str) -> str:
    return run_key(run_id, "ids")


def _removed_key(run_id: str) -> str:
    return run_key(run_id, "ids-removed")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode
