"""What a step's results mean for the turns in it: rows become paths', tokens are told, turns end.

Plans nothing and knows no line.
"""

from __future__ import annotations

import structlog
from msgspec import structs

from kvcache.cache import Cache, Kind, Path

from .agents import agent_name
from .messages import Derailed, Finished, Progress
from .plan import Segment, SegmentResult, StepPlan, StepResult
from .turn import Acceptance, Ending, Turn
from .turns import Turns

log = structlog.get_logger(__name__)


class Outcomes:
    """Takes steps' results for the running turns of one engine."""

    def __init__(self, cache: Cache, turns: Turns) -> None:
        self._cache = cache
        self._turns = turns

    def take(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """A faulty row ends its own turn and no other."""
        for segment, outcome in zip(plan.segments, result.segments, strict=True):
            turn = self._turns.running[segment.worker]
            with self._turns.isolated(turn, "row_fault", now):
                self._commit_segment(turn, segment, outcome, now)

    def _commit_segment(self, turn: Turn, segment: Segment, outcome: SegmentResult, now: float) -> None:
        assert turn.path is not None
        fault = outcome.fault
        if segment.row is not None and not outcome.token_ids and fault is None:
            fault = "no token was sampled"
        if fault is not None:
            self._fail_row(turn, fault, outcome, now)
            return
        # Only drafted rows need to know of an end before they are the path's.
        acceptance = self._accept(turn, outcome, now) if segment.num_proposed else None
        num_rows = len(segment.token_ids) if acceptance is None else acceptance.num_rows
        self._cache.commit(turn.path, segment.token_ids[:num_rows])
        if segment.save is not None:
            self._keep_state(turn, turn.path)
        if self._turns.is_prefilling(turn):
            self._commit_chunk(turn, segment)
        if segment.row is None:
            return
        acceptance = acceptance or self._accept(turn, outcome, now)
        ending = self._derailed(turn) if acceptance.ending is None else acceptance.ending
        if ending is not None:
            # A state that has seen more rows than the turn has is nobody's.
            is_exact = not segment.num_proposed or num_rows == len(outcome.token_ids)
            self._finish(turn, ending, Kind.GENERATED if is_exact else None, now)

    def _fail_row(self, turn: Turn, fault: str, outcome: SegmentResult, now: float) -> None:
        log.error("row fault", run=turn.run_id, fault=fault, are_rows_spoiled=outcome.are_rows_spoiled)
        path = turn.path
        if outcome.are_rows_spoiled and path is not None:
            turn.path = None
            self._turns.leaving.poison(turn, path)
        if outcome.error == "grammar_dead_end":
            remedy = "simplify the schema or raise max_tokens"
            message = f"the answer cannot go on as its schema demands ({fault}): {remedy}"
        else:
            message = f"this turn's numbers went wrong ({fault}): change its prompt"
        self._turns.fail(turn, outcome.error, message, now)

    def _keep_state(self, turn: Turn, path: Path) -> None:
        turn.copy = self._cache.keep_state(path, turn.due, agent_name(turn))
        turn.kept_tokens = path.num_tokens
        turn.num_checkpoints += 1
        self._turns.changed()

    def _commit_chunk(self, turn: Turn, segment: Segment) -> None:
        assert turn.path is not None
        self._cache.publish(turn.path)
        self._turns.counters.prompt_tokens_computed += len(segment.token_ids)
        num_processed = min(segment.end, len(turn.prompt))
        if num_processed > turn.progress_tokens:
            turn.progress_tokens = num_processed
            self._turns.tell(turn, Progress(processed_tokens=num_processed, prompt_tokens=len(turn.prompt)))
        if segment.row is not None:
            self._turns.flight = None
            self._turns.changed()

    def _accept(self, turn: Turn, outcome: SegmentResult, now: float) -> Acceptance:
        num_before = len(turn.generated)
        acceptance = turn.accept(outcome.token_ids, outcome.logprobs, now)
        self._turns.counters.generated_tokens += len(turn.generated) - num_before
        if acceptance.tokens is not None:
            self._turns.tell(turn, acceptance.tokens)
        return acceptance

    def _derailed(self, turn: Turn) -> Ending | None:
        """Tell what goes wrong with a turn that goes on; its end, where that is one."""
        what = turn.watch.look(turn.generated)
        if what is None:
            return None
        by_kind = self._turns.counters.num_derailed
        by_kind[what.derail] = by_kind.get(what.derail, 0) + 1
        log.info("derailed", run=turn.run_id, attempt=turn.attempt, derail=what.derail)
        if not turn.stops_derailed:
            self._turns.tell(turn, Derailed(what=what))
            return None
        rest = turn.rest_of_text()
        if rest is not None:
            self._turns.tell(turn, rest)
        self._turns.tell(turn, Derailed(what=structs.replace(what, action="stop")))
        return Ending("derailed")

    def _finish(self, turn: Turn, ending: Ending, last: Kind | None, now: float) -> None:
        turn.is_answered = True
        end = Finished(
            reason=ending.reason,
            usage=turn.usage(),
            timings=turn.timings(now),
            stop_text=ending.stop_text,
        )
        self._turns.end(turn, end, now, last=last)
