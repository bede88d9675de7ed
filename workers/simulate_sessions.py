"""The callers of a simulation: sessions in flight, each with one call at a time, then its think time.

Plain Python. Knows calls and times; neither the engine nor what a call costs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

from .simulate_trace import Call, Trace

MAX_THINK_SECONDS = 120.0
FIRST_STARTS_APART_SECONDS = 7.0
PAUSE_BETWEEN_SESSIONS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call that is due."""

    seconds: float
    call: Call
    is_first: bool  # of its session


class ClosedLoop:
    """Sessions in an order; when one ends the next begins."""

    def __init__(self, trace: Trace, num_in_flight: int, seed: int) -> None:
        order = list(trace.sessions)
        if trace.has_sessions:
            random.Random(seed).shuffle(order)
        self._sessions: Iterator[tuple[Call, ...]] = iter(order)
        self._left: dict[str, Iterator[Call]] = {}  # calls that each session in flight has left
        self._due: list[tuple[float, int, Arrival]] = []
        self._num_due = 0
        for index in range(num_in_flight):
            self._begin(index * FIRST_STARTS_APART_SECONDS)

    @property
    def next_seconds(self) -> float | None:
        """When the next call is due; None: not before one that runs has ended."""
        return self._due[0][0] if self._due else None

    @property
    def num_in_flight(self) -> int:
        return len(self._left)

    def take_due(self, now: float) -> Iterator[Arrival]:
        """Calls that are due by `now`, in order."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]

    def ended(self, call: Call, now: float) -> None:
        """The session thinks about the answer and calls again, or is over."""
        following = next(self._left[call.session], None)
        if following is None:
            del self._left[call.session]
            self._begin(now + PAUSE_BETWEEN_SESSIONS_SECONDS)
        else:
            seconds = now + min(following.think_seconds, MAX_THINK_SECONDS)
            self._add(Arrival(seconds, following, is_first=False))

    def _begin(self, seconds: float) -> None:
        session = next(self._sessions, None)
        if session is None:
            return
        calls = iter(session)
        self._left[session[0].session] = calls
        self._add(Arrival(seconds, next(calls), is_first=True))

    def _add(self, arrival: Arrival) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (arrival.seconds, self._num_due, arrival))
