"""Which turns run in the next step and what its result means for them. Plain Python: no model, no clock.

A turn waits without a worker or pages; it gets both when its prefill starts, one prefill at a time, so that
it finds what the prefill before it published. Each ends in exactly one of Finished, Cancelled and Failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from kvcache.cache import Cache, Opening, PageCopy

from .counters import Counters, EngineCounts
from .errors import IntegrityError
from .messages import Cancel, CancelAgents, Cancelled, Event, Failed, Finished, Progress, Started, TurnEnd
from .pace import Pace
from .places import Places
from .plan import Segment, SegmentResult, StepPlan, StepResult
from .turn import Turn, TurnEvent

log = structlog.get_logger(__name__)

FOR_GOOD = frozenset({"row_fault", "out_of_pages"})
"""Kinds of failure that follow from the turn itself: sending it again repeats the work and the failure."""


class Scheduler:
    """Owns the queue, the workers and every turn's path in the cache."""

    def __init__(self, cache: Cache, pace: Pace, *, num_workers: int) -> None:
        self.counters = Counters()
        self._cache = cache
        self._pace = pace
        self._turns: dict[tuple[str, int], Turn] = {}  # all that have not ended
        self._waiting: deque[Turn] = deque()
        self._running: dict[int, Turn] = {}  # by worker
        self._prefilling: Turn | None = None  # one of the running
        self._places = Places(num_workers)
        self._is_short = False  # the first in line found no pages and nobody has given any back since
        self._num_received = 0
        self._events: list[TurnEvent] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, or events wait to be taken."""
        return bool(self._turns or self._events)

    def submit(self, turn: Turn) -> None:
        """Queue a turn. One that is here already (a message delivered twice) is left as it is."""
        key = (turn.run_id, turn.attempt)
        if key in self._turns:
            return
        self._num_received += 1
        turn.number = self._num_received
        self._turns[key] = turn
        self._waiting.append(turn)

    def cancel(self, cancel: Cancel, now: float) -> None:
        """End a turn wherever it is; what it computed stays in the cache. Nothing for an unknown turn."""
        turn = self._turns.get((cancel.run_id, cancel.attempt))
        if turn is not None:
            with self._isolated(turn, "cancel_failed", now):
                self._end(turn, Cancelled(usage=turn.usage(), timings=turn.timings(now)))

    def cancel_agents(self, cancel: CancelAgents, now: float) -> None:
        """End the turns of one agent and of all its descendants."""
        turns = [t for t in self._turns.values() if (t.tenant, t.session) == (cancel.tenant, cancel.session)]
        agents, size = {cancel.agent}, 0
        while len(agents) != size:
            size = len(agents)
            agents |= {turn.agent for turn in turns if turn.parent in agents}
        for turn in turns:
            if turn.agent in agents:
                self.cancel(Cancel(run_id=turn.run_id, attempt=turn.attempt), now)

    def refuse(self, run_id: str, attempt: int, failed: Failed) -> None:
        """Tell the end of a turn that never got in."""
        self._events.append(TurnEvent(run_id, attempt, failed))

    def counts(self) -> EngineCounts:
        """How turns, pages and speed stand."""
        return EngineCounts.of(
            self._cache.stats(), self.counters, self._pace, len(self._running), len(self._waiting)
        )

    def take_events(self) -> list[TurnEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when nothing can run (its events may say why)."""
        self._reserve_for_decoding(now)
        copy = None
        if self._prefilling is None:
            copy = self._start_next(now)
        segments = [
            _segment(turn, turn.num_tokens)
            for _, turn in sorted(self._running.items())
            if turn is not self._prefilling
        ]
        if self._prefilling is not None:
            num_rows = self._pace.chunk_rows(num_decoding=len(segments))
            end = _chunk_end(self._prefilling, num_rows, self._cache.page_tokens)
            segments.append(_segment(self._prefilling, end))
        return StepPlan((copy,) if copy else (), tuple(segments)) if segments else None

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take an evaluated step's results; a faulty row ends its own turn and no other."""
        self.counters.num_steps += 1
        self._pace.observe(plan, result.seconds)
        for segment, outcome in zip(plan.segments, result.segments, strict=True):
            turn = self._running[segment.worker]
            with self._isolated(turn, "row_fault", now):
                self._commit_segment(turn, segment, outcome, now)

    def fail_step(self, now: float) -> None:
        """A step failed and the pools with it: end all turns that hold pages, empty the tree."""
        self.counters.num_steps += 1
        for turn in list(self._running.values()):
            self._fail(
                turn, "step_failed", "the engine could not compute this step: send the call again", now
            )
        self._cache.clear()

    def running_ids(self) -> list[str]:
        """Run ids of the turns that have a worker."""
        return [turn.run_id for turn in self._running.values()]

    def abandon(self) -> None:
        """Forget every turn without a word and count from nothing; what they computed stays in the cache."""
        for turn in list(self._turns.values()):
            self._leave(turn, keep=True)
        self._events.clear()
        self.counters = Counters(num_evicted_before=self._cache.stats().num_evicted)

    def check_integrity(self) -> None:
        """Raises IntegrityError when turns, workers and paths disagree. Between steps only."""
        for turn in self._turns.values():
            if (turn.path is None) != (turn in self._waiting):
                raise IntegrityError(f"turn {turn.run_id}: it must either wait or hold a path")
        for worker, turn in self._running.items():
            num_missing = turn.num_tokens - (turn.path.num_tokens if turn.path else 0)
            if worker != turn.worker or num_missing < 1 or (num_missing > 1 and turn is not self._prefilling):
                raise IntegrityError(
                    f"turn {turn.run_id} on worker {worker}: {num_missing} tokens are not computed"
                )
        num_live = self._cache.stats().num_live
        if not self._running and num_live:
            raise IntegrityError(f"nobody runs and {num_live} pages are live")

    def _reserve_for_decoding(self, now: float) -> None:
        """Pages for each decoding turn's next row, the oldest first; the newest gives way where they lack.

        Even the only turn gives way to itself: that releases pages that it held twice, and it starts again
        with room for at least one more token.
        """
        for turn in sorted(self._running.values(), key=lambda turn: turn.number):
            if turn is self._prefilling:
                continue
            with self._isolated(turn, "planning_failed", now):
                while turn.path is not None and not self._cache.reserve(turn.path, turn.num_tokens):
                    self._preempt(max(self._running.values(), key=lambda turn: turn.number))

    def _preempt(self, turn: Turn) -> None:
        """Back to the head of the queue; its tokens, text and seed go on where they were."""
        self.counters.num_preempted += 1
        self._release(turn, keep=True)
        self._waiting.appendleft(turn)

    def _start_next(self, now: float) -> PageCopy | None:
        """Give the first in line a worker and pages, if both can be had."""
        if not self._waiting or not self._places.num_free or (self._is_short and self._running):
            return None
        turn = self._waiting[0]
        with self._isolated(turn, "planning_failed", now):
            opening = _open(self._cache, turn)
            if opening is not None:
                self._start(turn, opening, now)
                return opening.copy
            if not self._running:
                self._fail(
                    turn, "out_of_pages", "the turn does not fit the KV pool: enlarge pool_tokens", now
                )
            self._is_short = True
        return None

    def _start(self, turn: Turn, opening: Opening, now: float) -> None:
        self._waiting.popleft()
        self._is_short = False
        turn.path = opening.path
        turn.worker = self._places.take(turn.tenant, turn.agent)
        self._running[turn.worker] = turn
        self._prefilling = turn
        if turn.started_at is None:
            turn.started_at = now
            turn.cached_tokens = opening.path.num_cached
            self.counters.prompt_tokens_cached += turn.cached_tokens
            self._tell(turn, Started(worker=turn.worker, cached_tokens=turn.cached_tokens))

    def _commit_segment(self, turn: Turn, segment: Segment, outcome: SegmentResult, now: float) -> None:
        assert turn.path is not None
        fault = outcome.fault
        if segment.row is not None and not outcome.token_ids and fault is None:
            fault = "no token was sampled"
        if fault is not None:
            log.error("row fault", run=turn.run_id, fault=fault, are_rows_spoiled=outcome.are_rows_spoiled)
            if outcome.are_rows_spoiled:
                self._cache.poison(turn.path)
                turn.path = None
            self._fail(turn, "row_fault", f"this turn's numbers went wrong ({fault}): change its prompt", now)
            return
        self._cache.commit(turn.path, segment.token_ids)
        if turn is self._prefilling:
            self._commit_chunk(turn, segment)
        if segment.row is not None:
            self._accept(turn, outcome, now)

    def _commit_chunk(self, turn: Turn, segment: Segment) -> None:
        assert turn.path is not None
        self._cache.publish(turn.path)
        self.counters.prompt_tokens_computed += len(segment.token_ids)
        num_processed = min(segment.end, len(turn.prompt))
        if num_processed > turn.progress_tokens:
            turn.progress_tokens = num_processed
            self._tell(turn, Progress(processed_tokens=num_processed, prompt_tokens=len(turn.prompt)))
        if segment.row is not None:
            self._prefilling = None

    def _accept(self, turn: Turn, outcome: SegmentResult, now: float) -> None:
        num_before = len(turn.generated)
        acceptance = turn.accept(outcome.token_ids[0], outcome.logprobs[0] if outcome.logprobs else None, now)
        self.counters.generated_tokens += len(turn.generated) - num_before
        if acceptance.tokens is not None:
            self._tell(turn, acceptance.tokens)
        if acceptance.ending is not None:
            ending = acceptance.ending
            end = Finished(
                reason=ending.reason,
                usage=turn.usage(),
                timings=turn.timings(now),
                stop_text=ending.stop_text,
            )
            self._end(turn, end)

    @contextmanager
    def _isolated(self, turn: Turn, kind: str, now: float) -> Iterator[None]:
        """Whatever goes wrong inside is logged and ends this turn alone."""
        try:
            yield
        except Exception:  # the border of one turn: ends in its terminal event
            if (turn.run_id, turn.attempt) not in self._turns:
                raise  # it has ended already: what broke is the engine's
            log.exception("a turn failed", run=turn.run_id, attempt=turn.attempt, error_kind=kind)
            remedy = "change its prompt or settings" if kind in FOR_GOOD else "send it again"
            self._fail(turn, kind, f"this turn failed inside the engine: {remedy}", now)

    def _fail(self, turn: Turn, kind: str, message: str, now: float) -> None:
        failed = Failed(
            error=kind,
            message=message,
            retryable=kind not in FOR_GOOD,
            usage=turn.usage(),
            timings=turn.timings(now),
        )
        self._end(turn, failed, keep=False)

    def _end(self, turn: Turn, end: TurnEnd, *, keep: bool = True) -> None:
        """The one place where a turn ends; held text goes out unless something broke."""
        rest = turn.rest_of_text() if keep else None
        if rest is not None:
            self._tell(turn, rest)
        self._leave(turn, keep=keep)
        self._tell(turn, end)

    def _leave(self, turn: Turn, *, keep: bool) -> None:
        del self._turns[(turn.run_id, turn.attempt)]
        if turn in self._waiting:
            self._waiting.remove(turn)
        self._release(turn, keep=keep)

    def _release(self, turn: Turn, *, keep: bool) -> None:
        """Take back worker and pages, if the turn holds them."""
        self._is_short = False
        if turn is self._prefilling:
            self._prefilling = None
        if turn.worker is not None and self._running.get(turn.worker) is turn:
            del self._running[turn.worker]
            self._places.give_back(turn.worker)
        if turn.path is not None:
            self._cache.close(turn.path, keep=keep)
            turn.path = None

    def _tell(self, turn: Turn, event: Event) -> None:
        self._events.append(TurnEvent(turn.run_id, turn.attempt, event))


def _open(cache: Cache, turn: Turn) -> Opening | None:
    """A path with pages for all tokens so far and a page's worth more; None where there are too few."""
    tokens = turn.tokens(0, turn.num_tokens)
    num_wanted = len(tokens) + min(turn.max_tokens - len(turn.generated), cache.page_tokens)
    opening = cache.open(turn.namespace, tokens, max_match=len(tokens) - 1)
    if cache.reserve(opening.path, num_wanted):
        return opening
    cache.close(opening.path, keep=False)
    if opening.copy is None:
        return None
    # The copied page's source was locked too. Whole pages alone may just fit.
    num_whole = opening.path.num_cached - opening.copy.num_tokens
    opening = cache.open(turn.namespace, tokens, max_match=num_whole)
    if cache.reserve(opening.path, num_wanted):
        return opening
    cache.close(opening.path, keep=False)
    return None


def _chunk_end(turn: Turn, num_rows: int, page_tokens: int) -> int:
    """Where a prefill chunk of about `num_rows` ends: a large one on a page border, if that costs little."""
    assert turn.path is not None
    start = turn.path.num_tokens
    end = start + num_rows
    if end >= turn.num_tokens:
        return turn.num_tokens
    border = end - end % page_tokens
    return border if num_rows >= page_tokens and border - start >= num_rows // 2 else end


def _segment(turn: Turn, end: int) -> Segment:
    """The turn's rows up to `end`; the last of all its tokens samples the next one."""
    assert turn.path is not None and turn.worker is not None
    start = turn.path.num_tokens
    row = turn.row_sampling() if end == turn.num_tokens else None
    return Segment(turn.worker, start, turn.tokens(start, end), turn.path.pages, row)
