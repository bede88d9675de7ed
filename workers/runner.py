"""The only file that calls the model: StepPlan -> StepResult, on the engine's thread.

Knows pages and rows; knows no turn, no text and no policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kvcache.attention import StepAttention
from kvcache.pages import Pools
from kvcache.reads import Rows

from .mixers import StepCache
from .plan import RowSampling, Segment, SegmentResult, StepPlan, StepResult
from .sampling import Drawn, draw

NOT_FINITE = "the model gave values that are not numbers for this turn"


class ModelRunner:
    """Runs a step over one model and its pools."""

    def __init__(
        self,
        pools: Pools,
        *,
        body: Callable[..., mx.array],
        head: Callable[[mx.array], mx.array],
        num_layers: int,
        queries_per_kv: int,
        share_reads: bool = True,
    ) -> None:
        """body: ([1, rows] ids, cache) -> [1, rows, hidden]; head: [..., hidden] -> [..., vocabulary]."""
        self.pools = pools
        self._body = body
        self._head = head
        self._num_layers = num_layers
        self._queries_per_kv = queries_per_kv
        self._share_reads = share_reads

    def run(self, plan: StepPlan) -> StepResult:
        """Evaluate every segment. After an exception the pools hold lazy or broken writes: rebuild them."""
        started = time.perf_counter()
        results = self._run(plan)
        return StepResult(results, time.perf_counter() - started)

    def rebuild(self) -> None:
        """Make new, empty pools."""
        self.pools.rebuild()

    def _run(self, plan: StepPlan) -> tuple[SegmentResult, ...]:
        self.pools.copy(plan.copies)
        segments = plan.segments
        rows = [Rows(segment.start, len(segment.token_ids), segment.pages) for segment in segments]
        step = StepAttention(self.pools, rows, queries_per_kv=self._queries_per_kv, share=self._share_reads)
        ids = mx.array([token_id for segment in segments for token_id in segment.token_ids], mx.int32)
        hidden = self._body(ids[None], cache=StepCache(step, self._num_layers))[0]
        finite = mx.isfinite(hidden).all(axis=-1)
        draws = self._draw(hidden, segments)
        lazy = [array for drawn in draws if isinstance(drawn, Drawn) for array in drawn.arrays()]
        mx.eval(finite, *lazy, *self.pools.arrays())
        are_finite: Any = finite.tolist()
        return self._collect(segments, draws, are_finite)

    def _draw(self, hidden: mx.array, segments: tuple[Segment, ...]) -> list[Drawn | SegmentResult | None]:
        """Sample after the last row of each segment that asks for it; the head sees those rows only."""
        lasts, last = [], -1
        for segment in segments:
            last += len(segment.token_ids)
            if segment.row is not None:
                lasts.append(last)
        if not lasts:
            return [None] * len(segments)
        logits = iter(self._head(hidden[mx.array(lasts, mx.int32)]))
        return [_draw(next(logits), segment.row) if segment.row is not None else None for segment in segments]

    def _collect(
        self,
        segments: tuple[Segment, ...],
        draws: list[Drawn | SegmentResult | None],
        finite: list[bool],
    ) -> tuple[SegmentResult, ...]:
        results, first = [], 0
        for segment, drawn in zip(segments, draws, strict=True):
            last = first + len(segment.token_ids)
            if not all(finite[first:last]):
                # Whoever gets these pages next must not find infinities in rows beyond its own length.
                self.pools.clear(segment.pages[segment.start // self.pools.page_tokens :])
                results.append(SegmentResult((), fault=NOT_FINITE, are_rows_spoiled=True))
            else:
                results.append(drawn.result() if isinstance(drawn, Drawn) else drawn or SegmentResult(()))
            first = last
        return tuple(results)


def _draw(logits: mx.array, row: RowSampling) -> Drawn | SegmentResult:
    """What a row's settings break is that row's fault alone."""
    try:
        return draw(logits, row)
    except (RuntimeError, ValueError, TypeError, IndexError, OverflowError) as error:
        return SegmentResult((), fault=f"sampling failed: {type(error).__name__}")
