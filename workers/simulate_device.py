"""What a step costs on a machine that is only described: the simulator's runner, its clock and drafter.

Moves no data: of each plan it checks what is cheap to check, samples token ids that never repeat and accepts
proposed ones, so that decoding advances in one jump until a stream ends, the next call arrives or a prefill
chunk rides along. Knows turns and pages only as a plan shows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import IntegrityError
from .plan import Segment, SegmentResult, StepPlan, StepResult
from .turn import Turn

_MAX_JUMP = 256
"""Tokens of one jump: pages are reserved for all of them."""
NUM_TOKEN_IDS = 2**32


@dataclass(frozen=True, slots=True)
class Device:
    """A machine and a model as the cost model sees them; the model is Qwen3-Next-80B-A3B, 8-bit KV."""

    flops: float = 30e12  # per second
    bytes_per_second: float = 500e9
    row_flops: float = 6e9  # of a prefill row, whatever its depth
    depth_flops: float = 1.97e5  # of a prefill row, for each token before it
    weight_bytes: float = 1.7e9  # that a decode row reads: 3e9 active parameters of 4.5 bits
    kv_token_bytes: float = 13_056  # that a decode row reads for each token before it

    def prefill_seconds(self, start: int, end: int) -> float:
        """Rows at positions [start, end)."""
        num_rows = end - start
        return num_rows * (self.row_flops + self.depth_flops * (start + end) / 2) / self.flops

    def decode_seconds(self, num_streams: int, depth: int, num_passes: int) -> float:
        """`num_passes` rows of each stream; depth: tokens before the first, all streams together."""
        depths = num_passes * depth + num_streams * num_passes * (num_passes - 1) / 2
        num_bytes = num_passes * num_streams * self.weight_bytes + depths * self.kv_token_bytes
        return num_bytes / self.bytes_per_second


class SimulatedClock:
    """Seconds of the simulation; a call reads them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next_arrival: float | None = None  # a jump ends there

    def __call__(self) -> float:
        return self.now


class FreshTokens:
    """Token ids that no other turn has: answers, and the proposals for them."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, num_tokens: int) -> range:
        first = self._next
        if first + num_tokens > NUM_TOKEN_IDS:
            first = 0
        self._next = first + num_tokens
        return range(first, self._next)

    def propose(self, turn: Turn) -> range:
        """All that the turn's answer lacks beyond the token that the pass itself samples."""
        num_missing = turn.max_tokens - len(turn.generated) - 1
        return self.take(min(max(num_missing, 0), _MAX_JUMP))


@dataclass(frozen=True, slots=True)
class _Streams:
    """The decode segments of a plan."""

    segments: tuple[Segment, ...]

    @property
    def depth(self) -> int:
        return sum(segment.start for segment in self.segments)

    @property
    def most_passes(self) -> int:
        """Until the first of them ends."""
        return min(len(segment.token_ids) for segment in self.segments)


class SimulatedRunner:
    """Evaluates plans by adding up their cost on the clock."""

    def __init__(self, device: Device, clock: SimulatedClock, tokens: FreshTokens, page_tokens: int) -> None:
        self._device = device
        self._clock = clock
        self._tokens = tokens
        self._page_tokens = page_tokens
        self.num_steps = 0
        self.num_saved = 0
        self.num_restored = 0  # from a checkpoint, not from the zero state

    def rebuild(self) -> None:
        """There are no pools to make anew."""

    def run(self, plan: StepPlan) -> StepResult:
        """Raises IntegrityError for a plan that a model could not run."""
        self._check(plan)
        self.num_steps += 1
        self.num_restored += sum(restore.row is not None for restore in plan.restores)
        self.num_saved += len(plan.saves_before) + sum(s.save is not None for s in plan.segments)
        streams = _Streams(tuple(segment for segment in plan.segments if segment.is_decode))
        chunks = [segment for segment in plan.segments if not segment.is_decode]
        seconds = sum(self._device.prefill_seconds(chunk.start, chunk.end) for chunk in chunks)
        num_passes = 1
        if streams.segments:
            num_passes = self._num_passes(streams, is_alone=not chunks)
            seconds += self._device.decode_seconds(len(streams.segments), streams.depth, num_passes)
        self._clock.now += seconds
        results = tuple(self._result(segment, num_passes) for segment in plan.segments)
        return StepResult(results, seconds / num_passes)

    def _num_passes(self, streams: _Streams, *, is_alone: bool) -> int:
        if not is_alone:
            return 1
        until = self._clock.next_arrival
        most = streams.most_passes
        if until is None:
            return most
        one = self._device.decode_seconds(len(streams.segments), streams.depth, 1)
        return min(most, max(1, math.ceil((until - self._clock.now) / one)))

    def _result(self, segment: Segment, num_passes: int) -> SegmentResult:
        if segment.row is None:
            return SegmentResult(())
        accepted = segment.token_ids[1:num_passes] if segment.is_decode else ()
        return SegmentResult((*accepted, *self._tokens.take(1)))

    def _check(self, plan: StepPlan) -> None:
        for segment in plan.segments:
            if segment.end > len(segment.pages) * self._page_tokens:
                raise IntegrityError(f"worker {segment.worker}: rows to {segment.end} go beyond its pages")
        workers = [segment.worker for segment in plan.segments]
        if len(workers) != len(set(workers)):
            raise IntegrityError(f"a worker has two segments: {workers}")
