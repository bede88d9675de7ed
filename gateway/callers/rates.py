"""How many calls a minute each token may make: a bucket of a minute's calls that fills evenly.

Pure: told the time, knows no clock and no request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_BUCKETS = 4096


@dataclass(slots=True)
class _Bucket:
    calls: float
    seen: float  # seconds of the caller's clock


class Rates:
    """One bucket for each name. In this gateway's memory: each gateway of a bus counts its own calls."""

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, name: str, calls_per_minute: int, now: float) -> float:
        """Counts a call and returns 0, or does not count it and returns the seconds until it would be taken.

        The limit may change between calls. The bucket is full at first, so that a fan-out of a whole minute's
        calls goes at once.
        """
        bucket = self._buckets.pop(name, None) or _Bucket(calls_per_minute, now)
        self._buckets[name] = bucket
        while len(self._buckets) > self._max_buckets:
            self._buckets.popitem(last=False)
        gained = max(0.0, now - bucket.seen) * calls_per_minute / 60
        bucket.calls = min(calls_per_minute, bucket.calls + gained)
        bucket.seen = max(now, bucket.seen)
        if bucket.calls < 1:
            return (1 - bucket.calls) * 60 / calls_per_minute
        bucket.calls -= 1
        return 0.0
