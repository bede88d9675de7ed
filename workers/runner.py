"""The only file that calls the model: StepPlan -> StepResult, on the engine's thread.

Knows pages, states and rows; knows no turn, no text and no policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvcache.attention import StepAttention
from kvcache.pages import Pools
from kvcache.reads import Rows
from kvcache.states import States

from .delta_mixer import Run, StepRecurrence
from .errors import DeadEnd
from .plan import RowSampling, Segment, SegmentResult, StepPlan, StepResult
from .sampling import Drawn, draw

NOT_FINITE = "the model gave values that are not numbers for this turn"


@dataclass(frozen=True, slots=True)
class Network:
    """A model with our mixers, as the runner calls it."""

    body: Callable[..., mx.array]  # ([1, rows] ids, cache) -> [1, rows, hidden]
    head: Callable[[mx.array], mx.array]  # [..., hidden] -> [..., vocabulary]
    are_recurrent: tuple[bool, ...]  # by layer
    queries_per_kv: int


class ModelRunner:
    """Runs a step over one model, its pools and, for a hybrid, its states."""

    def __init__(
        self, network: Network, pools: Pools, states: States | None = None, *, share_reads: bool = True
    ) -> None:
        self.pools = pools
        self.states = states
        self._network = network
        self._body = network.body
        self._share_reads = share_reads

    def run(self, plan: StepPlan) -> StepResult:
        """Evaluate every segment. After an exception the pools hold lazy or broken writes: rebuild them."""
        started = time.perf_counter()
        results = self._run(plan)
        return StepResult(results, time.perf_counter() - started)

    def rebuild(self) -> None:
        """Make new, empty pools and states."""
        self.pools.rebuild()
        if self.states is not None:
            self.states.rebuild()

    def _run(self, plan: StepPlan) -> tuple[SegmentResult, ...]:
        if any(segment.num_proposed for segment in plan.segments):
            raise ValueError("this runner takes no drafted tokens")
        if self.states is not None:
            self._move_states(self.states, plan)
        self.pools.copy(plan.copies)
        hidden = self._hidden(plan.segments)
        finite = [mx.isfinite(rows).all() for rows in hidden]
        draws = self._draw(hidden, plan.segments)
        if self.states is not None:
            _keep_states(self.states, hidden, plan.segments)
        lazy = [array for drawn in draws if isinstance(drawn, Drawn) for array in drawn.arrays()]
        mx.eval(*finite, *lazy, *self._arrays())
        return self._collect(plan.segments, draws, [bool(one.item()) for one in finite])

    def _move_states(self, states: States, plan: StepPlan) -> None:
        for move in plan.demotions:
            states.demote(move.source, move.target)
        if plan.demotions:
            mx.eval(*states.arrays())  # what they left may be written next, which must not copy it
        for save in plan.saves_before:
            states.save(save.worker, save.row)
        if plan.saves_before:
            # A restore might else be evaluated while the old live states are still to be read, and copy them.
            mx.eval(*states.arrays())
        for restore in plan.restores:
            states.restore(restore.worker, restore.row)

    def _arrays(self) -> Sequence[mx.array]:
        return [*self.pools.arrays(), *(self.states.arrays() if self.states is not None else ())]

    def _hidden(self, segments: Sequence[Segment]) -> list[mx.array]:
        """Each segment's hidden rows [rows, hidden], or of a segment without rows the checkpoint's one."""
        run = [segment for segment in segments if segment.token_ids]
        rows = iter(self._forward(run) if run else ())
        return [next(rows) if segment.token_ids else self._kept_row(segment) for segment in segments]

    def _forward(self, segments: Sequence[Segment]) -> list[mx.array]:
        """Hidden rows of segments that have rows."""
        attention = StepAttention(
            self.pools,
            [Rows(s.start, len(s.token_ids), s.pages, s.num_sealed) for s in segments],
            queries_per_kv=self._network.queries_per_kv,
            share=self._share_reads,
        )
        recurrence = None
        if self.states is not None:
            recurrence = StepRecurrence(self.states, [Run(s.worker, len(s.token_ids)) for s in segments])
        entries = [recurrence if is_recurrent else attention for is_recurrent in self._network.are_recurrent]
        ids = mx.array([token_id for segment in segments for token_id in segment.token_ids], mx.int32)
        hidden = self._body(ids[None], cache=entries)[0]
        found, first = [], 0
        for segment in segments:
            found.append(hidden[first : first + len(segment.token_ids)])
            first += len(segment.token_ids)
        return found

    def _kept_row(self, segment: Segment) -> mx.array:
        if self.states is None or segment.hidden_from is None:
            raise ValueError(f"a segment of worker {segment.worker} has neither rows nor a checkpoint's")
        return self.states.hidden(segment.hidden_from)

    def _draw(
        self, hidden: Sequence[mx.array], segments: Sequence[Segment]
    ) -> list[Drawn | SegmentResult | None]:
        """Sample after the last row of each segment that asks for it; the head sees those rows only."""
        asked = [rows[-1:] for rows, s in zip(hidden, segments, strict=True) if s.row is not None]
        if not asked:
            return [None] * len(segments)
        logits = iter(self._network.head(mx.concatenate(asked)))
        return [_draw(next(logits), segment.row) if segment.row is not None else None for segment in segments]

    def _collect(
        self, segments: Sequence[Segment], draws: Sequence[Drawn | SegmentResult | None], finite: list[bool]
    ) -> tuple[SegmentResult, ...]:
        results = []
        for segment, drawn, is_finite in zip(segments, draws, finite, strict=True):
            if not is_finite:
                self._clear(segment)
                results.append(SegmentResult((), fault=NOT_FINITE, are_rows_spoiled=True))
            else:
                results.append(drawn.result() if isinstance(drawn, Drawn) else drawn or SegmentResult(()))
        return tuple(results)

    def _clear(self, segment: Segment) -> None:
        """Whoever gets these pages and rows next must not find infinities beyond what is its own."""
        first_page = max(segment.start, segment.num_sealed) // self.pools.page_tokens
        self.pools.clear(segment.pages[first_page:])
        if self.states is not None:
            self.states.restore(segment.worker, None)
            if segment.save is not None:
                self.states.clear_row(segment.save)
            mx.eval(*self.states.arrays())


def _keep_states(states: States, hidden: Sequence[mx.array], segments: Sequence[Segment]) -> None:
    """Put the last hidden rows beside the new live states, then copy what is to be kept.

    A state that is not finite makes its last hidden row so (tests/moe/test_delta.py): no other check needed.
    """
    run = [
        (segment.worker, rows[-1:])
        for segment, rows in zip(segments, hidden, strict=True)
        if segment.token_ids
    ]
    if run:
        workers = mx.array([worker for worker, _ in run], mx.int32)
        states.write_hidden(workers, mx.concatenate([row for _, row in run]))
    for segment in segments:
        if segment.save is not None:
            states.save(segment.worker, segment.save)


def _draw(logits: mx.array, row: RowSampling) -> Drawn | SegmentResult:
    """What a row's settings break is that row's fault alone."""
    try:
        return draw(logits, row)
    except DeadEnd as error:
        return SegmentResult((), fault=str(error), error="grammar_dead_end")
    except (RuntimeError, ValueError, TypeError, IndexError, OverflowError) as error:
        return SegmentResult((), fault=f"sampling failed: {type(error).__name__}")
