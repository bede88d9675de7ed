"""Prefixes that are kept on purpose, and those whose agent is gone. Knows no pool and no path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoints import Checkpoints
from .matching import deepest_above
from .nodes import Checkpoint, Kind, Node, locate, walk
from .paths import Kept
from .tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Pin:
    """A lock, and a hold on the checkpoint to go on from."""

    node: Node
    checkpoint: Checkpoint | None


class Pins:
    """All pins of a tree. A page under several of them counts once; in all at most `max_pages`."""

    def __init__(self, tree: PrefixTree, checkpoints: Checkpoints, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_pages = 0
        self._tree = tree
        self._checkpoints = checkpoints
        self._pins: dict[Kept, Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pin(self, kept: Kept, now: int) -> bool:
        """Keeps what is left of a prefix; False where nothing is, or where it is too much."""
        if kept in self._pins:
            return not self._pins[kept].node.is_hidden
        node = _last_node(kept)
        if node.parent is None or node.is_hidden:
            return False
        num_needed = min(-(-(kept.position - node.start) // self._tree.page_tokens), len(node.pages))
        num_new = 0 if node.num_pins else num_needed
        num_new += sum(len(above.pages) for above in chain(node.parent) if not above.num_pins)
        if self.num_pages + num_new > self.max_pages:
            return False
        if num_needed < len(node.pages):
            node = self._tree.split(node, num_needed)
        self._tree.lock(node, now)
        for above in chain(node):
            above.num_pins += 1
        self.num_pages += num_new
        checkpoint = deepest_above(node, kept.position)
        if checkpoint is not None:
            self._checkpoints.hold(checkpoint)
        self._pins[kept] = Pin(node, checkpoint)
        return True

    def unpin(self, kept: Kept, now: int) -> list[int]:
        """Undoes pin; returns the pages that nothing but it had kept."""
        pin = self._pins.pop(kept, None)
        if pin is None:
            return []
        for above in chain(pin.node):
            above.num_pins -= 1
            self.num_pages -= 0 if above.num_pins else len(above.pages)
        if pin.checkpoint is not None:
            self._checkpoints.release(pin.checkpoint)
        return self._tree.unlock(pin.node, now)

    def clear(self, now: int) -> list[int]:
        """Undoes all."""
        return [page for kept in list(self._pins) for page in self.unpin(kept, now)]


def chain(node: Node | None) -> Iterator[Node]:
    """A node and all above it."""
    while node is not None:
        yield node
        node = node.parent


def retire(tree: PrefixTree, kept: Kept) -> None:
    """The agent of a kept prefix is gone: what it wrote and nobody else has built on leaves first.

    Where others still build on it, it leaves when the last of them is gone.
    """
    node = _last_node(kept)
    is_alone = not node.is_hidden and node.end < kept.position + tree.page_tokens
    for current in list(chain(node)):
        agent = current.writer.agent if current.writer is not None else None
        if agent != kept.agent and not current.is_orphaned:
            return
        current.is_orphaned = True
        is_alone = is_alone and _is_alone(current, kept.agent)
        if is_alone and not _retire_one(tree, current, kept.agent):
            is_alone = False


def drop(tree: PrefixTree, agents: frozenset[str]) -> list[int]:
    """These agents are done for: takes out what they wrote and nobody else has used, and returns its pages.

    Checkpoints of theirs in pages that others go on from leave too.
    """
    freed: list[int] = []
    for node in reversed(list(tree.nodes())):  # children before their parents
        for checkpoint in list(node.checkpoints):
            if not checkpoint.num_holders and not _is_of_others(checkpoint, agents) and node.pages:
                freed += tree.detach(checkpoint)
        if node.writer is not None and node.writer.agent in agents:
            freed += _drop_end(tree, node)
    return freed


def _drop_end(tree: PrefixTree, node: Node) -> list[int]:
    """The pages of a leaf behind the last checkpoint that is left in it."""
    if not node.is_evictable:
        return []
    deepest = node.deepest(node.end)
    if deepest is None:
        return tree.remove(node)
    num_used = -(-(deepest.position - node.start) // tree.page_tokens)
    if num_used >= len(node.pages):
        return []
    tree.split(node, num_used)
    return tree.remove(node)


def _is_of_others(checkpoint: Checkpoint, agents: frozenset[str]) -> bool:
    is_theirs = checkpoint.agent in agents and checkpoint.last_agent in agents
    return not is_theirs or checkpoint.kind == Kind.SYSTEM


def _last_node(kept: Kept) -> Node:
    """The node with the last of what is left; the root if nothing is."""
    while not kept.node.pages and kept.node.parent is not None:
        kept.position = min(kept.position, kept.node.start)
        kept.node = kept.node.parent
    return locate(kept.node, kept.position)


def _is_alone(node: Node, agent: str) -> bool:
    """Nobody holds it, and all below is of agents that are gone."""
    return not node.locks and all(below.is_retired or _is_all_of(below, agent) for below in node.below())


def _is_all_of(top: Node, agent: str) -> bool:
    return all(
        not node.locks and (node.is_retired or (node.writer is not None and node.writer.agent == agent))
        for node in walk(top)
    )


def _retire_one(tree: PrefixTree, node: Node, agent: str) -> bool:
    """Retires a node and what hangs below it, or only the part after a checkpoint that others use: False."""
    for below in list(node.below()):
        for one in walk(below):
            tree.retire(one)
    shared = max((found.position for found in node.checkpoints if _is_shared(found, agent)), default=None)
    if shared is not None:
        num_shared = -(-(shared - node.start) // tree.page_tokens)
        if num_shared >= len(node.pages):
            return False
        tree.split(node, num_shared)
    tree.retire(node)
    return shared is None


def _is_shared(checkpoint: Checkpoint, agent: str) -> bool:
    return checkpoint.kind == Kind.SYSTEM or checkpoint.last_agent != agent
