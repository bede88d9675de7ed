"""Which recurrent states are kept, in which rows, and whose checkpoint leaves first.

Knows positions and agents, but neither the tree's shape nor the bytes of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

from .matching import deepest_above
from .nodes import Checkpoint, Kind, Node
from .state_rows import StateRows

__all__ = ["Cause", "Checkpoint", "Checkpoints", "Kind"]

_NUM_KEPT_TURNS = 2
_NEAR_TOKENS = 2048


class Cause(IntEnum):
    """Why a checkpoint makes room for another, in the order in which they do."""

    SUPERSEDED = 0  # its agent has gone on from newer ones
    RETIRED = 1  # its agent is gone
    AGED = 2  # used longest ago, those first that lie close behind another


class Checkpoints:
    """All checkpoints of a tree and the rows they take; few enough to be scanned."""

    def __init__(self, rows: StateRows) -> None:
        self.rows = rows
        self.num_evicted = dict.fromkeys(Cause, 0)
        self.num_restored = 0
        self._num_forgotten = 0
        self._all: set[Checkpoint] = set()

    @property
    def num_lost(self) -> int:
        """Checkpoints that left with their pages, not to make room for others."""
        return self._num_forgotten - sum(self.num_evicted.values())

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._all)

    def add(self, checkpoint: Checkpoint) -> None:
        """Its reserved row becomes a checkpoint of its node."""
        self.rows.seal(checkpoint.row)
        self._all.add(checkpoint)
        checkpoint.node.checkpoints.append(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint out of its node; its row is freed now, or with its last holder."""
        checkpoint.node.checkpoints.remove(checkpoint)
        checkpoint.is_forgotten = True
        self._num_forgotten += 1
        self._free_forgotten(checkpoint)

    def hold(self, checkpoint: Checkpoint) -> None:
        """Until the release its row is neither freed nor given to another."""
        checkpoint.num_holders += 1

    def restore(self, checkpoint: Checkpoint, agent: str, now: int) -> None:
        """A path of this agent goes on from it: held until that has run."""
        self.hold(checkpoint)
        self.num_restored += 1
        _use(checkpoint, agent, now)

    def touch(self, checkpoint: Checkpoint, kind: Kind, agent: str, now: int) -> None:
        """It was to be taken again."""
        _use(checkpoint, agent, now)
        if checkpoint.agent == agent:
            checkpoint.taken = now
        if kind == Kind.SYSTEM or checkpoint.kind in (Kind.GENERATED, Kind.BORDER):
            checkpoint.kind = kind

    def release(self, checkpoint: Checkpoint) -> None:
        """Undoes one hold."""
        checkpoint.num_holders -= 1
        self._free_forgotten(checkpoint)

    def clear(self) -> None:
        """Forgets all; the nodes are gone already."""
        for checkpoint in self._all:
            self.rows.free(checkpoint.row)
        self._all.clear()

    def victim(self) -> Checkpoint | None:
        """Whose exact row is given away: superseded ones first, then those of gone agents, then by age."""
        return min(self._unheld(is_small=False), key=_standing, default=None)

    def outdone_by(self, victim: Checkpoint) -> Checkpoint | None:
        """Who leaves for good when this one is to move to a small row; None where one is free.

        Itself, if all that have a small row and are not held are worth more.
        """
        if self.rows.small.num_free:
            return None
        return min((victim, *self._unheld(is_small=True)), key=_standing)

    def demote(self, checkpoint: Checkpoint) -> None:
        """A checkpoint that nobody holds gives up its exact row for a free small one."""
        checkpoint.row = self.rows.demote(checkpoint.row)

    def count_eviction(self, checkpoint: Checkpoint) -> None:
        """To be called before a victim is forgotten."""
        self.num_evicted[_cause(checkpoint)] += 1

    def supersede(self, agent: str, is_fork: Callable[[Checkpoint], bool]) -> None:
        """After a TURN checkpoint: the agent goes on from its newest two, what it took before is not missed.

        SYSTEM checkpoints stay, and so do those that another agent used last or that still are forks.
        """
        own = sorted(
            (checkpoint for checkpoint in self._all if checkpoint.agent == agent),
            key=lambda checkpoint: checkpoint.taken,
            reverse=True,
        )
        num_turns = 0
        for checkpoint in own:
            is_spent = checkpoint.kind in (Kind.GENERATED, Kind.BORDER) and num_turns > 0
            is_old = num_turns >= _NUM_KEPT_TURNS and checkpoint.kind != Kind.SYSTEM
            num_turns += checkpoint.kind == Kind.TURN
            if (is_spent or is_old) and checkpoint.last_agent == agent:
                checkpoint.is_superseded = checkpoint.kind != Kind.BRANCH or not is_fork(checkpoint)

    def _unheld(self, *, is_small: bool) -> Iterator[Checkpoint]:
        for checkpoint in self._all:
            if not checkpoint.num_holders and self.rows.is_small(checkpoint.row) == is_small:
                yield checkpoint

    def _free_forgotten(self, checkpoint: Checkpoint) -> None:
        if checkpoint.is_forgotten and not checkpoint.num_holders:
            self._all.remove(checkpoint)
            self.rows.free(checkpoint.row)


def move(checkpoint: Checkpoint, node: Node) -> None:
    """The same position lies in another node now."""
    checkpoint.node = node
    node.checkpoints.append(checkpoint)


def _use(checkpoint: Checkpoint, agent: str, now: int) -> None:
    checkpoint.last_use = now
    checkpoint.last_agent = agent or checkpoint.last_agent
    checkpoint.is_superseded = checkpoint.is_retired = False


def _cause(checkpoint: Checkpoint) -> Cause:
    if checkpoint.is_superseded:
        return Cause.SUPERSEDED
    return Cause.RETIRED if checkpoint.is_retired else Cause.AGED


def _standing(checkpoint: Checkpoint) -> tuple[Cause, bool, int, int]:
    """The lowest leaves first: of those that age, first the ones without which little is computed again."""
    cause = _cause(checkpoint)
    is_apart = cause is Cause.AGED and not _is_near_another(checkpoint)
    return cause, is_apart, checkpoint.last_use, checkpoint.position


def _is_near_another(checkpoint: Checkpoint) -> bool:
    above = deepest_above(checkpoint.node, checkpoint.position - 1)
    return above is not None and checkpoint.position - above.position <= _NEAR_TOKENS
