"""What the cache hands out: paths, what opening one needs, and what stays of one. Knows no tree or pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from .nodes import Checkpoint, Node, Writer


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a whole page, in every layer, before this step's writes."""

    source: int
    target: int
    num_tokens: int  # first rows of the page that are the path's; the others mean nothing and get overwritten


@dataclass(frozen=True, slots=True)
class StateMove:
    """Hold in 8 bits, in the target row, the state of a source row that something else is saved into next."""

    source: int
    target: int


@dataclass(slots=True, eq=False)
class Kept:
    """The end of what a path published: for pins, and for when its agent is gone. Opaque to others."""

    node: Node
    position: int
    agent: str


@dataclass(slots=True, eq=False)
class Path:
    """One turn's committed tokens and its page table. Read-only outside this room."""

    num_tokens: int  # committed length; with states also the position of the live state
    num_cached: int  # tokens that came from the tree at open and are not computed again
    pages: list[int]  # covers [0, num_tokens) and what is reserved beyond
    writer: Writer
    node: Node  # the locked node that ends where the published pages end
    num_published: int  # first pages of the table whose tokens the tree holds, here or in a twin
    num_sealed: int  # their tokens; rows below are never written again, also those beyond num_tokens
    pending: bytearray = field(default_factory=bytearray)  # committed tokens after the published pages
    twins: list[int] = field(default_factory=list)  # private pages that another path published first
    source: Node | None = None  # locked until the next step, which copies or restores from it, has run
    restored: Checkpoint | None = None  # held as long
    state_row: int | None = None  # reserved for a checkpoint
    tip: Node | None = None  # holds the checkpoint at num_tokens
    heirs: set[int] = field(default_factory=set)  # paths that went on from what this one computed
    kept: Kept | None = None
    is_tainted: bool = False  # went on from what a poisoned path computed: it may keep nothing
    is_open: bool = True

    @property
    def number(self) -> int:
        """Never used twice."""
        return self.writer.number

    def private_pages(self) -> list[int]:
        """Pages that this path alone owns."""
        return self.twins + self.pages[self.num_published :]


@dataclass(frozen=True, slots=True)
class Opening:
    """A new path; `copy` and `restore` belong into the path's first step."""

    path: Path
    copy: PageCopy | None
    restore: int | None  # the state row to begin from; None: from a zero state (a dense model: nothing)


@dataclass(frozen=True, slots=True)
class Resident:
    """What the tree holds of some tokens."""

    num_matched: int  # tokens whose pages are held, token-exact
    num_cached: int  # tokens that open would not compute again


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pages and rows of states by owner, and counts over the cache's life. Dense models have no states."""

    num_pages: int
    num_free: int
    num_tree: int
    num_live: int
    num_nodes: int
    num_pinned_pages: int
    num_evicted: int  # pages, for whatever reason; the next four add up to it
    num_evicted_retired: int  # of agents that are gone
    num_evicted_bare: int  # from which no checkpoint let anyone go on
    num_evicted_aged: int  # used longest ago
    num_evicted_tails: int  # partial pages that left with their checkpoint
    num_states: int  # exact rows
    num_free_states: int
    num_small_states: int  # rows that hold a state in 8 bits
    num_free_small_states: int
    num_checkpoints: int  # in rows of both kinds
    num_restored: int  # paths that went on from a checkpoint
    num_states_evicted: int  # checkpoints that made room for others; the next three add up to it
    num_states_superseded: int
    num_states_retired: int
    num_states_aged: int
    num_states_demoted: int  # checkpoints that gave up an exact row for a small one
    num_states_lost: int  # checkpoints that left with their pages, or with a faulty path
