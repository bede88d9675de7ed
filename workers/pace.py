"""What a step costs on this machine, learned from the steps so far, and how long a prefill chunk may be.

Knows rows, their depth and seconds; neither turns nor pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .plan import Segment, StepPlan

_NEW_SHARE = 0.3
"""Weight of the newest step in the moving averages."""
_SLOPE_SHARE = 0.1
"""The same for what depth costs: it is learned from chunks that are far apart."""
_LEAST_SPREAD = 0.05
"""Depths must vary by so much of their mean before a slope is read from them."""
_LEAST_PREFILL_SHARE = 0.25
"""A chunk's rows never count for less of their step's time: one quiet step must not allow a huge chunk."""
_LEAST_LEVEL = 0.1
"""A row at no depth costs at least this share of the mean row seen, whatever the line through them says."""


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """Bounds of a prefill chunk. Equal row bounds make a fixed chunk grid."""

    step_seconds: float = 0.12  # of a step that decodes too; 0.3 suits a GPU
    idle_step_seconds: float = 1.0  # of a step that only prefills: a cancel waits that long
    min_rows: int = 32  # while others decode, whatever the budget says
    min_idle_rows: int = 128  # while nobody does
    max_rows: int = 2048
    row_multiple: int = 1  # of a step's rows in all: what the machine's matrix kernels take at a time


class RowCost:
    """Seconds that a prefill row adds to a step, as a line over its depth: least squares that forget.

    The level follows fast, at the depth that chunks have now; the slope follows slowly, and is 0 until depths
    have varied.
    """

    def __init__(self) -> None:
        self.slope = 0.0  # seconds for each token before the row
        self._level: float | None = None  # moving mean of seconds per row
        self._depth = 0.0  # moving mean of the depths it was seen at
        self._mean_depth = self._mean_seconds = self._variance = self._covariance = 0.0

    @property
    def is_known(self) -> bool:
        return self._level is not None

    def observe(self, depth: float, seconds: float) -> None:
        """One chunk's mean depth and mean seconds per row."""
        if self._level is None:
            self._level, self._depth = seconds, depth
            self._mean_depth, self._mean_seconds = depth, seconds
            return
        self._level = _moved(self._level, seconds)
        self._depth = _moved(self._depth, depth)
        off_depth, off_seconds = depth - self._mean_depth, seconds - self._mean_seconds
        self._mean_depth += _SLOPE_SHARE * off_depth
        self._mean_seconds += _SLOPE_SHARE * off_seconds
        keep = 1.0 - _SLOPE_SHARE
        self._variance = keep * (self._variance + _SLOPE_SHARE * off_depth * off_depth)
        self._covariance = keep * (self._covariance + _SLOPE_SHARE * off_depth * off_seconds)
        if self._variance > (_LEAST_SPREAD * self._mean_depth) ** 2:
            self.slope = max(self._covariance / self._variance, 0.0)

    def at(self, depth: float) -> float:
        """Seconds of a row with so many tokens before it; 0 while nothing was seen."""
        if self._level is None:
            return 0.0
        return max(self._level + self.slope * (depth - self._depth), _LEAST_LEVEL * self._level)

    def of_rows(self, depth: int, num_rows: int) -> float:
        """Seconds of a run of rows whose first has `depth` tokens before it."""
        return num_rows * self.at(depth + num_rows / 2)

    def rows_within(self, seconds: float, depth: int) -> int:
        """How many rows from `depth` on take no longer than `seconds`."""
        first = self.at(depth)
        if seconds <= 0.0 or first <= 0.0:
            return 0
        root = math.sqrt(first * first + 2.0 * self.slope * seconds)
        return int(2.0 * seconds / (first + root))


class Pace:
    """Moving estimates: seconds of a step without prefill, and seconds that prefill rows add by depth."""

    def __init__(self, limits: PaceLimits) -> None:
        self.limits = limits
        self.prefill_tokens_per_second = 0.0
        self.decode_tokens_per_second = 0.0  # of all streams together
        self._base_seconds: float | None = None
        self._rows = RowCost()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from an evaluated step."""
        seconds = max(seconds, 1e-6)
        num_prefill, num_decode = plan.num_prefill_rows, plan.num_decode_rows
        if num_decode:
            rate = num_decode / seconds
            self.decode_tokens_per_second = _moved(self.decode_tokens_per_second or None, rate)
        if num_prefill:
            rate = num_prefill / seconds
            self.prefill_tokens_per_second = _moved(self.prefill_tokens_per_second or None, rate)
            spent = max(seconds - (self._base_seconds or 0.0), _LEAST_PREFILL_SHARE * seconds)
            chunk = _prefill_of(plan)
            self._rows.observe((chunk.start + chunk.end) / 2, spent / num_prefill)
        elif num_decode:
            self._base_seconds = _moved(self._base_seconds, seconds)

    def chunk_rows(self, num_decoding: int, depth: int = 0) -> int:
        """Rows that a prefill chunk after `depth` tokens may have beside this many decoding turns."""
        limits = self.limits
        fewest = limits.min_rows if num_decoding else limits.min_idle_rows
        affordable = self._affordable(num_decoding, depth)
        return self._aligned(min(max(affordable, fewest), limits.max_rows), num_decoding)

    def prefill_seconds(self, num_rows: int, depth: int) -> float:
        """What a run of rows should take in all, before steps' own cost; a guess before any was seen."""
        return self._rows.of_rows(depth, num_rows) if self._rows.is_known else num_rows * 1e-3

    def predicted_step_seconds(self, plan: StepPlan) -> float | None:
        """How long the step should take; None before anything comparable was seen."""
        num_prefill = plan.num_prefill_rows
        if not num_prefill:
            return self._base_seconds
        if not self._rows.is_known:
            return None
        return (self._base_seconds or 0.0) + self._rows.of_rows(_prefill_of(plan).start, num_prefill)

    def _affordable(self, num_decoding: int, depth: int) -> int:
        limits = self.limits
        budget = limits.step_seconds if num_decoding else limits.idle_step_seconds
        return self._rows.rows_within(budget - (self._base_seconds or 0.0), depth)

    def _aligned(self, num_rows: int, num_decoding: int) -> int:
        """Rounded down so that with the decode rows they are a multiple of row_multiple, if few are lost."""
        aligned = num_rows - (num_rows + num_decoding) % self.limits.row_multiple
        return aligned if 4 * aligned > 3 * num_rows else num_rows


def _prefill_of(plan: StepPlan) -> Segment:
    return next(segment for segment in plan.segments if segment.token_ids and not segment.is_decode)


def _moved(average: float | None, newest: float) -> float:
    return newest if average is None else average + _NEW_SHARE * (newest - average)
