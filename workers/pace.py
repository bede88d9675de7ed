"""What a step costs on this machine, learned from the steps so far, and how long a prefill chunk may be.

Knows rows and seconds; neither turns nor pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan import StepPlan

_NEW_SHARE = 0.3
"""Weight of the newest step in the moving averages."""
_LEAST_PREFILL_SHARE = 0.25
"""A chunk's rows never count for less of their step's time: one quiet step must not allow a huge chunk."""


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """Bounds of a prefill chunk. Equal row bounds make a fixed chunk grid."""

    step_seconds: float = 0.12  # of a step that decodes too; 0.3 suits a GPU
    idle_step_seconds: float = 1.0  # of a step that only prefills: a cancel waits that long
    min_rows: int = 32  # while others decode, whatever the budget says
    min_idle_rows: int = 128  # while nobody does
    max_rows: int = 2048
    row_multiple: int = 1  # of a step's rows in all: what the machine's matrix kernels take at a time


class Pace:
    """Moving estimates: seconds of a step without prefill, and seconds that each prefill row adds."""

    def __init__(self, limits: PaceLimits) -> None:
        self.limits = limits
        self.prefill_tokens_per_second = 0.0
        self.decode_tokens_per_second = 0.0  # of all streams together
        self._base_seconds: float | None = None
        self._row_seconds: float | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from an evaluated step."""
        seconds = max(seconds, 1e-6)
        num_prefill, num_decode = plan.num_prefill_rows, plan.num_decode_rows
        if num_decode:
            rate = num_decode / seconds
            self.decode_tokens_per_second = _moved(self.decode_tokens_per_second or None, rate)
        if not num_prefill:
            self._base_seconds = _moved(self._base_seconds, seconds)
            return
        rate = num_prefill / seconds
        self.prefill_tokens_per_second = _moved(self.prefill_tokens_per_second or None, rate)
        spent = max(seconds - (self._base_seconds or 0.0), _LEAST_PREFILL_SHARE * seconds)
        self._row_seconds = _moved(self._row_seconds, spent / num_prefill)

    def chunk_rows(self, num_decoding: int) -> int:
        """Rows that the next prefill chunk may have beside this many decoding turns."""
        limits = self.limits
        fewest = limits.min_rows if num_decoding else limits.min_idle_rows
        return self._aligned(min(max(self._affordable(num_decoding), fewest), limits.max_rows), num_decoding)

    def _affordable(self, num_decoding: int) -> int:
        limits = self.limits
        if self._row_seconds is None:
            return 0
        budget = limits.step_seconds if num_decoding else limits.idle_step_seconds
        return int((budget - (self._base_seconds or 0.0)) / self._row_seconds)

    def _aligned(self, num_rows: int, num_decoding: int) -> int:
        """Rounded down so that with the decode rows they are a multiple of row_multiple, if few are lost."""
        aligned = num_rows - (num_rows + num_decoding) % self.limits.row_multiple
        return aligned if aligned > num_rows // 2 else num_rows

    def predicted_step_seconds(self, plan: StepPlan) -> float | None:
        """How long the step should take; None before anything comparable was seen."""
        if plan.num_prefill_rows and self._row_seconds is None:
            return None
        if self._base_seconds is None and not plan.num_prefill_rows:
            return None
        return (self._base_seconds or 0.0) + plan.num_prefill_rows * (self._row_seconds or 0.0)


def _moved(average: float | None, newest: float) -> float:
    return newest if average is None else average + _NEW_SHARE * (newest - average)
