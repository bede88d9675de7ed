"""The radix tree of kept prefixes: which tokens are held in which pages, and who keeps them from leaving.

Tokens are bytes here (4 per token, as array("I") holds them), so that comparing is memcmp. Knows no pool:
pages that the tree lets go of are returned to its owner. Times are the owner's logical clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .eviction import OldestFirst

TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class Node:
    """A run of whole pages; or a tail: a leaf of one page that holds fewer tokens; or a namespace's root.

    `key` names the node among its parent's children: the bytes of its first page (a tail: all its bytes;
    a root: the namespace).
    """

    key: bytes
    tokens: bytearray
    pages: list[int]
    parent: Node | None
    last_use: int
    writer: int | None = None  # the path that wrote these pages
    locks: int = 0  # paths whose last node this is or lies below
    is_hidden: bool = False  # found faulty: never matched again, removed with its last lock
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def is_evictable(self) -> bool:
        return not self.locks and not self.children and bool(self.pages)


@dataclass(frozen=True, slots=True)
class Partial:
    """The first tokens of a page that match where no whole page does."""

    node: Node  # holds the page, as its first once the match's whole pages are locked
    page: int
    num_tokens: int  # 1 .. page_tokens


@dataclass(frozen=True, slots=True)
class Match:
    """The longest kept prefix of some tokens. Valid until the tree changes."""

    node: Node  # the last node with whole pages in the match, or the root
    num_node_pages: int  # how many of that node's pages match
    pages: list[int]
    partial: Partial | None


@dataclass(frozen=True, slots=True)
class Insertion:
    """What became of newly inserted pages."""

    node: Node  # ends where the inserted tokens end; carries the lock that its ancestor carried
    num_duplicates: int  # the first pages of the insertion, which the tree holds in other pages already
    freed: list[int]  # pages of tails that the new pages supersede


def common_tokens(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Length of the longest common prefix in tokens; meant for a page or less."""
    length = min(len(one), len(other))
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if not difference:
        return length // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


class PrefixTree:
    """One tree per namespace. A locked node and all above it stay; unlocked leaves may be evicted."""

    def __init__(self, page_tokens: int) -> None:
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.roots: dict[bytes, Node] = {}
        self.hidden: set[Node] = set()  # tops of hidden subtrees; below them only locked nodes are left
        self.num_nodes = 0  # roots not counted
        self.num_pages = 0
        self.num_unlocked_pages = 0  # all of them can be evicted
        self._leaves: OldestFirst[Node] = OldestFirst()

    def match(self, namespace: bytes, tokens: bytes, now: int) -> Match:
        """The longest kept prefix of `tokens`, token-exact. Changes no node; a new namespace gets a root."""
        node = self._root(namespace, now)
        pages: list[int] = []
        start = 0
        while start + self.page_bytes <= len(tokens):
            child = node.children.get(tokens[start : start + self.page_bytes])
            if child is None:
                break
            if not tokens.startswith(child.tokens, start):
                return self._match_inside(child, pages, tokens, start)
            pages += child.pages
            start += len(child.tokens)
            node = child
        rest = tokens[start : start + self.page_bytes]
        return Match(node, len(node.pages), pages, self._match_partial(node, rest))

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
            node = self._split(node, match.num_node_pages)
        self.lock(node, now)
        return node

    def lock_partial(self, partial: Partial, now: int) -> Node:
        """Keeps the page of a partial match, after `lock_match`, and none that follow it in its run."""
        node = partial.node
        if len(node.pages) > 1:
            node = self._split(node, 1)
        self.lock(node, now)
        return node

    def unlock(self, node: Node, now: int) -> list[int]:
        """Undoes one lock; returns the pages of hidden nodes that lost their last one."""
        freed: list[int] = []
        current: Node | None = node
        while current is not None:
            parent = current.parent
            current.locks -= 1
            current.last_use = now
            if not current.locks:
                self.num_unlocked_pages += len(current.pages)
                if current.is_hidden:
                    freed += self._remove(current)
                else:
                    self._offer(current)
            current = parent
        return freed

    def insert(self, node: Node, tokens: bytearray, pages: list[int], writer: int, now: int) -> Insertion:
        """Adds whole pages below a node that the caller has locked, and moves that lock to their end.

        Pages that the tree holds already must lead, and after them all are new; the caller learns how many.
        """
        freed: list[int] = []
        start = 0
        while start < len(tokens):
            child = node.children.get(bytes(tokens[start : start + self.page_bytes]))
            if child is None:
                break
            num_equal = self._equal_pages(child, tokens, start)
            node = child if num_equal == len(child.pages) else self._split(child, num_equal)
            self._lock_one(node, now)
            start += num_equal * self.page_bytes
        num_duplicates = start // self.page_bytes
        if start < len(tokens):
            first_page = bytes(tokens[start : start + self.page_bytes])
            freed = self._supersede(node, first_page)
            node = self._append(node, tokens[start:], pages[num_duplicates:], writer, now)
        return Insertion(node, num_duplicates, freed)

    def insert_tail(self, node: Node, tokens: bytes, page: int, writer: int, now: int) -> list[int]:
        """Keeps a page that is not full. Returns the pages that are not needed any more.

        Those are of shorter tails, or `page` itself where the tree holds these tokens already.
        """
        if any(key.startswith(tokens) for key in node.children):
            return [page]
        freed = self._supersede(node, tokens)
        self._offer(self._add(node, bytearray(tokens), [page], writer, now))
        return freed

    def evict(self, num_pages: int) -> list[int]:
        """Lets go of up to `num_pages` pages, from the ends of the leaves that were used longest ago."""
        evicted: list[int] = []
        while len(evicted) < num_pages:
            leaf = self._leaves.victim()
            if leaf is None:
                break
            num_wanted = num_pages - len(evicted)
            if num_wanted >= len(leaf.pages):
                evicted += reversed(self._remove(leaf))
            else:
                evicted += reversed(leaf.pages[-num_wanted:])
                del leaf.pages[-num_wanted:]
                del leaf.tokens[len(leaf.pages) * self.page_bytes :]
                self.num_pages -= num_wanted
                self.num_unlocked_pages -= num_wanted
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
            if not node.locks:
                freed += self._remove(node)
        return freed

    def clear(self) -> list[int]:
        """Forgets everything; returns all pages. No lock may be held."""
        pages = [page for node in self.nodes() for page in node.pages]
        self.roots.clear()
        self.hidden.clear()
        self._leaves.clear()
        self.num_nodes = self.num_pages = self.num_unlocked_pages = 0
        return pages

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first, hidden ones last."""
        for root in self.roots.values():
            for child in root.children.values():
                yield from walk(child)
        for top in self.hidden:
            yield from walk(top)

    def is_tail(self, node: Node) -> bool:
        return len(node.tokens) < len(node.pages) * self.page_bytes

    def _root(self, namespace: bytes, now: int) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, bytearray(), [], None, now)
        return root

    def _equal_pages(self, node: Node, tokens: bytes | bytearray, start: int) -> int:
        """How many of the node's pages equal the tokens from `start`, by halving; copies nothing."""
        low = 0
        high = min(len(node.tokens), len(tokens) - start) // self.page_bytes
        with memoryview(node.tokens) as run:
            while low < high:
                middle = (low + high + 1) // 2
                first, last = low * self.page_bytes, middle * self.page_bytes
                if tokens.startswith(run[first:last], start + first):
                    low = middle
                else:
                    high = middle - 1
        return low

    def _match_inside(self, node: Node, pages: list[int], tokens: bytes, start: int) -> Match:
        """The match ends in the middle of this node's run, after at least one page."""
        num_pages = self._equal_pages(node, tokens, start)
        border = num_pages * self.page_bytes
        rest = tokens[start + border : start + border + self.page_bytes]
        num_tokens = common_tokens(node.tokens[border : border + self.page_bytes], rest)
        partial = Partial(node, node.pages[num_pages], num_tokens) if num_tokens else None
        return Match(node, num_pages, pages + node.pages[:num_pages], partial)

    def _match_partial(self, node: Node, rest: bytes) -> Partial | None:
        """The child whose first page shares most tokens with `rest`."""
        best: Node | None = None
        num_best = 0
        probe = rest[:TOKEN_BYTES]
        if not probe:
            return None
        for key, child in node.children.items():
            if key.startswith(probe):
                best, num_best = child, common_tokens(key, rest)
                if num_best * TOKEN_BYTES == len(rest):
                    break
                probe = rest[: (num_best + 1) * TOKEN_BYTES]
        return Partial(best, best.pages[0], num_best) if best is not None else None

    def _lock_one(self, node: Node, now: int) -> None:
        if not node.locks:
            self.num_unlocked_pages -= len(node.pages)
        node.locks += 1
        node.last_use = now

    def _offer(self, node: Node) -> None:
        """A node lost its last lock or its last child."""
        if node.is_evictable:
            self._leaves.offer(node)
        elif node.parent is None and not node.locks and not node.children:
            del self.roots[node.key]

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cuts a run; returns the new upper part. The node itself becomes the lower one and keeps its end, so
        whoever holds a lock on it still does."""
        border = num_pages * self.page_bytes
        upper = Node(
            node.key, node.tokens[:border], node.pages[:num_pages], node.parent, node.last_use, node.writer
        )
        upper.locks = node.locks
        if node.parent is not None:
            node.parent.children[node.key] = upper
        del node.tokens[:border]
        del node.pages[:num_pages]
        node.key = bytes(node.tokens[: self.page_bytes])
        node.parent = upper
        upper.children[node.key] = node
        self.num_nodes += 1
        return upper

    def _append(self, node: Node, tokens: bytearray, pages: list[int], writer: int, now: int) -> Node:
        """New whole pages with a lock, in the node itself where only their writer could notice."""
        if node.writer == writer and node.locks == 1 and not node.children:
            node.tokens += tokens
            node.pages += pages
            node.last_use = now
            self.num_pages += len(pages)
            return node
        child = self._add(node, tokens, pages, writer, now)
        self._lock_one(child, now)
        return child

    def _add(self, parent: Node, tokens: bytearray, pages: list[int], writer: int, now: int) -> Node:
        node = Node(bytes(tokens[: self.page_bytes]), tokens, pages, parent, now, writer)
        parent.children[node.key] = node
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.num_unlocked_pages += len(pages)
        return node

    def _supersede(self, node: Node, tokens: bytes) -> list[int]:
        """Removes unlocked tails that hold no more than the first of `tokens`."""
        superseded = [
            child
            for key, child in node.children.items()
            if len(key) < self.page_bytes and not child.locks and tokens.startswith(key)
        ]
        return [page for child in superseded for page in self._remove(child)]

    def _leave(self, node: Node, parent: Node) -> None:
        del parent.children[node.key]
        self._offer(parent)

    def _remove(self, node: Node) -> list[int]:
        """Takes an unlocked leaf out; returns its pages."""
        if node in self.hidden:
            self.hidden.remove(node)
        elif node.parent is not None:
            self._leave(node, node.parent)
        self.num_nodes -= 1
        self.num_pages -= len(node.pages)
        self.num_unlocked_pages -= len(node.pages)
        pages, node.pages = node.pages, []
        return pages


def walk(top: Node) -> Iterator[Node]:
    """A subtree, parents before their children."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
