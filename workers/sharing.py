"""What turns have in common: lengths of equal prefixes, and who waits for whose prefill. Plain arithmetic."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .turn import Turn

MIN_SHARED_TOKENS = 1000
"""A common prefix is worth a checkpoint, or a wait, when it saves more than this."""

_BLOCK_TOKENS = 4096
_PATIENCE = 1.5
"""A turn waits for another's prefill for so many times as long as that should take."""


def common_length(one: array[int], other: array[int]) -> int:
    """Tokens that both begin with; compares blocks, which costs 0.1 ms for 128k tokens."""
    length = min(len(one), len(other))
    for start in range(0, length, _BLOCK_TOKENS):
        end = min(start + _BLOCK_TOKENS, length)
        if one[start:end] != other[start:end]:
            return start + _first_difference(one, other, start, end)
    return length


def _first_difference(one: array[int], other: array[int], start: int, end: int) -> int:
    low, high = start, end - 1  # the first difference is in [low, high]
    while low < high:
        middle = (low + high) // 2
        if one[low : middle + 1] == other[low : middle + 1]:
            low = middle + 1
        else:
            high = middle
    return low - start


class InFlight:
    """The prefill that runs now, and how much of its prompt each waiting turn shares with it."""

    def __init__(self, producer: Turn, start: int, deadline: float) -> None:
        self.producer = producer
        self._start = start  # tokens that it found in the cache
        self._deadline = deadline
        self._shared: dict[int, int] = {}  # by the waiting turn's number

    @staticmethod
    def of(producer: Turn, start: int, waiting: Iterable[Turn], now: float, seconds: float) -> InFlight:
        """For a prefill that begins now and should take so many seconds."""
        flight = InFlight(producer, start, now + _PATIENCE * seconds)
        for turn in waiting:
            flight.add(turn)
        return flight

    def add(self, turn: Turn) -> None:
        """A turn waits beside the prefill."""
        if turn.namespace != self.producer.namespace or len(turn.prompt) <= self._start:
            return
        shared = common_length(turn.prompt, self.producer.prompt)
        if shared - self._start >= MIN_SHARED_TOKENS:
            self._shared[turn.number] = shared

    def remove(self, turn: Turn) -> None:
        """A turn waits no more."""
        self._shared.pop(turn.number, None)

    def serves(self, turn: Turn, now: float) -> bool:
        """Whether the turn does better to wait for this prefill than to take its place."""
        return turn.number in self._shared and now < self._deadline

    def forks(self) -> set[int]:
        """Positions where others will want to go on from."""
        return set(self._shared.values())
