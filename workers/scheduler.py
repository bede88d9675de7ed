"""Which turns run in the next step and what its result means for them. Plain Python: no model, no clock.

A turn waits without a worker or pages; it gets both when its prefill starts, one prefill at a time, so that
it finds what the prefill before it published. Each ends in exactly one of Finished, Paused, Cancelled and
Failed.
"""

from __future__ import annotations

from array import array

import structlog

from kvcache.cache import Cache, Kind, Opening

from .agents import Agents, key_of
from .counters import Counters, EngineCounts
from .cuts import Grid, chunk_end
from .drafting import Drafter, NoDrafts
from .errors import IntegrityError
from .line import Line, LineRules
from .messages import (
    MAX_HOLD_SECONDS,
    Cancel,
    CancelAgents,
    Derailed,
    Failed,
    Missed,
    Note,
    Pause,
    Started,
)
from .misses import Found, Restart, explain
from .outcomes import Outcomes
from .pace import Pace
from .pins import AgentKey
from .plan import Segment, StateRestore, StepPlan, StepResult
from .sharing import InFlight
from .starting import cuts_ahead, decode_segment, open_path
from .turn import Turn, TurnEvent
from .turns import Turns

GRAMMAR_LOOK_SECONDS = 0.005
"""How often an engine that has nothing else to do looks whether a grammar is built."""

log = structlog.get_logger(__name__)


class Scheduler:
    """Owns the queue, the workers and every turn's path in the cache."""

    def __init__(
        self,
        cache: Cache,
        pace: Pace,
        *,
        num_workers: int,
        rules: LineRules | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._cache = cache
        self._pace = pace
        self._drafter = drafter or NoDrafts()
        self._agents = Agents(cache)
        self.pins = self._agents.pins
        self._line = Line(cache, self._agents, pace, rules)
        self._turns = Turns(cache, self._agents, self._line, num_workers)
        self._outcomes = Outcomes(cache, self._turns)

    @property
    def has_work(self) -> bool:
        """Whether turns are here, states are to be saved, or events wait to be taken."""
        return bool(self._turns or self._turns.events or self._turns.leaving)

    def rest_seconds(self, now: float) -> float:
        """How long the next step may wait, as those in line are held for room in the pool; usually 0."""
        if self._turns.rests_until is None or self._turns.events:
            return 0.0
        return max(self._turns.rests_until - now, 0.0)

    def submit(self, turn: Turn, now: float) -> None:
        """Queue a turn. One that is here already (a message delivered twice) is left as it is."""
        self._turns.add(turn, now)

    def cancel(self, cancel: Cancel, now: float) -> None:
        """End a turn wherever it is; what it computed stays in the cache, and is not held for its run.

        Nothing else for an unknown turn.
        """
        turn = self._turns.find(cancel.run_id, cancel.attempt)
        if turn is not None:
            self._turns.cancel(turn, now, last=Kind.BORDER)
        self._turns.leaving.release_run(cancel.run_id)
        self.pins.drop_run(cancel.run_id)

    def pause(self, pause: Pause, now: float) -> None:
        """End an attempt wherever it is and hold what it computed. Nothing for an unknown or ended turn."""
        turn = self._turns.find(pause.run_id, pause.attempt)
        if turn is not None:
            seconds = min(pause.hold_seconds, MAX_HOLD_SECONDS) if pause.hold_seconds > 0 else 0.0
            if turn.started_at is None:
                self.pins.prolong(pause.run_id, now + seconds)
            self._turns.pause(turn, seconds, now)

    def note(self, note: Note) -> None:
        """Tell what a gateway has found of a turn. Nothing for an unknown or ended one."""
        turn = self._turns.find(note.run_id, note.attempt)
        if turn is not None:
            self._turns.tell(turn, Derailed(what=note.what))

    def cancel_agents(self, cancel: CancelAgents, now: float) -> None:
        """End the turns of one agent and of all its descendants, and let go of what they keep."""
        if not cancel.session and not cancel.agent:
            return  # it would be everybody who gives no names
        agents = self._agents.subtree(AgentKey(cancel.tenant, cancel.session, cancel.agent))
        for turn in self._turns:
            if _is_of(turn, agents):
                self._turns.cancel(turn, now, last=None)
        self._turns.leaving.give_up(lambda turn: _is_of(turn, agents), now)
        self._agents.cancel(agents)
        self._turns.changed()

    def refuse(self, run_id: str, attempt: int, failed: Failed) -> None:
        """Tell the end of a turn that never got in."""
        self._turns.events.append(TurnEvent(run_id, attempt, failed))

    def counts(self) -> EngineCounts:
        """How turns, pages and speed stand."""
        return EngineCounts.of(
            self._cache.stats(), self._turns.counters, self._pace, len(self._turns.running), len(self._line)
        )

    def take_events(self) -> list[TurnEvent]:
        """Events since the last call, in order."""
        events, self._turns.events = self._turns.events, []
        return events

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when nothing can run (its events may say why, or rest_seconds how long)."""
        self.pins.expire(now)
        self._turns.take_grammars(now)
        segments = self._decode(now)
        if self._turns.flight is not None:
            self._make_room_for_shorter(self._turns.flight, now)
        if self._turns.flight is None:
            self._start_next(now)
        if self._turns.flight is not None:
            segments += self._prefill(self._turns.flight, len(segments), now)
        # A turn that failed or gave way while the others were planned is not in the step.
        segments = [segment for segment in segments if segment.worker in self._turns.running]
        saves = self._turns.leaving.saves()
        if not segments and not saves:
            rests = bool(self._line) and not self._turns.running
            until = min(self._line.next_change(now), self.pins.next_expiry)
            if self._turns.awaits_grammars:
                until = min(until, now + GRAMMAR_LOOK_SECONDS)
            self._turns.rests_until = until if rests else None
            return None
        turns = [self._turns.running[segment.worker] for segment in segments]
        copies = tuple(turn.copy for turn in turns if turn.copy is not None)
        restores = tuple(turn.restore for turn in turns if turn.restore is not None)
        for turn in turns:
            turn.copy = turn.restore = None
        return StepPlan(copies, tuple(segments), restores, saves, self._cache.take_demotions())

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take an evaluated step's results; a faulty row ends its own turn and no other."""
        self._turns.counters.num_steps += 1
        self._pace.observe(plan, result.seconds)
        if self._turns.leaving:
            self._turns.leaving.finish(now)
            self._turns.changed()
        self._outcomes.take(plan, result, now)

    def fail_step(self, now: float) -> None:
        """A step failed and the pools with it: end all turns that hold pages, empty the tree."""
        self._turns.counters.num_steps += 1
        self._turns.leaving.drop()
        for turn in list(self._turns.running.values()):
            self._turns.fail(
                turn, "step_failed", "the engine could not compute this step: send the call again", now
            )
        for turn in self._turns:
            turn.kept = None
        self._agents.forget_kept()
        self._cache.clear()
        self._turns.changed()

    def running_ids(self) -> list[str]:
        """Run ids of the turns that have a worker."""
        return [turn.run_id for turn in self._turns.running.values()]

    def abandon(self, now: float) -> None:
        """Forget every turn without a word and count from nothing; what they computed stays in the cache."""
        self._turns.abandon(now)
        stats = self._cache.stats()
        self._turns.counters = Counters(
            num_evicted_before=stats.num_evicted, num_evicted_states_before=stats.num_states_evicted
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError when turns, workers and paths disagree. Between steps only."""
        self._turns.check_integrity()
        num_live = self._cache.stats().num_live
        if not self._turns.running and not self._turns.leaving and num_live:
            raise IntegrityError(f"nobody runs and {num_live} pages are live")

    def _decode(self, now: float) -> list[Segment]:
        """Segments of the decoding turns, by worker, with pages for their next rows.

        The oldest gets pages first; pins are given up and then the newest gives way where they lack. Even the
        only turn gives way to itself: that releases pages that it held twice, and it starts again with room
        for at least one more token.
        """
        segments = []
        for turn in sorted(self._turns.running.values(), key=lambda turn: turn.number):
            if self._turns.is_prefilling(turn):
                continue
            with self._turns.isolated(turn, "planning_failed", now):
                proposed = self._proposed(turn)
                if self._has_pages(turn, now, proposed):
                    segments.append(decode_segment(turn, proposed))
        return sorted(segments, key=lambda segment: segment.worker)

    def _proposed(self, turn: Turn) -> list[int]:
        """Drafted tokens, fewer than the turn may still have; none where a grammar holds."""
        if turn.constraint is not None:
            return []
        return list(self._drafter.propose(turn)[: turn.max_tokens - len(turn.generated) - 1])

    def _has_pages(self, turn: Turn, now: float, proposed: list[int]) -> bool:
        """Reserve the next rows' pages; drafts are dropped where only one row's can be had."""
        if turn.path is None:
            return False
        if proposed and self._cache.reserve(turn.path, turn.num_tokens + len(proposed)):
            return True
        proposed.clear()
        while turn.path is not None and not self._cache.reserve(turn.path, turn.num_tokens):
            if self.pins.give_one(now):
                continue
            if self._turns.leaving:
                return False  # it gets the pages that these give back after the step
            self._preempt(max(self._turns.running.values(), key=lambda turn: turn.number), now)
        return turn.path is not None

    def _preempt(self, turn: Turn, now: float) -> None:
        """Back to the head of the line; its tokens, text and seed go on where they were."""
        self._turns.counters.num_preempted += 1
        self._turns.release(turn, now, keep=True, last=Kind.BORDER, is_over=False)
        self._line.put_back(turn)

    def _make_room_for_shorter(self, flight: InFlight, now: float) -> None:
        """Between chunks a prefill gives its worker to one that has far less to do and is at home here."""
        turn = flight.producer
        with self._turns.isolated(turn, "planning_failed", now):
            rival = self._line.rival(turn, flight, now, self._is_ready)
            if rival is not None:
                turn.num_yielded += 1
                self._preempt(turn, now)
                self._begin(rival, now)

    def _is_ready(self, turn: Turn) -> bool:
        return turn.pending is None and not self._turns.leaving.holds(turn)

    def _start_next(self, now: float) -> None:
        """Give the next in line a worker and pages, if both can be had."""
        if (
            not self._line
            or not self._turns.places.num_free
            or (self._turns.is_short and self._turns.running)
        ):
            return
        turn = self._line.choose(now, self._is_ready)
        if turn is not None:
            self._begin(turn, now)

    def _begin(self, turn: Turn, now: float) -> None:
        with self._turns.isolated(turn, "planning_failed", now):
            opening = open_path(self._cache, turn)
            while opening is None and self.pins.give_one(now):
                opening = open_path(self._cache, turn)
            is_alone = not self._turns.running and not self._turns.leaving
            if opening is None and is_alone:
                opening = open_path(self._cache, turn, is_alone=True)
            if opening is not None:
                self._start(turn, opening, now)
                return
            if is_alone:
                self._turns.fail(
                    turn, "out_of_pages", "the turn does not fit the KV pool: enlarge pool_tokens", now
                )
            self._turns.is_short = True

    def _start(self, turn: Turn, opening: Opening, now: float) -> None:
        path = turn.path = opening.path
        turn.copy = opening.copy
        self._line.remove(turn)
        self._turns.is_short = False
        turn.worker = self._turns.places.take(key_of(turn))
        self._turns.running[turn.worker] = turn
        turn.num_matched = max(path.num_sealed, path.num_tokens)
        turn.kept_tokens = path.num_tokens
        if self._cache.has_states:
            turn.restore = StateRestore(turn.worker, opening.restore)
            self._turns.counters.num_restored += opening.restore is not None and path.num_tokens > 0
        seconds = self._pace.prefill_seconds(turn.num_tokens - path.num_tokens, path.num_tokens)
        self._turns.flight = InFlight.of(turn, path.num_tokens, self._line, now, seconds)
        if turn.started_at is None:
            self._start_first(turn, turn.worker, path.num_cached, now)

    def _start_first(self, turn: Turn, worker: int, num_cached: int, now: float) -> None:
        """A preempted turn that starts again has told all this already."""
        turn.started_at = now
        turn.cached_tokens = num_cached
        self._turns.counters.prompt_tokens_cached += num_cached
        key = key_of(turn)
        tokens = turn.tokens(0, turn.num_tokens)
        restart = None if key is None else self._agents.histories.restart(key, tokens)
        missed = None if restart is None else self._explained(turn, tokens, restart)
        self._turns.tell(turn, Started(worker=worker, cached_tokens=num_cached, missed=missed))
        self._agents.started(turn, turn.num_matched, restart)

    def _explained(self, turn: Turn, tokens: array[int], restart: Restart) -> Missed | None:
        found = Found(turn.namespace, tokens, turn.cached_tokens, self._cache.page_tokens, turn.hints.explain)
        missed = explain(restart, found)
        if missed is not None:
            by_cause = self._turns.counters.missed_tokens
            by_cause[missed.cause] = by_cause.get(missed.cause, 0) + missed.recomputed_tokens
        return missed

    def _prefill(self, flight: InFlight, num_decoding: int, now: float) -> list[Segment]:
        """The prefill's next chunk; none if planning it broke."""
        turn = flight.producer
        segments = []
        with self._turns.isolated(turn, "planning_failed", now):
            segments.append(self._chunk(turn, flight, num_decoding))
        return segments

    def _chunk(self, turn: Turn, flight: InFlight, num_decoding: int) -> Segment:
        assert turn.path is not None and turn.worker is not None
        start, end = turn.path.num_tokens, turn.num_tokens
        save = None
        if start < end:
            cuts = cuts_ahead(turn, flight) if self._cache.has_states else ()
            num_rows = self._pace.chunk_rows(num_decoding, depth=start)
            grid = Grid(num_rows, self._pace.limits.max_rows, self._cache.page_tokens)
            end = chunk_end(start, end, cuts, grid)
            due = next((cut for cut in cuts if cut.position == end), None)
            if due is not None:
                turn.due = due.kind
                save = self._cache.reserve_state(turn.path)
        hidden_from = turn.restore.row if turn.restore is not None and start == end else None
        row = turn.row_sampling() if end == turn.num_tokens else None
        token_ids = turn.tokens(start, end)
        return Segment(
            turn.worker, start, token_ids, turn.path.pages, row, turn.path.num_sealed, save, hidden_from
        )


def _is_of(turn: Turn, agents: set[AgentKey]) -> bool:
    return AgentKey(turn.tenant, turn.session, turn.agent) in agents
