"""One stream for a whole session: what happened to each of its runs, in one order that a reader can resume.

Owns the stream and that each event comes into it once. Knows no event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from gateway.bus import Bus, Entry, Follower
from gateway.runs.event_ids import id_pair
from workers.messages import EVENT_FIELD

from .evictions import Evictions
from .keys import WEEK_SECONDS, named_key, run_key
from .shelf import Bound, Shelf
from .watched import watched

MAX_ENTRIES = 40_000
"""Of one session: the oldest are cut off, which a reader that has not seen them is told."""

MAX_EVENT_BYTES = 4096
"""A larger event stands in the log with an empty body; its run's own stream has it whole."""

MARKER_SECONDS = 7_200
"""How long it is remembered what of an ended run is in the log."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event. `id` is the log's own, to resume from; `event` is its JSON, empty where it was too large."""

    id: str
    run_id: str
    event_id: str  # in the run's own stream
    event: bytes


class _Logged(msgspec.Struct, frozen=True, array_like=True):
    run_id: str
    event_id: str
    event: bytes


class SessionLog:
    """The logs of all sessions. All together stay under a bound, the least recently used going first."""

    def __init__(
        self,
        bus: Bus,
        *,
        max_bytes: int = 32 << 20,
        max_entries: int = MAX_ENTRIES,
        evictions: Evictions | None = None,
    ) -> None:
        self._bus = bus
        self._max_entries = max_entries
        self._shelf = Shelf(bus, "logs", Bound(max_bytes, WEEK_SECONDS, evictions), key=lambda name: name)

    async def mirror(
        self,
        where: tuple[str, str],
        run_id: str,
        events: Sequence[tuple[str, bytes]],
        *,
        is_last: bool = False,
    ) -> int:
        """Adds a run's events (its event id, JSON), in their order, to the log of `where` (tenant, session).

        Exactly once each: those that are there already, whoever wrote them, are left out. How many were
        added. `is_last`: the run's end is among them. Raises BusLost; then tell them all again.
        """
        log, marker = _log_key(*where), run_key(run_id, "mirrored")

        async def decide(pipeline: Pipeline) -> int:
            position: Any = await self._bus.answered(pipeline.get(marker))
            before = id_pair((position or b"0-0").decode())
            news = [(event_id, event) for event_id, event in events if id_pair(event_id) > before]
            if news:
                self._add(pipeline, log, run_id, news)
                pipeline.set(marker, news[-1][0], ex=MARKER_SECONDS if is_last else WEEK_SECONDS)
            return len(news)

        added = await watched(self._bus, [marker], decide)
        await self._shelf.sweep_if_due()
        return added

    async def read(
        self, tenant: str, session: str, after: str = "0-0", count: int | None = None
    ) -> list[LogEntry]:
        """Entries behind an id, oldest first. Raises BusLost."""
        entries = await self._bus.read(_log_key(tenant, session), after, count)
        return [log_entry(entry) for entry in entries]

    async def lacks(self, tenant: str, session: str, after: str) -> bool:
        """Whether events behind `after` were cut off, or the log is another than it was. Raises BusLost."""
        try:
            info = await self._bus.answered(self._bus.commands.xinfo_stream(_log_key(tenant, session)))
        except ResponseError:  # there is no such key
            return after != "0-0"
        if id_pair(after) > id_pair(info["last-generated-id"].decode()):
            return True
        is_cut = info["entries-added"] > info["length"]
        return is_cut and id_pair(after) < id_pair(info["first-entry"][0].decode())

    async def exists(self, tenant: str, session: str) -> bool:
        """Whether there is a log. Raises BusLost."""
        return bool(await self._bus.answered(self._bus.commands.exists(_log_key(tenant, session))))

    def follow(self, tenant: str, session: str, after: str) -> Follower:
        """A follower of an existing log; `log_entry` makes its entries readable."""
        return self._bus.follow(_log_key(tenant, session), after)

    def _add(self, pipeline: Pipeline, log: str, run_id: str, news: Sequence[tuple[str, bytes]]) -> None:
        pipeline.multi()  # type: ignore[no-untyped-call]
        num_bytes = 0
        for event_id, event in news:
            kept = event if len(event) <= MAX_EVENT_BYTES else b""
            message = _encode(_Logged(run_id, event_id, kept))
            fields: dict[Any, Any] = {EVENT_FIELD: message}
            pipeline.xadd(log, fields, maxlen=self._max_entries, approximate=True)
            num_bytes += len(message)
        pipeline.expire(log, WEEK_SECONDS)
        self._shelf.note(pipeline, log, num_bytes, grows=True)


def log_entry(entry: Entry) -> LogEntry:
    """A stream's entry as the log means it."""
    logged = _decode(entry.message)
    return LogEntry(entry.id, logged.run_id, logged.event_id, logged.event)


def _log_key(tenant: str, session: str) -> str:
    return named_key("session-log", tenant, session)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Logged).decode
