"""What the tree of kept prefixes is made of: nodes with pages, and the checkpoints that lie in them.

Tokens are bytes here (4 per token, as array("I") holds them), so that comparing is memcmp. Knows no rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

TOKEN_BYTES = 4


class Kind(IntEnum):
    """Why a checkpoint was taken."""

    SYSTEM = 0  # the end of system prompt and tools
    TURN = 1  # the end of the last message that the model answers
    GENERATED = 2  # the last token of an answer
    BRANCH = 3  # where prefixes part
    BORDER = 4  # the last finished chunk of a cancelled or paused turn


@dataclass(frozen=True, slots=True, eq=False)
class Writer:
    """Names a path to the tree."""

    number: int  # never used twice
    agent: str  # whose path it is


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A recurrent state kept at one position of a prefix."""

    position: int  # tokens that the state has seen; lies in the node: start < position <= end
    row: int  # of the pool of states
    kind: Kind
    agent: str  # who took it
    writer: Writer  # the path that computed it
    node: Node
    taken: int
    last_use: int
    last_agent: str  # who used it last
    num_holders: int = 0  # paths that restore it in their next step, and pins: no victim, row not rewritten
    is_superseded: bool = False
    is_retired: bool = False
    is_forgotten: bool = False  # in no node any more; its row is freed with its last holder


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of whole pages; or a tail: a leaf of one page that holds fewer tokens; or a namespace's root.

    `key` names the node among its parent's children: the bytes of its first page (a tail: all its bytes,
    among its parent's tails; a root: the namespace).
    """

    key: bytes
    tokens: bytearray
    pages: list[int]
    parent: Node | None
    last_use: int
    writer: Writer | None = None  # the path that wrote these pages
    start: int = 0  # tokens above this node
    locks: int = 0  # paths and pins whose last node this is or lies below
    num_pins: int = 0  # those of the locks that are pins
    is_hidden: bool = False  # found faulty: never matched again, removed with its last lock
    is_orphaned: bool = False  # its agent is gone
    is_retired: bool = False  # its agent is gone and nobody else has built on it
    children: dict[bytes, Node] = field(default_factory=dict)
    tails: dict[bytes, Node] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens down to this node's end."""
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def is_evictable(self) -> bool:
        return not (self.locks or self.children or self.tails) and bool(self.pages)

    @property
    def rank(self) -> Rank:
        """What the end of this leaf is worth."""
        if self.is_retired:
            return Rank.RETIRED
        deepest = self.deepest(self.end)
        last_page = self.end - len(self.tokens) // (TOKEN_BYTES * len(self.pages))
        return Rank.BARE if deepest is None or deepest.position <= last_page else Rank.AGED

    def deepest(self, limit: int) -> Checkpoint | None:
        """This node's last checkpoint at a position of at most `limit`."""
        found: Checkpoint | None = None
        for checkpoint in self.checkpoints:
            if checkpoint.position <= limit and (found is None or checkpoint.position > found.position):
                found = checkpoint
        return found

    def below(self) -> Iterator[Node]:
        yield from self.children.values()
        yield from self.tails.values()


class Rank(IntEnum):
    """In which order leaves lose pages: lower ranks first, within a rank the one used longest ago."""

    RETIRED = 0  # its agent is gone
    BARE = 1  # no checkpoint lies in its last page, so nothing can go on from there (dense: every leaf)
    AGED = 2


def walk(top: Node) -> Iterator[Node]:
    """A subtree, parents before their children."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.below()


def locate(node: Node, position: int) -> Node:
    """The node that holds the token before `position`, at `node` or above it; the root for position 0."""
    while node.parent is not None and node.start >= position:
        node = node.parent
    return node


def common_tokens(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Length of the longest common prefix in tokens; meant for a page or less."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not difference:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
