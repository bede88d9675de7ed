"""Exact quantiles of the newest samples: a ring bounded by number and by age.

Pure: the time is an argument. Knows neither names nor labels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

QUANTILES = (0.1, 0.5, 0.9, 0.99)
MAX_SAMPLES = 4096
WINDOW_SECONDS = 900.0


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile of ascending values, linear between ranks; ValueError when empty."""
    if not ordered:
        raise ValueError("no samples: a quantile needs at least one")
    rank = fraction * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Ring:
    """The last `max_samples` samples of the last `window_seconds`; its total and count only grow."""

    def __init__(self, *, max_samples: int = MAX_SAMPLES, window_seconds: float = WINDOW_SECONDS) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=max_samples)
        self._window_seconds = window_seconds
        self.total = 0.0
        """Sum of every sample ever added."""
        self.count = 0
        """Number of samples ever added."""

    def add(self, value: float, now: float) -> None:
        """Keep one sample; `now` is monotonic seconds and never smaller than before."""
        self._samples.append((now, value))
        self.total += value
        self.count += 1

    def quantiles(self, now: float, fractions: Sequence[float] = QUANTILES) -> tuple[float, ...] | None:
        """One value for each fraction over the samples still in the window; None when there is none."""
        while self._samples and self._samples[0][0] < now - self._window_seconds:
            self._samples.popleft()
        if not self._samples:
            return None
        ordered = sorted(value for _, value in self._samples)
        return tuple(quantile(ordered, fraction) for fraction in fractions)
