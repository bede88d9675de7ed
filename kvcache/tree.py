"""The radix tree of kept prefixes: which tokens are held in which pages, and who keeps them from leaving.

Knows no pool of pages: those that the tree lets go of are returned to its owner; rows of states go back to
`Checkpoints` at once. Times are the owner's logical clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoints import Checkpoints, move
from .eviction import VictimLine
from .matching import Match, equal_pages, find_match
from .nodes import TOKEN_BYTES, Checkpoint, Node, Rank, Writer, walk


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of newly inserted pages."""

    node: Node  # ends where the inserted tokens end; carries the lock that its ancestor carried
    num_duplicates: int  # the first pages of the insertion, which the tree holds in other pages already
    freed: list[int]  # pages of tails that the new pages supersede


class PrefixTree:
    """One tree per namespace. A locked node and all above it stay; unlocked leaves may be evicted.

    With `checkpoints` the tree is a hybrid model's: a match goes on from a checkpoint, so a tail without one
    is of no use and leaves.
    """

    def __init__(self, page_tokens: int, checkpoints: Checkpoints | None = None) -> None:
        self.page_tokens = page_tokens
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.checkpoints = checkpoints
        self.roots: dict[bytes, Node] = {}
        self.hidden: set[Node] = set()  # tops of hidden subtrees; below them only locked nodes are left
        self.num_nodes = 0  # roots not counted
        self.num_pages = 0
        self.num_unlocked_pages = 0  # all of them can be evicted
        self.num_evicted = dict.fromkeys(Rank, 0)  # pages, by what their leaf was worth
        self._leaves: VictimLine[Node] = VictimLine()

    def match(self, namespace: bytes, tokens: bytes, now: int) -> Match:
        """The longest kept prefix of `tokens`, token-exact. Changes no node; a new namespace gets a root."""
        return find_match(
            self._root(namespace, now), tokens, self.page_bytes, has_states=self.checkpoints is not None
        )

    def probe(self, namespace: bytes, tokens: bytes) -> Match | None:
        """`match` for whoever only wants to know: no root is made."""
        root = self.roots.get(namespace)
        if root is None:
            return None
        return find_match(root, tokens, self.page_bytes, has_states=self.checkpoints is not None)

    def lock(self, node: Node, now: int) -> None:
        """Keeps the node and all above it."""
        current: Node | None = node
        while current is not None:
            self._lock_one(current, now)
            current = current.parent

    def lock_match(self, match: Match, now: int) -> Node:
        """Keeps exactly the whole pages of a fresh match; returns the node that ends with them."""
        node = match.node
        if match.num_node_pages < len(node.pages):
            node = self.split(node, match.num_node_pages)
        self.lock(node, now)
        return node

    def lock_first_page(self, node: Node, now: int) -> Node:
        """Keeps a node's first page and none that follow it in its run; returns the node of that page."""
        if len(node.pages) > 1:
            node = self.split(node, 1)
        self.lock(node, now)
        return node

    def unlock(self, node: Node, now: int) -> list[int]:
        """Undoes one lock; returns the pages of nodes that nothing but it had kept."""
        freed: list[int] = []
        current: Node | None = node
        while current is not None:
            parent = current.parent
            current.locks -= 1
            current.last_use = now
            if not current.locks:
                self.num_unlocked_pages += len(current.pages)
                if current.is_hidden or self._is_useless(current):
                    freed += self.remove(current)
                else:
                    self._offer(current)
            current = parent
        return freed

    def insert(self, node: Node, tokens: bytearray, pages: list[int], writer: Writer, now: int) -> Insertion:
        """Adds whole pages below a node that the caller has locked, and moves that lock to their end.

        Pages that the tree holds already must lead, and after them all are new; the caller learns how many.
        """
        freed: list[int] = []
        start = 0
        while start < len(tokens):
            child = node.children.get(bytes(tokens[start : start + self.page_bytes]))
            if child is None:
                break
            num_equal = equal_pages(child, tokens, start, self.page_bytes)
            node = child if num_equal == len(child.pages) else self.split(child, num_equal)
            self._lock_one(node, now)
            start += num_equal * self.page_bytes
        num_duplicates = start // self.page_bytes
        if start < len(tokens):
            outlived = self._take_outlived_tails(node, bytes(tokens[start : start + self.page_bytes]))
            node = self._append(node, tokens[start:], pages[num_duplicates:], writer, now)
            freed = self._inherit(node, outlived)
        return Insertion(node, num_duplicates, freed)

    def holder_of(self, node: Node, tokens: bytes) -> Node | None:
        """The child or tail below `node` whose first page begins with these tokens."""
        for among in (node.tails, node.children):
            for key, child in among.items():
                if key.startswith(tokens):
                    return child
        return None

    def insert_tail(self, node: Node, tokens: bytes, page: int, writer: Writer, now: int) -> Insertion:
        """Keeps a page that is not full, where no child or tail holds its tokens; shorter tails go."""
        outlived = self._take_outlived_tails(node, tokens)
        tail = self._add(node, bytearray(tokens), [page], writer, now)
        freed = self._inherit(tail, outlived)
        self._offer(tail)
        return Insertion(tail, 0, freed)

    def attach(self, checkpoint: Checkpoint) -> None:
        """Puts a new checkpoint into its node."""
        if self.checkpoints is not None:
            self.checkpoints.add(checkpoint)
            self._offer(checkpoint.node)

    def detach(self, checkpoint: Checkpoint) -> list[int]:
        """Forgets a checkpoint that nobody holds; a tail without any goes with it. Returns its page."""
        node = checkpoint.node
        self._forget(checkpoint)
        if self._is_useless(node) and not node.locks:
            return self.remove(node)
        self._offer(node)
        return []

    def is_fork(self, checkpoint: Checkpoint) -> bool:
        """More than one continuation of this position is kept."""
        node = checkpoint.node
        num_below, num_partial = divmod(checkpoint.position - node.start, self.page_tokens)
        if not num_partial:
            return checkpoint.position == node.end and len(node.children) + len(node.tails) > 1
        if num_below or node.parent is None:
            return False  # prefixes that part inside a page part between nodes
        prefix = node.key[: num_partial * TOKEN_BYTES]
        keys = [*node.parent.children, *node.parent.tails]
        return sum(key.startswith(prefix) and key != prefix for key in keys) > 1

    def evict(self, num_pages: int) -> list[int]:
        """Lets go of up to `num_pages` pages, from the ends of leaves, by rank and age."""
        evicted: list[int] = []
        while len(evicted) < num_pages:
            leaf = self._leaves.victim()
            if leaf is None:
                break
            rank = leaf.rank
            num_wanted = min(num_pages - len(evicted), self._num_of_rank(leaf, rank))
            self.num_evicted[rank] += num_wanted
            if num_wanted == len(leaf.pages):
                evicted += reversed(self.remove(leaf))
                continue
            evicted += reversed(leaf.pages[-num_wanted:])
            self._shorten(leaf, num_wanted)
            if leaf.rank != rank:
                self._offer(leaf)
        return evicted

    def hide(self, top: Node) -> list[int]:
        """Takes a subtree out of matching. Returns the pages nobody holds; others go with their locks."""
        if top.parent is not None:
            self._leave(top, top.parent)
        self.hidden.add(top)
        below = list(walk(top))
        freed: list[int] = []
        for node in reversed(below):  # children before their parents
            node.is_hidden = True
            self._forget_all(node)
            if not node.locks:
                freed += self.remove(node)
        return freed

    def retire(self, node: Node) -> None:
        """The agent of an unlocked node is gone: its pages and checkpoints leave first."""
        node.is_retired = True
        for checkpoint in node.checkpoints:
            checkpoint.is_retired = True
        self._offer(node)

    def clear(self) -> list[int]:
        """Forgets everything; returns all pages. No lock may be held."""
        pages = []
        for node in list(self.nodes()):
            pages += node.pages
            node.pages, node.tokens = [], bytearray()
        self.roots.clear()
        self.hidden.clear()
        self._leaves.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self.num_nodes = self.num_pages = self.num_unlocked_pages = 0
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first, hidden ones last."""
        for root in self.roots.values():
            for child in root.below():
                yield from walk(child)
        for top in self.hidden:
            yield from walk(top)

    def is_tail(self, node: Node) -> bool:
        return len(node.tokens) < len(node.pages) * self.page_bytes

    def split(self, node: Node, num_pages: int) -> Node:
        """Cuts a run; returns the new upper part. The node itself becomes the lower one and keeps its end, so
        whoever holds a lock on it still does."""
        border = num_pages * self.page_bytes
        upper = Node(
            node.key, node.tokens[:border], node.pages[:num_pages], node.parent, node.last_use, node.writer
        )
        upper.start, upper.locks, upper.num_pins = node.start, node.locks, node.num_pins
        upper.is_orphaned, upper.is_retired = node.is_orphaned, node.is_retired
        if node.parent is not None:
            node.parent.children[node.key] = upper
        node.start += num_pages * self.page_tokens
        del node.tokens[:border]
        del node.pages[:num_pages]
        node.key = bytes(node.tokens[: self.page_bytes])
        node.parent = upper
        upper.children[node.key] = node
        checkpoints, node.checkpoints = node.checkpoints, []
        for checkpoint in checkpoints:
            move(checkpoint, node if checkpoint.position > node.start else upper)
        self.num_nodes += 1
        return upper

    def _root(self, namespace: bytes, now: int) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, bytearray(), [], None, now)
        return root

    def _is_useless(self, node: Node) -> bool:
        return (
            self.checkpoints is not None and not node.checkpoints and bool(node.pages) and self.is_tail(node)
        )

    def _lock_one(self, node: Node, now: int) -> None:
        if not node.locks:
            self.num_unlocked_pages -= len(node.pages)
        node.locks += 1
        node.last_use = now
        node.is_retired = False

    def _offer(self, node: Node) -> None:
        """A node lost its last lock, its last child, or changed its rank."""
        if node.is_evictable:
            self._leaves.offer(node)
        elif node.parent is None and not (node.locks or node.children or node.tails):
            del self.roots[node.key]

    def _append(self, node: Node, tokens: bytearray, pages: list[int], writer: Writer, now: int) -> Node:
        """New whole pages with a lock, in the node itself where only their writer could notice."""
        if node.writer is writer and node.locks == 1 and not (node.children or node.tails):
            node.tokens += tokens
            node.pages += pages
            node.last_use = now
            self.num_pages += len(pages)
            return node
        child = self._add(node, tokens, pages, writer, now)
        self._lock_one(child, now)
        return child

    def _add(self, parent: Node, tokens: bytearray, pages: list[int], writer: Writer, now: int) -> Node:
        node = Node(bytes(tokens[: self.page_bytes]), tokens, pages, parent, now, writer, start=parent.end)
        among = parent.tails if self.is_tail(node) else parent.children
        among[node.key] = node
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.num_unlocked_pages += len(pages)
        return node

    def _take_outlived_tails(self, node: Node, tokens: bytes) -> list[Node]:
        """Takes out the unlocked tails that hold no more than the first of `tokens`."""
        outlived = [tail for key, tail in node.tails.items() if not tail.locks and tokens.startswith(key)]
        for tail in outlived:
            del node.tails[tail.key]
        return outlived

    def _inherit(self, node: Node, outlived: list[Node]) -> list[int]:
        """The checkpoints of tails lie in a new node now, which holds their tokens; returns their pages."""
        freed: list[int] = []
        for tail in outlived:
            for checkpoint in tail.checkpoints:
                move(checkpoint, node)
            tail.checkpoints = []
            freed += self._discard(tail)
        return freed

    def _leave(self, node: Node, parent: Node) -> None:
        among = parent.tails if self.is_tail(node) else parent.children
        del among[node.key]
        self._offer(parent)

    def _shorten(self, leaf: Node, num_pages: int) -> None:
        del leaf.pages[-num_pages:]
        del leaf.tokens[len(leaf.pages) * self.page_bytes :]
        self.num_pages -= num_pages
        self.num_unlocked_pages -= num_pages
        end = leaf.end
        for checkpoint in [found for found in leaf.checkpoints if found.position > end]:
            self._forget(checkpoint)

    def _num_of_rank(self, leaf: Node, rank: Rank) -> int:
        """How many of the leaf's last pages are worth no more than its end."""
        if rank != Rank.BARE:
            return len(leaf.pages) if rank == Rank.RETIRED else 1
        deepest = leaf.deepest(leaf.end)
        if deepest is None:
            return len(leaf.pages)
        return len(leaf.pages) - -(-(deepest.position - leaf.start) // self.page_tokens)

    def remove(self, node: Node) -> list[int]:
        """Takes an unlocked leaf out; returns its pages."""
        if node in self.hidden:
            self.hidden.remove(node)
        elif node.parent is not None:
            self._leave(node, node.parent)
        self._forget_all(node)
        return self._discard(node)

    def _discard(self, node: Node) -> list[int]:
        self.num_nodes -= 1
        self.num_pages -= len(node.pages)
        self.num_unlocked_pages -= len(node.pages)
        pages, node.pages = node.pages, []
        node.tokens = bytearray()  # a handle on what was here must not keep it in memory
        return pages

    def _forget_all(self, node: Node) -> None:
        for checkpoint in list(node.checkpoints):
            self._forget(checkpoint)

    def _forget(self, checkpoint: Checkpoint) -> None:
        if self.checkpoints is not None:
            self.checkpoints.forget(checkpoint)
