"""What went before its time, because all of its kind together had no room: counted, and now and then logged.

Knows kinds and numbers, not what went.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import structlog

LOG_SECONDS = 600.0
"""The least time between two lines about one kind."""

log = structlog.get_logger(__name__)


class Evictions:
    """Hears of all. `count` is told the kind and how many."""

    def __init__(
        self,
        count: Callable[[str, int], None] = lambda kind, number: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._now = now
        self._logged_at: dict[str, float] = {}
        self._unlogged: dict[str, int] = defaultdict(int)

    def went(self, kind: str, number: int, age_seconds: float) -> None:
        """So many of a kind, the youngest of that age."""
        self._count(kind, number)
        self._unlogged[kind] += number
        now = self._now()
        if now - self._logged_at.get(kind, -LOG_SECONDS) < LOG_SECONDS:
            return
        self._logged_at[kind] = now
        log.warning(
            "kept_too_short",
            kind=kind,
            number=self._unlogged.pop(kind),
            age_hours=round(age_seconds / 3600, 1),
            remedy="raise kept_bytes, and bus_memory_bytes to twice that",
        )
