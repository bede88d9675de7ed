"""Writes the events of one incarnation to their runs' streams, in order and once, whatever the bus does.

Owns the thread that writes and the lock over the backlog. Does not know what a turn computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import ConnectionError as BusConnectionError
from redis.exceptions import RedisError, ResponseError

from metrics.logs import about_run

from .backlog import Backlog, Entry, TurnKey
from .messages import EVENT_FIELD, Event, inbox_key, run_events_key
from .threads import watched_thread

BUFFER_SECONDS = 10.0
BUFFER_BYTES = 16 << 20
"""What is kept back of either while the bus is lost, before the engine pauses."""

_RETRY_SECONDS = 0.2
_FENCED = ("equal or smaller", "exhausted the last possible ID")
"""The bus's words for an id that comes too late: after a later attempt's, or after the run's end."""

log = structlog.get_logger(__name__)


class Outbox:
    """`may_write` tells whether the lease holds; `on_refused` hears of turns that the bus has fenced.

    `writer` makes the client of the thread that writes; it calls the function it is given at each connection.
    """

    def __init__(
        self,
        client: Redis,
        writer: Callable[[Callable[[], None]], Redis],
        engine_id: str,
        *,
        may_write: Callable[[], bool],
        on_refused: Callable[[TurnKey], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._client = client
        self._writer = writer(self._on_connect)
        self._inbox_key = inbox_key(engine_id)
        self._may_write = may_write
        self._on_refused = on_refused
        self._backlog = Backlog()
        self._changed = threading.Condition()  # over the backlog and all below
        self._stalled_since: float | None = None
        self._is_closing = False
        self._is_abandoned = False
        self._thread = watched_thread("outbox", self._run, on_broken)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def open(self, key: TurnKey, inbox_id: bytes) -> bool:
        """A turn begins; False when it is open already."""
        with self._changed:
            return self._backlog.open(key, inbox_id)

    def attach(self, key: TurnKey, inbox_id: bytes) -> bool:
        """A further message of an open turn, deleted at its end; False when there is no such turn."""
        with self._changed:
            return self._backlog.attach(key, inbox_id)

    def post(self, key: TurnKey, event: Event) -> None:
        """Takes one event; never blocks on the bus."""
        with self._changed:
            self._backlog.add(key, event, time.monotonic())
            self._changed.notify_all()

    def open_turns(self) -> list[TurnKey]:
        """Turns whose end has not been posted."""
        with self._changed:
            return self._backlog.open_turns()

    def wake(self) -> None:
        """The lease changed: look again at what may be written, and at who waits for room."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_room(self, is_over: Callable[[], bool]) -> None:
        """Blocks while more is kept back than allowed, until there is room or `is_over` (after a wake)."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room() or is_over())

    def close(self, seconds: float) -> bool:
        """Writes what is left, for at most so long. False when something stays unsent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout=seconds)
        is_empty = not self._thread.is_alive()
        self.abandon()
        return is_empty

    def abandon(self) -> None:
        """Writes nothing more."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()

    def replay(self) -> None:
        """The bus has restarted and may have forgotten what it acknowledged: writes that again."""
        with self._changed:
            self._backlog.replay()
            self._changed.notify_all()

    def _on_connect(self) -> None:
        """A new connection may lead to a restarted bus: before a later event goes there, the last ones do."""
        with self._changed:
            if self._backlog.has_sent:
                raise BusConnectionError("the connection is new: the last events go out again first")

    def _has_room(self) -> bool:
        if self._stalled_since is None or self._is_abandoned:
            return True
        is_late = time.monotonic() - self._stalled_since > BUFFER_SECONDS
        return not is_late and self._backlog.num_bytes < BUFFER_BYTES

    def _run(self) -> None:
        with self._writer:
            while (batch := self._next_batch()) is not None:
                try:
                    refused = self._write(batch)
                except (RedisError, OSError) as error:
                    self._keep_back(str(error))
                else:
                    self._settle(batch, refused)

    def _next_batch(self) -> list[Entry] | None:
        """Waits for entries that may be written; None at the end."""
        with self._changed:
            while not self._is_abandoned:
                wait = self._backlog.due_in(time.monotonic())
                if wait is None and self._is_closing:
                    return None
                if wait == 0.0:
                    if self._may_write():
                        return self._backlog.take(time.monotonic())
                    self._stalled_since = self._stalled_since or time.monotonic()
                    wait = _RETRY_SECONDS
                self._changed.wait(wait)
        return None

    def _write(self, batch: list[Entry]) -> set[TurnKey]:
        """One transaction: all of it happens or nothing, so no later event can overtake an earlier one.

        Returns the turns that the bus refuses. Raises RedisError: send all of it again.
        """
        with self._writer.pipeline(transaction=True) as pipeline:
            for entry in batch:
                stream = run_events_key(entry.key.run_id)
                pipeline.xadd(stream, {EVENT_FIELD: entry.payload}, id=entry.id, nomkstream=True)
            replies = pipeline.execute(raise_on_error=False)
        refused: set[TurnKey] = set()
        finished: list[bytes] = []
        for entry, reply in zip(batch, replies, strict=True):
            if entry.key in refused or not self._is_in_stream(entry, reply):
                refused.add(entry.key)
            else:
                finished.extend(entry.inbox_ids)
        if finished:
            self._writer.xdel(self._inbox_key, *finished)
        return refused

    def _is_in_stream(self, entry: Entry, reply: object) -> bool:
        if not isinstance(reply, ResponseError):
            return reply is not None  # nil: there is no such stream any more
        if not any(words in str(reply) for words in _FENCED):
            with about_run(entry.key.run_id):
                log.error("the bus refused an event", error=str(reply))
            return False
        # Written by an earlier try whose answer was lost, or the gateway's verdict came before it.
        found: Any = self._writer.xrange(run_events_key(entry.key.run_id), min=entry.id, max=entry.id)
        return bool(found) and found[0][1] == {EVENT_FIELD: entry.payload}

    def _keep_back(self, error: str) -> None:
        with self._changed:
            if self._stalled_since is None:
                log.warning("events are kept back", error=error)
                self._stalled_since = time.monotonic()
            self._backlog.replay()
            self._changed.wait(_RETRY_SECONDS)

    def _settle(self, batch: Iterable[Entry], refused: set[TurnKey]) -> None:
        inbox_ids: list[bytes] = []
        with self._changed:
            self._stalled_since = None
            for key in refused:
                inbox_ids.extend(self._backlog.cut(key))
            self._backlog.settle(batch, time.monotonic())
            still_open = [key for key in refused if self._backlog.is_open(key)]
            self._changed.notify_all()
        for key in still_open:
            with about_run(key.run_id):
                log.info("turn fenced by the bus", attempt=key.attempt)
                self._on_refused(key)
        if inbox_ids:
            self.delete(inbox_ids)

    def delete(self, inbox_ids: Iterable[bytes]) -> None:
        """Deletes messages that nothing will come of. Best effort: the next incarnation drops the rest."""
        try:
            self._client.xdel(self._inbox_key, *inbox_ids)
        except (RedisError, OSError) as error:
            log.warning("inbox entries stay until the next start", error=str(error))
