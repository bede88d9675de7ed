"""Who guesses what a turn says next. What is guessed wrong costs time and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .turn import Turn


class Drafter(Protocol):
    """Proposes tokens for a decode segment; the pass over them finds out which were right."""

    def propose(self, turn: Turn) -> Sequence[int]:
        """Tokens that may follow the turn's last one; usually none."""
        ...


class NoDrafts:
    """Proposes nothing."""

    def propose(self, turn: Turn) -> Sequence[int]:
        return ()
