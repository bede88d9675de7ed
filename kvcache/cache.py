"""The cache as the scheduler sees it: paths (one turn's tokens and pages) over a tree of kept prefixes.

Plain bookkeeping on the engine's thread: tokens and page numbers in, page numbers out. Knows nothing of
arrays, layers, turns or time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import integrity
from .errors import PathClosed, PathsOpen, PathTooShort
from .pool import PagePool
from .settings import PAGE_TOKENS
from .tree import TOKEN_BYTES, Match, Node, PrefixTree


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy a whole page, in every layer, before this step's writes."""

    source: int
    target: int
    num_tokens: int  # first rows of the page that are the path's; the others mean nothing and get overwritten


@dataclass(slots=True, eq=False)
class Path:
    """One turn's committed tokens and its page table. Read-only outside this room."""

    num_tokens: int  # committed length
    num_cached: int  # tokens that came from the tree at open
    pages: list[int]  # covers [0, num_tokens) and what is reserved beyond
    number: int  # names the path to the tree; never used twice
    node: Node  # the locked node that ends where the published pages end
    num_published: int  # first pages of the table whose tokens the tree holds, here or in a twin
    pending: bytearray = field(default_factory=bytearray)  # committed tokens after the published pages
    twins: list[int] = field(default_factory=list)  # private pages that another path published first
    source: Node | None = None  # locked until the partial page's copy is known to have run
    is_open: bool = True

    def private_pages(self) -> list[int]:
        """Pages that this path alone owns."""
        return self.twins + self.pages[self.num_published :]


@dataclass(frozen=True, slots=True)
class Opening:
    """A new path; `copy` belongs into the path's first step."""

    path: Path
    copy: PageCopy | None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pages by owner; num_evicted counts pages over the cache's life."""

    num_pages: int
    num_free: int
    num_tree: int
    num_live: int
    num_nodes: int
    num_evicted: int


class Cache:
    """Opens, grows, publishes and closes paths. A method that is given a closed path raises PathClosed."""

    def __init__(self, num_pages: int, *, page_tokens: int = PAGE_TOKENS, keep_prefixes: bool = True) -> None:
        self.page_tokens = page_tokens
        self.keep_prefixes = keep_prefixes
        self._pool = PagePool(num_pages)
        self._tree = PrefixTree(page_tokens)
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._paths: set[Path] = set()
        self._now = 0
        self._num_opened = 0
        self._num_evicted = 0

    def open(self, namespace: bytes, token_ids: array[int], *, max_match: int) -> Opening:
        """A path over the longest kept prefix of `token_ids` (array("I")), at most `max_match` tokens of it.

        Whole pages are shared and locked. The tokens of a partial last page come with a copy into a private
        page, or are left out where no page can be had.
        """
        now = self._tick()
        length = max(max_match, 0) if self.keep_prefixes else 0
        tokens = bytes(memoryview(token_ids)[:length])
        match = self._tree.match(namespace, tokens, now)
        node = self._tree.lock_match(match, now)
        num_tokens = len(match.pages) * self.page_tokens
        self._num_opened += 1
        path = Path(num_tokens, num_tokens, match.pages, self._num_opened, node, len(match.pages))
        self._paths.add(path)
        return Opening(path, self._open_partial(path, match, tokens, now))

    def reserve(self, path: Path, num_tokens: int) -> bool:
        """Makes the page table cover [0, num_tokens), evicting as needed; False, no change, if it cannot."""
        self._check_open(path)
        pages = self._allocate(-(-num_tokens // self.page_tokens) - len(path.pages))
        if pages is None:
            return False
        path.pages += pages
        return True

    def commit(self, path: Path, token_ids: Sequence[int]) -> None:
        """The rows that an evaluated step wrote after the committed length become part of the path.

        Raises PathTooShort beyond the reserved pages.
        """
        self._check_open(path)
        num_tokens = path.num_tokens + len(token_ids)
        if num_tokens > len(path.pages) * self.page_tokens:
            raise PathTooShort(
                f"{num_tokens} tokens do not fit {len(path.pages)} pages of {self.page_tokens}"
            )
        path.num_tokens = num_tokens
        path.pending += array("I", token_ids).tobytes()
        if token_ids:
            self._release_source(path)

    def publish(self, path: Path) -> None:
        """Whole committed pages become the tree's, never to change again; the path keeps a lock on them.

        A page whose tokens the tree holds already stays this path's own until its close.
        """
        self._check_open(path)
        num_new = len(path.pending) // self._page_bytes
        if not num_new or not self.keep_prefixes or path.node.is_hidden:
            return
        tokens = path.pending[: num_new * self._page_bytes]
        pages = path.pages[path.num_published : path.num_published + num_new]
        insertion = self._tree.insert(path.node, tokens, pages, path.number, self._tick())
        self._pool.seal(pages[insertion.num_duplicates :])
        self._pool.free(insertion.freed)
        path.twins += pages[: insertion.num_duplicates]
        path.node = insertion.node
        path.num_published += num_new
        del path.pending[: len(tokens)]

    def close(self, path: Path, *, keep: bool = True) -> None:
        """Ends a path. What was published stays; keep: also other whole pages and the partial last one."""
        self._check_open(path)
        kept: int | None = None
        if keep and self.keep_prefixes and not path.node.is_hidden:
            self.publish(path)
            # Before the first commit the copy into the partial page may not have run.
            if path.pending and path.source is None:
                kept = self._keep_tail(path)
        self._end(path, [page for page in path.private_pages() if page != kept])

    def poison(self, path: Path) -> None:
        """A fault was seen in this path's data: ends it and takes what it published out of the tree.

        What others built on that goes too: now, or when the last path that uses it ends.
        """
        self._check_open(path)
        top: Node | None = None
        node: Node | None = path.node
        while node is not None:
            if node.writer == path.number:
                top = node
            node = node.parent
        if top is not None and not top.is_hidden:
            self._pool.free(self._tree.hide(top))
        self._end(path, path.private_pages())

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` pages of unlocked leaves, oldest first; returns how many."""
        evicted = self._tree.evict(num_pages)
        self._pool.free(evicted)
        self._num_evicted += len(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Forgets every prefix: the pools were rebuilt. Raises PathsOpen while a path is open."""
        if self._paths:
            raise PathsOpen(f"{len(self._paths)} paths are open: close them before the cache is cleared")
        self._pool.free(self._tree.clear())

    def stats(self) -> CacheStats:
        return CacheStats(
            num_pages=self._pool.num_pages,
            num_free=self._pool.num_free,
            num_tree=self._pool.num_tree,
            num_live=self._pool.num_live,
            num_nodes=self._tree.num_nodes,
            num_evicted=self._num_evicted,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError that names what disagrees. Costs a walk over all pages."""
        integrity.check_tree(self._tree)
        held = [path.node for path in self._paths]
        held += [path.source for path in self._paths if path.source is not None]
        integrity.check_locks(self._tree, held)
        for path in self._paths:
            integrity.check_page_table(path.pages, path.num_published, path.node, path.private_pages())
        live = (page for path in self._paths for page in path.private_pages())
        integrity.check_owners(self._pool, self._tree, live)

    def _open_partial(self, path: Path, match: Match, tokens: bytes, now: int) -> PageCopy | None:
        partial = match.partial
        if partial is None:
            return None
        source = self._tree.lock_partial(partial, now)  # first: making room must not evict it
        pages = self._allocate(1)
        if pages is None:
            self._tree.unlock(source, now)
            return None
        start = len(match.pages) * self._page_bytes
        path.source = source
        path.pages += pages
        path.pending += tokens[start : start + partial.num_tokens * TOKEN_BYTES]
        path.num_tokens += partial.num_tokens
        path.num_cached = path.num_tokens
        return PageCopy(partial.page, pages[0], partial.num_tokens)

    def _keep_tail(self, path: Path) -> int | None:
        """Gives the partial last page to the tree, unless that has its tokens; returns it if it went."""
        page = path.pages[path.num_published]
        tokens = bytes(path.pending)
        unneeded = self._tree.insert_tail(path.node, tokens, page, path.number, self._tick())
        if page in unneeded:
            return None
        self._pool.free(unneeded)
        self._pool.seal([page])
        return page

    def _end(self, path: Path, private: list[int]) -> None:
        self._release_source(path)
        self._pool.free(self._tree.unlock(path.node, self._tick()))
        self._pool.free(private)
        self._paths.remove(path)
        path.is_open = False
        path.pages, path.twins = [], []

    def _release_source(self, path: Path) -> None:
        if path.source is not None:
            self._pool.free(self._tree.unlock(path.source, self._now))
            path.source = None

    def _allocate(self, num_pages: int) -> list[int] | None:
        """Free pages, after evicting as many as are missing; None, and nothing evicted, if that cannot do."""
        num_missing = num_pages - self._pool.num_free
        if num_missing > self._tree.num_unlocked_pages:
            return None
        if num_missing > 0:
            self.evict(num_missing)
        return self._pool.allocate(num_pages)

    def _check_open(self, path: Path) -> None:
        if not path.is_open:
            raise PathClosed(f"path {path.number} was closed")

    def _tick(self) -> int:
        self._now += 1
        return self._now
