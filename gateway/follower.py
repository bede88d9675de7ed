"""What a bus hands out, and one reader of one stream at its own pace.

Owns how a reader that fell behind catches up, and that it leaves the event loop to others. Knows entries, not
what they mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .errors import NoEngine
from .runs.event_ids import id_pair

if TYPE_CHECKING:
    from .bus import Bus

QUEUE_ENTRIES = 256
"""A follower further behind than this reads on by itself; one XREAD brings as many of a stream at most."""

MOST_AT_ONCE = 8
"""So many entries are handed out without a pause: others on the event loop have waited some milliseconds."""


class BusLost(NoEngine):
    """The bus does not answer; it is asked again in the background."""

    def __init__(self) -> None:
        super().__init__(
            "The message bus does not answer now. Try again in a few seconds.", kind="bus_unavailable"
        )


class StreamGone(Exception):
    """A followed stream is no longer there: the bus lost its data."""


class Entry(NamedTuple):
    """One stream entry: id as text and the encoded message."""

    id: str
    message: bytes


class Follower:
    """One reader of one stream at its own pace. Reads from the shared reader's queue; when that overflowed,
    from the stream itself until it has caught up. Close it.
    """

    def __init__(self, bus: Bus, key: str, after: str) -> None:
        self.key = key
        self.position = after  # of the last entry that was handed out
        self.behind = True
        self.gone = False
        self._bus = bus
        self._queue: deque[Entry] = deque()
        self._num_at_once = 0
        self._news = asyncio.Event()

    async def next(self) -> Entry:
        """The next entry; waits for it, also while the bus is lost. Raises StreamGone."""
        self._num_at_once += 1
        if self._num_at_once > MOST_AT_ONCE:
            self._num_at_once = 0
            await asyncio.sleep(0)
        while True:
            while self._queue:
                entry = self._queue.popleft()
                if id_pair(entry.id) > id_pair(self.position):
                    self.position = entry.id
                    return entry
            if self.behind:
                await self._catch_up()
                continue
            if self.gone:
                raise StreamGone(self.key)
            self._news.clear()
            self._num_at_once = 0
            await self._news.wait()

    def close(self) -> None:
        """Stops following. Safe to repeat."""
        self._bus.unfollow(self)

    def push(self, entries: Sequence[Entry]) -> None:
        """The shared reader's side: never waits."""
        if len(self._queue) + len(entries) > QUEUE_ENTRIES:
            self.behind = True
        if not self.behind:  # else newer entries would overtake those that it reads by itself
            self._queue.extend(entries)
        self._news.set()

    def tell_gone(self) -> None:
        """The stream vanished with the bus's data."""
        self.gone = True
        self._news.set()

    async def _catch_up(self) -> None:
        self.behind = False  # from here the shared reader queues again; doubles are dropped by id
        caught_up = False
        try:
            entries = await self._bus.read(self.key, self.position, QUEUE_ENTRIES)
            caught_up = len(entries) < QUEUE_ENTRIES
        except BusLost:
            entries = []
            await self._bus.wait_available()
        finally:
            self.behind = self.behind or not caught_up
        if self.behind:
            self._queue.clear()
        self._queue.extendleft(reversed(entries))
