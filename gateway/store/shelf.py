"""Values of one kind that may never fill the bus: each expires, and the oldest go when all are too many.

Owns their keys, sizes and order in the bus. Knows nothing of what they mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio.client import Pipeline

from gateway.bus import Bus
from workers.messages import KEY_PREFIX

from .evictions import Evictions
from .watched import watched

SWEEP_SHARE = 16
"""A gateway looks at the sum of all sizes after it has added this part of what is allowed."""

PAGE = 128
"""So many names are read at once."""

OVERHEAD_BYTES = 300
"""What a value costs beside itself: its key, and its names in the order and among the sizes."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What of a kind may be kept: the sum of the sizes, how long each, and who hears of what goes earlier."""

    max_bytes: int
    seconds: int
    evictions: Evictions | None = None


class Shelf:
    """Values under names. The sum of their sizes stays under the bound, up to a sixteenth per gateway."""

    def __init__(
        self,
        bus: Bus,
        kind: str,
        bound: Bound,
        *,
        key: Callable[[str], str] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._kind = kind
        self._evictions = bound.evictions or Evictions()
        self._key = key or (lambda name: f"{KEY_PREFIX}{kind}:{name}")
        self._order = f"{KEY_PREFIX}{kind}:order"  # ZSET: name -> unix seconds of its last use
        self._sizes = f"{KEY_PREFIX}{kind}:sizes"  # ZSET: name -> bytes
        self._max_bytes = bound.max_bytes
        self._seconds = bound.seconds
        self._now = now
        self._unswept = bound.max_bytes  # the first addition looks at what is there

    async def put(self, name: str, value: bytes, used: Sequence[str] = ()) -> None:
        """Keeps a value; those in `used` count as used now, and so live as long. Raises BusLost."""
        pipeline = self._bus.commands.pipeline(transaction=True)
        self._add(pipeline, name, value, used)
        await self._bus.execute(pipeline)
        await self.sweep_if_due()

    async def replace(
        self, name: str, value: bytes, may: Callable[[bytes], bool], used: Sequence[str] = ()
    ) -> bool:
        """Puts a value in the place of one that is there and may go, in one step: whether it did. Raises
        BusLost.
        """

        async def decide(pipeline: Pipeline) -> bool:
            found: Any = await self._bus.answered(pipeline.get(self._key(name)))
            if found is None or not may(found):
                return False
            pipeline.multi()  # type: ignore[no-untyped-call]
            self._add(pipeline, name, value, used)
            return True

        is_done = await watched(self._bus, [self._key(name)], decide)
        await self.sweep_if_due()
        return is_done

    async def renew(self, names: Sequence[str]) -> bool:
        """Counts values as used now; whether all are there. Raises BusLost."""
        pipeline = self._bus.commands.pipeline(transaction=True)
        for name in names:
            pipeline.expire(self._key(name), self._seconds)
        pipeline.zadd(self._order, dict.fromkeys(names, self._now()), xx=True)
        return all((await self._bus.execute(pipeline))[:-1])

    async def get(self, names: Sequence[str]) -> list[bytes | None]:
        """The values, None for those that are gone. Raises BusLost."""
        if not names:
            return []
        values: list[bytes | None] = await self._bus.answered(
            self._bus.commands.mget([self._key(name) for name in names])
        )
        return values

    async def remove(self, names: Sequence[str]) -> None:
        """Lets values go. Safe to repeat; raises BusLost."""
        if names:
            pipeline = self._bus.commands.pipeline(transaction=True)
            pipeline.delete(*(self._key(name) for name in names))
            pipeline.zrem(self._order, *names)
            pipeline.zrem(self._sizes, *names)
            await self._bus.execute(pipeline)

    def note(self, pipeline: Pipeline, name: str, num_bytes: int, *, grows: bool = False) -> None:
        """Adds to a pipeline that a value is used now and so large, or (`grows`) so much larger."""
        size = num_bytes if grows else num_bytes + OVERHEAD_BYTES
        pipeline.zadd(self._order, {name: self._now()})
        if grows:
            pipeline.zincrby(self._sizes, size, name)
        else:
            pipeline.zadd(self._sizes, {name: size})
        self._unswept += size

    def _add(self, pipeline: Pipeline, name: str, value: bytes, used: Sequence[str]) -> None:
        pipeline.set(self._key(name), value, ex=self._seconds)
        self.note(pipeline, name, len(value))
        if used:
            pipeline.zadd(self._order, dict.fromkeys(used, self._now()), xx=True)
            for key in map(self._key, used):
                pipeline.expire(key, self._seconds)

    async def sweep_if_due(self) -> None:
        """Forgets what has expired, then lets the oldest go until the rest fits. Raises BusLost."""
        if self._unswept < self._max_bytes // SWEEP_SHARE:
            return
        self._unswept = 0
        total = await self._total()
        while surplus := await self._surplus(total):
            total -= sum(surplus.values())
            await self.remove(list(surplus))

    async def _total(self) -> int:
        """The sum of all sizes, page by page: tens of thousands at once would hold up everybody."""
        total, start = 0.0, 0
        while True:
            page = await self._page(self._sizes, start)
            total += sum(size for _, size in page)
            start += len(page)
            if len(page) < PAGE:
                return int(total)

    async def _surplus(self, total: int) -> dict[str, int]:
        """Those of the oldest that must go, with their sizes; none when all is young and small enough."""
        oldest = await self._page(self._order, 0)
        if not oldest:
            return {}
        names = [name.decode() for name, _ in oldest]
        sizes = await self._bus.answered(self._bus.commands.zmscore(self._sizes, names))
        expired_before, surplus = self._now() - self._seconds, dict[str, int]()
        for name, (_, used), size in zip(names, oldest, sizes, strict=True):
            if used >= expired_before and total <= self._max_bytes:
                break
            surplus[name] = int(size or 0)
            total -= int(size or 0)
        early = [
            used
            for name, (_, used) in zip(names, oldest, strict=True)
            if used >= expired_before and name in surplus
        ]
        if early:
            self._evictions.went(self._kind, len(early), self._now() - early[-1])
        return surplus

    async def _page(self, key: str, start: int) -> list[tuple[bytes, float]]:
        page: list[tuple[bytes, float]] = await self._bus.answered(
            self._bus.commands.zrange(key, start, start + PAGE - 1, withscores=True)
        )
        return page
