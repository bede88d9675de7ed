"""The rows that hold checkpoints' states: exact ones, and small ones for states that gave up an exact row.

Knows numbers only. Rows [0, num_exact) are exact; the small ones, whose states are held in 8 bits, follow.
A state moves down at the start of the next step that runs; until then it still lies in the row that it left.
"""

from __future__ import annotations

from .paths import StateMove
from .pool import PagePool


class StateRows:
    """Two pools under one numbering, and the moves between them that no step has made yet."""

    def __init__(self, num_exact: int, num_small: int) -> None:
        self.exact = PagePool(num_exact, "state row")
        self.small = PagePool(num_small, "small state row")
        self.num_demoted = 0
        self._sources: dict[int, int] = {}  # small row -> the exact one that its state still lies in

    @property
    def demotions(self) -> tuple[StateMove, ...]:
        """What the next step is to move."""
        return tuple(StateMove(source, target) for target, source in self._sources.items())

    def is_small(self, row: int) -> bool:
        return row >= self.exact.num_pages

    def reserve(self) -> int:
        """A free exact row, for a state that the coming step saves. Raises PoolExhausted."""
        (row,) = self.exact.allocate(1)
        return row

    def seal(self, row: int) -> None:
        """A reserved row holds a checkpoint's state from now on."""
        self.exact.seal([row])

    def demote(self, row: int) -> int:
        """Gives the state of an exact row a small one, which it returns. Raises PoolExhausted.

        The exact row is free at once: nothing is saved into it before the next step, which moves first.
        """
        places = self.small.allocate(1)
        self.small.seal(places)
        self.exact.free([row])
        small_row = self.exact.num_pages + places[0]
        self._sources[small_row] = row
        self.num_demoted += 1
        return small_row

    def free(self, row: int) -> None:
        """A row without a state; a move into it is not made."""
        if not self.is_small(row):
            self.exact.free([row])
            return
        self._sources.pop(row, None)
        self.small.free([row - self.exact.num_pages])

    def take_demotions(self) -> tuple[StateMove, ...]:
        """The moves, for the step that makes them before anything else."""
        demotions = self.demotions
        self._sources.clear()
        return demotions
