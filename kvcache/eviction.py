"""In which order unused leaves lose their pages: by rank, then the one used longest ago first.

Knows no tokens or pages.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

_SLACK = 64


class Leaf(Protocol):
    """What eviction needs to see of a tree's node."""

    last_use: int  # logical time: larger is later

    @property
    def rank(self) -> int: ...  # lower ranks go first

    @property
    def is_evictable(self) -> bool: ...  # a leaf, in the tree, locked by nobody


LeafT = TypeVar("LeafT", bound=Leaf)


class VictimLine(Generic[LeafT]):
    """A heap with lazy entries: one counts only while its leaf is evictable and stands as it did then."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, LeafT]] = []
        self._num_offered = 0
        self._compact_at = _SLACK

    def offer(self, leaf: LeafT) -> None:
        """To be called whenever a leaf becomes evictable or changes its rank; ties go in this order."""
        if len(self._heap) >= self._compact_at:
            self._compact()
        self._num_offered += 1
        heapq.heappush(self._heap, (leaf.rank, leaf.last_use, self._num_offered, leaf))

    def victim(self) -> LeafT | None:
        """The leaf to shrink next, or None. It stays in line until it is no longer evictable."""
        while self._heap:
            if _is_valid(self._heap[0]):
                return self._heap[0][3]
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._compact_at = _SLACK

    def _compact(self) -> None:
        """Drops stale and repeated entries: a leaf that is used often never fills the memory."""
        newest = {id(entry[3]): entry for entry in self._heap if _is_valid(entry)}
        self._heap = sorted(newest.values(), key=lambda entry: entry[:3])
        self._compact_at = 2 * len(self._heap) + _SLACK


def _is_valid(entry: tuple[int, int, int, LeafT]) -> bool:
    rank, last_use, _, leaf = entry
    return leaf.is_evictable and leaf.last_use == last_use and leaf.rank == rank
