"""The list of runs: by tenant and by session, newest first, for a week. Their status here is a hint for
lists; the truth is the fold of each run's stream.

Owns the order and one short note for each run. Knows no events.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from gateway.bus import Bus
from workers.messages import Usage

from .keys import WEEK_SECONDS, named_key, run_key

MAX_RUNS = 20_000
"""Of one tenant; a session lists as many as it has among them."""
PAGE = 256
AT_ONCE = 32
"""Notes that are read at once."""
MAX_PAGES = 40
"""How far one `find` looks for what fits its filter; the cursor goes on from there."""

ENDED = frozenset({"completed", "failed", "cancelled", "expired", "rejected", "derailed"})
"""The states that stay."""


class RunNote(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a list tells of a run. `created` is unix seconds."""

    run_id: str
    created: float
    tenant: str = ""
    session: str = ""
    agent: str = ""
    parent: str = ""  # the agent that called this one
    parent_run: str | None = None
    kind: str = "run"  # or "call": a client's chat, responses or messages request
    model: str = ""
    priority_class: str = ""
    label: str = ""
    status: str = "queued"
    usage: Usage = Usage()  # so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which runs; None is any."""

    session: str | None = None
    agent: str | None = None
    parent: str | None = None
    parent_run: str | None = None
    status: str | None = None
    priority_class: str | None = None
    kind: str | None = None

    def holds(self, note: RunNote) -> bool:
        """Whether a list under this filter has the run."""
        wanted = (
            (self.session, note.session),
            (self.agent, note.agent),
            (self.parent, note.parent),
            (self.parent_run, note.parent_run),
            (self.status, note.status),
            (self.priority_class, note.priority_class),
            (self.kind, note.kind),
        )
        return all(value is None or value == found for value, found in wanted)


@dataclass(frozen=True, slots=True)
class Page:
    """Runs, newest first. `cursor` asks for those behind them; None: there are no more."""

    notes: list[RunNote]
    cursor: str | None


class RunIndex:
    """All gateways' runs."""

    def __init__(self, bus: Bus, *, max_runs: int = MAX_RUNS, now: Callable[[], float] = time.time) -> None:
        self._bus = bus
        self._max_runs = max_runs
        self._now = now

    async def add(self, note: RunNote) -> None:
        """Lists a run. Safe to repeat; raises BusLost."""
        pipeline = self._bus.commands.pipeline(transaction=True)
        key = run_key(note.run_id, "note")
        pipeline.hset(key, "about", _encode(note))
        pipeline.hsetnx(key, "status", note.status)
        pipeline.expire(key, WEEK_SECONDS)
        for index in self._indexes(note):
            pipeline.zadd(index, {note.run_id: note.created})
            pipeline.expire(index, WEEK_SECONDS)
        pipeline.zrange(self._indexes(note)[0], 0, -self._max_runs - 1)
        pipeline.zrange(self._indexes(note)[0], "-inf", self._now() - WEEK_SECONDS, byscore=True)
        *_, surplus, old = await self._bus.execute(pipeline)
        if surplus or old:
            await self._trim(self._indexes(note)[0], [*surplus, *old])

    async def note(self, run_id: str, status: str, usage: Usage | None = None) -> None:
        """The run's status now, and its use so far if given; an end is never replaced. Raises BusLost."""
        pipeline = self._bus.commands.pipeline(transaction=True)
        key = run_key(run_id, "note")
        if status in ENDED:
            pipeline.hsetnx(key, "ended", status)
        pipeline.hset(key, "status", status)
        if usage is not None:
            pipeline.hset(key, "usage", _encode(usage))
        pipeline.expire(key, WEEK_SECONDS)
        await self._bus.execute(pipeline)

    async def get(self, run_ids: Sequence[str]) -> list[RunNote]:
        """The notes of those that are listed. Raises BusLost."""
        notes: list[RunNote] = []
        for start in range(0, len(run_ids), AT_ONCE):  # thousands at once would hold up everybody
            pipeline = self._bus.commands.pipeline(transaction=False)
            for run_id in run_ids[start : start + AT_ONCE]:
                pipeline.hmget(run_key(run_id, "note"), ["about", "status", "ended", "usage"])
            found = await self._bus.execute(pipeline)
            notes += [note for fields in found if (note := _note(fields)) is not None]
        return notes

    async def find(self, tenant: str, which: Filter, *, before: str | None = None, limit: int = 100) -> Page:
        """Up to `limit` of a tenant's runs behind a page's cursor. Raises BusLost; ValueError for a cursor
        that none of our pages had.
        """
        index = _tenant_index(tenant) if which.session is None else _session_index(tenant, which.session)
        position = None if before is None else _position(before)
        notes: list[RunNote] = []
        for _ in range(MAX_PAGES):
            found = await self._page(index, position)
            for note in await self.get([run_id for run_id, _ in found]):
                if which.holds(note):
                    notes.append(note)
                if len(notes) == limit:
                    return Page(notes, _cursor(note.run_id, note.created))
            if not found:
                return Page(notes, None)
            position = found[-1]
        return Page(notes, _cursor(*found[-1]))

    async def of_session(self, tenant: str, session: str) -> list[RunNote]:
        """All listed runs of a session, oldest first. Raises BusLost."""
        run_ids = await self._bus.answered(self._bus.commands.zrange(_session_index(tenant, session), 0, -1))
        return await self.get([run_id.decode() for run_id in run_ids])

    async def remove(self, note: RunNote) -> None:
        """Lists it no more. Safe to repeat; raises BusLost."""
        pipeline = self._bus.commands.pipeline(transaction=True)
        pipeline.delete(run_key(note.run_id, "note"))
        for index in self._indexes(note):
            pipeline.zrem(index, note.run_id)
        await self._bus.execute(pipeline)

    async def _page(self, index: str, after: tuple[str, float] | None) -> list[tuple[str, float]]:
        """The next entries behind one. Many may have the same time: they are ordered by their names then."""
        if after is None:
            return await self._entries(index, "+inf", 0)
        offset = 0
        while True:
            entries = await self._entries(index, str(after[1]), offset)
            behind = [entry for entry in entries if (entry[1], entry[0]) < (after[1], after[0])]
            if behind or len(entries) < PAGE:
                return behind
            offset += PAGE

    async def _entries(self, index: str, before: str, offset: int) -> list[tuple[str, float]]:
        found = await self._bus.answered(
            self._bus.commands.zrange(
                index, before, "-inf", desc=True, byscore=True, withscores=True, offset=offset, num=PAGE
            )
        )
        return [(run_id.decode(), score) for run_id, score in found]

    async def _trim(self, index: str, run_ids: Sequence[bytes]) -> None:
        names = [run_id.decode() for run_id in run_ids]
        for note in await self.get(names):
            await self.remove(note)
        await self._bus.answered(self._bus.commands.zrem(index, *names))

    def _indexes(self, note: RunNote) -> list[str]:
        indexes = [_tenant_index(note.tenant)]
        return [*indexes, _session_index(note.tenant, note.session)] if note.session else indexes


def _note(fields: Sequence[bytes | None]) -> RunNote | None:
    about, status, ended, usage = fields
    if about is None:
        return None
    told = ended or status or b""
    used = _decode_usage(usage) if usage is not None else Usage()
    return msgspec.structs.replace(_decode(about), status=told.decode(), usage=used)


def _cursor(run_id: str, created: float) -> str:
    return f"{created!r}.{run_id}"


def _position(cursor: str) -> tuple[str, float]:
    created, _, run_id = cursor.rpartition(".")
    if not math.isfinite(float(created)):
        raise ValueError(cursor)
    return run_id, float(created)


def _tenant_index(tenant: str) -> str:
    return named_key("runs", tenant)


def _session_index(tenant: str, session: str) -> str:
    return named_key("runs", tenant, session)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunNote).decode
_decode_usage = msgspec.msgpack.Decoder(Usage).decode
