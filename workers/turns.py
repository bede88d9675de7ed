"""All turns that have not ended, where each of them is, and the one way out. Plans nothing.

A turn is in line, on a worker, or has ended in exactly one of Finished, Paused, Cancelled and Failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from kvcache.cache import Cache, Kind

from .agents import Agents
from .counters import Counters
from .errors import IntegrityError, TurnRefused
from .leaving import Leaving, discard
from .line import Line
from .messages import Cancelled, Event, Failed, Paused, TurnEnd
from .places import Places
from .sharing import InFlight
from .turn import Turn, TurnEvent

log = structlog.get_logger(__name__)

FOR_GOOD = frozenset({"row_fault", "out_of_pages", "grammar_error", "grammar_dead_end"})
"""Kinds of failure that follow from the turn itself: sending it again repeats the work and the failure."""


class Turns:
    """Who waits, who runs where, whose prefill it is, and what is to be told."""

    def __init__(self, cache: Cache, agents: Agents, line: Line, num_workers: int) -> None:
        self._cache = cache
        self.counters = Counters()
        self.agents = agents
        self.line = line
        self.leaving = Leaving(cache, agents)
        self.places = Places(num_workers)
        self.running: dict[int, Turn] = {}  # by worker
        self.flight: InFlight | None = None  # the prefill of one of the running
        self.is_short = False  # the next in line found no pages and nobody has given any back since
        self.rests_until: float | None = None  # nothing will change before, unless somebody comes
        self.events: list[TurnEvent] = []
        self._open: dict[tuple[str, int], Turn] = {}  # all that have not ended
        self._pending: list[Turn] = []  # whose grammars are being built; some may have ended
        self._num_received = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Turn]:
        return iter(list(self._open.values()))

    def find(self, run_id: str, attempt: int) -> Turn | None:
        return self._open.get((run_id, attempt))

    def add(self, turn: Turn, now: float) -> None:
        """A turn is in line from now on. One that is here already (told twice) is left as it is."""
        if self.find(turn.run_id, turn.attempt) is not None:
            return
        self.rests_until = None
        self._num_received += 1
        turn.number = self._num_received
        self._open[(turn.run_id, turn.attempt)] = turn
        self.line.add(turn)
        if turn.pending is not None:
            self._pending.append(turn)
        with self.isolated(turn, "planning_failed", now):
            self.agents.arrived(turn, now)
            if self.flight is not None:
                self.flight.add(turn)

    @property
    def awaits_grammars(self) -> bool:
        """Whether turns in line need one that is not built yet."""
        return bool(self._pending)

    def take_grammars(self, now: float) -> None:
        """Turns whose grammars are built may leave the line; those that cannot have theirs end."""
        for turn in self._pending:
            if turn.pending is None or self.find(turn.run_id, turn.attempt) is not turn:
                continue
            with self.isolated(turn, "planning_failed", now):
                try:
                    turn.constraint = turn.pending.poll(now)
                except TurnRefused as refused:
                    self.fail(turn, refused.kind, str(refused), now)
                if turn.constraint is not None:
                    turn.pending = None
        self._pending = [
            turn
            for turn in self._pending
            if turn.pending is not None and self.find(turn.run_id, turn.attempt) is turn
        ]

    def is_prefilling(self, turn: Turn) -> bool:
        return self.flight is not None and turn is self.flight.producer

    def abandon(self, now: float) -> None:
        """Forget every turn and agent without a word; what was computed stays in the cache."""
        for turn in self:
            self._leave(turn, now, keep=True, last=None)
        self.leaving.drop()
        self.agents.forget()
        self.events.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError when turns, workers and paths disagree. Between steps only."""
        for turn in self:
            if (turn.path is None) != (turn in self.line):
                raise IntegrityError(f"turn {turn.run_id}: it must either wait or hold a path")
        for worker, turn in self.running.items():
            num_missing = turn.num_tokens - (turn.path.num_tokens if turn.path else 0)
            fewest = 0 if self.is_prefilling(turn) else 1
            if worker != turn.worker or num_missing < fewest or (num_missing > 1 and fewest):
                raise IntegrityError(
                    f"turn {turn.run_id} on worker {worker}: {num_missing} tokens are not computed"
                )
        self.agents.check_integrity(self)

    @contextmanager
    def isolated(self, turn: Turn, kind: str, now: float) -> Iterator[None]:
        """Whatever goes wrong inside is logged and ends this turn alone."""
        try:
            yield
        except Exception:  # the border of one turn: ends in its terminal event
            if (turn.run_id, turn.attempt) not in self._open:
                raise  # it has ended already: what broke is the engine's
            log.exception("a turn failed", run=turn.run_id, attempt=turn.attempt, error_kind=kind)
            remedy = "change its prompt or settings" if kind in FOR_GOOD else "send it again"
            self.fail(turn, kind, f"this turn failed inside the engine: {remedy}", now)

    def cancel(self, turn: Turn, now: float, *, last: Kind | None) -> None:
        with self.isolated(turn, "cancel_failed", now):
            self.end(turn, Cancelled(usage=turn.usage(), timings=turn.timings(now)), now, last=last)

    def pause(self, turn: Turn, hold_seconds: float, now: float) -> None:
        """End an attempt so that a later one goes on from there; held text is that one's to send."""
        with self.isolated(turn, "pause_failed", now):
            turn.hold_seconds = hold_seconds
            self._leave(turn, now, keep=True, last=Kind.BORDER)
            self.tell(turn, Paused(usage=turn.usage(), timings=turn.timings(now)))

    def fail(self, turn: Turn, kind: str, message: str, now: float) -> None:
        failed = Failed(
            error=kind,
            message=message,
            retryable=kind not in FOR_GOOD,
            usage=turn.usage(),
            timings=turn.timings(now),
        )
        self.end(turn, failed, now, keep=False)

    def end(
        self, turn: Turn, end: TurnEnd, now: float, *, keep: bool = True, last: Kind | None = None
    ) -> None:
        """The one place where a turn ends; held text goes out unless something broke.

        last: the kind of checkpoint to take where it ends.
        """
        rest = turn.rest_of_text() if keep else None
        if rest is not None:
            self.tell(turn, rest)
        self._leave(turn, now, keep=keep, last=last)
        self.tell(turn, end)

    def _leave(self, turn: Turn, now: float, *, keep: bool, last: Kind | None) -> None:
        del self._open[(turn.run_id, turn.attempt)]
        if turn in self.line:
            self.line.remove(turn)
        if self.flight is not None:
            self.flight.remove(turn)
        try:
            self.agents.ended(turn, now, was_published=keep)
        except Exception:  # the turn has its end; what breaks here is only what is known of its agent
            log.exception("an agent was not told", run=turn.run_id, attempt=turn.attempt)
        self.release(turn, now, keep=keep, last=last, is_over=True)

    def release(self, turn: Turn, now: float, *, keep: bool, last: Kind | None, is_over: bool) -> None:
        """Take back worker and pages, if the turn holds them."""
        self.changed()
        if self.is_prefilling(turn):
            self.flight = None
        if turn.worker is not None and self.running.get(turn.worker) is turn:
            del self.running[turn.worker]
            self.places.give_back(turn.worker)
        path, turn.path, turn.copy, turn.restore = turn.path, None, None, None
        if path is None:
            self.leaving.hold(turn, now)
        elif keep:
            self.leaving.leave(turn, path, last, now, is_over=is_over)
        else:
            discard(self._cache, path)

    def changed(self) -> None:
        """Pages or prefixes came or went."""
        self.is_short = False
        self.rests_until = None
        self.line.changed()

    def tell(self, turn: Turn, event: Event) -> None:
        self.events.append(TurnEvent(turn.run_id, turn.attempt, event))
