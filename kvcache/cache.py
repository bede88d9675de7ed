"""The cache as the scheduler sees it: paths (one turn's tokens and pages) over a tree of kept prefixes.

Plain bookkeeping on the engine's thread: tokens, page numbers and rows of states in, page numbers and rows
out. Knows nothing of arrays, layers, turns or time.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from . import integrity
from .errors import PathClosed, PathsOpen, PathTooShort, StateNotReserved
from .matching import Match, deepest_above
from .nodes import TOKEN_BYTES, Checkpoint, Kind, Node, Writer, locate
from .paths import CacheStats, Kept, Opening, PageCopy, Path, Resident, StateMove
from .pins import drop, retire
from .settings import PAGE_TOKENS
from .state_rows import StateRows
from .store import Store

__all__ = ["Cache", "CacheStats", "Kept", "Kind", "Opening", "PageCopy", "Path", "Resident", "StateMove"]


class Cache:
    """Opens, grows, publishes and closes paths. A method that is given a closed path raises PathClosed.

    A hybrid model's cache has `num_states` rows of states for its checkpoints, and `num_small_states` rows
    that hold more of them in 8 bits; a dense model's has None, and its methods about states do nothing.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        page_tokens: int = PAGE_TOKENS,
        keep_prefixes: bool = True,
        num_states: int | None = None,
        num_small_states: int = 0,
        max_pinned_share: float = 0.5,
    ) -> None:
        self.page_tokens = page_tokens
        self.keep_prefixes = keep_prefixes
        self.has_states = num_states is not None
        rows = StateRows(num_states, num_small_states) if num_states is not None else None
        self._store = Store(num_pages, page_tokens, rows, max_pinned_share)
        self._pool, self._tree, self._states = self._store.pool, self._store.tree, self._store.states
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._paths: set[Path] = set()
        self._num_opened = 0

    # Paths begin and grow

    def open(self, namespace: bytes, token_ids: array[int], *, max_match: int, agent: str = "") -> Opening:
        """A path over the longest kept prefix of `token_ids` (array("I")), at most `max_match` tokens of it.

        Whole pages are shared and locked. The tokens of a partial last page come with a copy into a private
        page, or are left out where no page can be had. With states the path begins at the deepest checkpoint
        in the match; whole pages beyond it are shared too.
        """
        now = self._store.tick()
        tokens = self._matchable(token_ids, max_match)
        match = self._tree.match(namespace, tokens, now)
        node = self._tree.lock_match(match, now)
        num_sealed = len(match.pages) * self.page_tokens
        self._num_opened += 1
        writer = Writer(self._num_opened, agent)
        path = Path(num_sealed, num_sealed, match.pages, writer, node, len(match.pages), num_sealed)
        copy = self._open_partial(path, match, tokens, now)
        if self.has_states:
            is_reached = match.partial is None or copy is not None
            self._restore(path, match.checkpoint if is_reached else deepest_above(node, num_sealed))
        self._paths.add(path)
        path.num_cached = path.num_tokens
        return Opening(path, copy, path.restored.row if path.restored is not None else None)

    def probe(self, namespace: bytes, token_ids: array[int], *, max_match: int) -> Resident:
        """What `open` would find. Changes nothing."""
        match = self._tree.probe(namespace, self._matchable(token_ids, max_match))
        if match is None:
            return Resident(0, 0)
        if not self.has_states:
            return Resident(match.num_tokens, match.num_tokens)
        return Resident(match.num_tokens, match.checkpoint.position if match.checkpoint is not None else 0)

    def reserve(self, path: Path, num_tokens: int) -> bool:
        """Makes the page table cover [0, num_tokens), evicting as needed; False, no change, if it cannot."""
        self._check_open(path)
        pages = self._store.allocate(-(-num_tokens // self.page_tokens) - len(path.pages))
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
        num_known = max(path.num_sealed - path.num_tokens, 0)  # the tree's already
        path.num_tokens = num_tokens
        path.pending += array("I", token_ids[num_known:]).tobytes()
        if token_ids:
            path.tip = None
            self._release_sources(path)

    def publish(self, path: Path) -> None:
        """Whole committed pages become the tree's, never to change again; the path keeps a lock on them.

        A page whose tokens the tree holds already stays this path's own until its close.
        """
        self._check_open(path)
        num_new = len(path.pending) // self._page_bytes
        if not num_new or not self._may_keep(path):
            return
        tokens = path.pending[: num_new * self._page_bytes]
        pages = path.pages[path.num_published : path.num_published + num_new]
        insertion = self._tree.insert(path.node, tokens, pages, path.writer, self._store.tick())
        self._pool.seal(pages[insertion.num_duplicates :])
        self._pool.free(insertion.freed)
        path.twins += pages[: insertion.num_duplicates]
        path.node = insertion.node
        path.num_published += num_new
        path.num_sealed = path.num_published * self.page_tokens
        del path.pending[: len(tokens)]

    # Checkpoints

    def reserve_state(self, path: Path) -> int | None:
        """The row for a checkpoint that the coming step takes; makes room for it. None: none can be had."""
        self._check_open(path)
        if path.state_row is None and self._may_keep(path):
            path.state_row = self._store.allocate_row()
        return path.state_row

    def take_demotions(self) -> tuple[StateMove, ...]:
        """The states to move when the next step begins, before it saves any.

        They are the caller's then: where that step fails, the cache is to be cleared.
        """
        return self._states.rows.take_demotions()

    def drop_state(self, path: Path) -> None:
        """Gives a reserved row back unused; harmless without one."""
        self._check_open(path)
        self._free_row(path)

    def keep_state(self, path: Path, kind: Kind, agent: str) -> PageCopy | None:
        """The reserved row, which an evaluated step filled at `path.num_tokens`, becomes a checkpoint there.

        Publishes whole pages. Inside a page, that page becomes the tree's as it is and the path goes on in a
        new one: the returned copy belongs into its next step. Where the tree has a checkpoint at this
        position already, or no page can be had, the row is given back. Raises StateNotReserved.
        """
        self._check_open(path)
        if path.state_row is None:
            raise StateNotReserved(f"path {path.number} has no state row: call reserve_state before the step")
        self.publish(path)
        holder = self._holder(path)
        if holder is not None:
            self._place(path, holder, kind, agent)
            return None
        pages = self._store.allocate(1) if self._may_leave_tail(path) else None
        if pages is None:
            self._free_row(path)
            return None
        source = path.pages[path.num_published]
        tail = self._give_tail(path, source)
        self._place(path, tail, kind, agent)
        self._tree.lock(tail, self._store.now)
        path.source = tail
        path.pages[path.num_published] = pages[0]
        return PageCopy(source, pages[0], len(path.pending) // TOKEN_BYTES)

    # Paths end

    def close(self, path: Path, *, keep: bool = True, kind: Kind | None = None, agent: str = "") -> None:
        """Ends a path. What was published stays; keep: also other whole pages and the partial last one.

        With states a partial page stays only with a checkpoint: `kind` and `agent` make one of the reserved
        row, as keep_state does; without `kind` the row is given back.
        """
        self._check_open(path)
        kept: int | None = None
        if keep:
            self.publish(path)
            kept = self._keep_end(path, kind, agent)
        self._end(path, [page for page in path.private_pages() if page != kept])

    def poison(self, path: Path) -> None:
        """A fault was seen in this path's data: ends it and takes what it published out of the tree.

        What others built on that goes too: now, or when the last path that uses it ends. So does a checkpoint
        that it went on from in this very step: its state may be what was wrong.
        """
        self._check_open(path)
        tainted = {path.number, *path.heirs}
        for node in list(self._tree.nodes()):
            if node.writer is not None and node.writer.number in tainted and not node.is_hidden:
                self._pool.free(self._tree.hide(node))
        for checkpoint in list(self._states):
            is_doubtful = checkpoint is path.restored or checkpoint.writer.number in tainted
            if is_doubtful and not checkpoint.is_forgotten:
                self._pool.free(self._tree.detach(checkpoint))
        for other in self._paths:
            other.is_tainted |= other.number in tainted
        self._end(path, path.private_pages())

    # What stays of a path

    def kept(self, path: Path) -> Kept:
        """A handle on the end of what this path keeps; to be taken before its close, which moves it along."""
        self._check_open(path)
        if path.kept is None:
            path.kept = Kept(path.node, path.num_tokens, path.writer.agent)
        self._move_kept(path)
        return path.kept

    def pin(self, kept: Kept) -> bool:
        """Locks what is left of a kept prefix, and the checkpoint to go on from; False where that may not be.

        Pinned pages in all stay within `max_pinned_share` of the pool.
        """
        return self._store.pins.pin(kept, self._store.tick())

    def unpin(self, kept: Kept) -> None:
        """Undoes pin; harmless without one."""
        self._pool.free(self._store.pins.unpin(kept, self._store.tick()))

    def retire(self, kept: Kept) -> None:
        """The agent is gone: pages and states that only it used are the first to leave."""
        retire(self._tree, kept)

    def drop(self, agents: Collection[str]) -> None:
        """These agents are done for: frees pages and states that only they used and nobody holds, at once."""
        self._pool.free(drop(self._tree, frozenset(agents)))

    # Room is made

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` pages of unlocked leaves, those least worth first; returns how many."""
        return self._store.evict(num_pages)

    def clear(self) -> None:
        """Forgets every prefix: the pools were rebuilt. Raises PathsOpen while a path is open."""
        if self._paths:
            raise PathsOpen(f"{len(self._paths)} paths are open: close them before the cache is cleared")
        self._store.clear()

    def stats(self) -> CacheStats:
        return self._store.stats()

    def check_counts(self) -> None:
        """The cheap part of check_integrity: that pages and rows add up. Costs by open paths."""
        integrity.check_counts(self._pool, self._tree, self._states, self._paths)

    def check_path(self, path: Path) -> None:
        """One path's share of check_integrity. Costs by its nodes."""
        self._check_open(path)
        integrity.check_path(path)

    def check_integrity(self) -> None:
        """Raises IntegrityError that names what disagrees. Costs a walk over all pages."""
        integrity.check_all(self._pool, self._tree, self._states, self._paths, self._store.pins)

    def _matchable(self, token_ids: array[int], max_match: int) -> bytes:
        length = max(max_match, 0) if self.keep_prefixes else 0
        return bytes(memoryview(token_ids)[:length])

    def _open_partial(self, path: Path, match: Match, tokens: bytes, now: int) -> PageCopy | None:
        partial = match.partial
        if partial is None:
            return None
        source = self._tree.lock_first_page(partial.node, now)  # first: making room must not evict it
        pages = self._store.allocate(1)
        if pages is None:
            self._pool.free(self._tree.unlock(source, now))
            return None
        start = len(match.pages) * self._page_bytes
        path.source = source
        path.pages += pages
        path.pending += tokens[start : start + partial.num_tokens * TOKEN_BYTES]
        path.num_tokens += partial.num_tokens
        self._note_heir(path, source.writer)
        return PageCopy(partial.page, pages[0], partial.num_tokens)

    def _restore(self, path: Path, checkpoint: Checkpoint | None) -> None:
        """The path begins at this checkpoint, whose row is neither freed nor rewritten until that has run."""
        path.num_tokens = 0
        if checkpoint is None:
            return
        path.num_tokens = checkpoint.position
        path.restored = checkpoint
        self._states.restore(checkpoint, path.writer.agent, self._store.now)
        if path.source is None and locate(path.node, checkpoint.position) is not checkpoint.node:
            # Beside the path's own nodes, over the same tokens. The rest of that run is none of this path's.
            path.source = self._tree.lock_first_page(checkpoint.node, self._store.now)
        self._note_heir(path, checkpoint.writer)

    def _note_heir(self, path: Path, writer: Writer | None) -> None:
        """If an open path turns out faulty, so is what went on from it."""
        for other in self._paths:
            if writer is not None and (other.writer is writer or writer.number in other.heirs):
                other.heirs.add(path.number)

    def _may_keep(self, path: Path) -> bool:
        return self.keep_prefixes and not (path.node.is_hidden or path.is_tainted)

    def _may_leave_tail(self, path: Path) -> bool:
        """There is a partial page, and before the first commit the copy into it may not have run."""
        return self._may_keep(path) and bool(path.pending) and path.source is None

    def _holder(self, path: Path) -> Node | None:
        """The node that holds the path's last token already."""
        if not self._may_keep(path) or not path.num_tokens:
            return None
        if path.num_tokens <= path.num_sealed:
            return locate(path.node, path.num_tokens)
        return self._tree.holder_of(path.node, bytes(path.pending))

    def _place(self, path: Path, node: Node, kind: Kind, agent: str) -> None:
        """The path's reserved row becomes a checkpoint in this node, unless one stands at its position."""
        now = self._store.tick()
        path.tip = node
        for existing in node.checkpoints:
            if existing.position == path.num_tokens:
                self._free_row(path)
                self._states.touch(existing, kind, agent, now)
                break
        else:
            row, path.state_row = path.state_row, None
            assert row is not None
            self._tree.attach(
                Checkpoint(path.num_tokens, row, kind, agent, path.writer, node, now, now, agent)
            )
        if kind == Kind.TURN:
            self._states.supersede(agent, self._tree.is_fork)

    def _give_tail(self, path: Path, page: int) -> Node:
        """Gives the partial last page to the tree, which does not hold its tokens yet."""
        insertion = self._tree.insert_tail(
            path.node, bytes(path.pending), page, path.writer, self._store.tick()
        )
        self._pool.free(insertion.freed)
        self._pool.seal([page])
        return insertion.node

    def _keep_end(self, path: Path, kind: Kind | None, agent: str) -> int | None:
        """What a path that ends keeps beyond its whole pages; returns the partial page if it went."""
        is_state_kept = path.state_row is not None and kind is not None
        if self.has_states and not is_state_kept:
            return None
        holder = self._holder(path)
        page: int | None = None
        if holder is None and self._may_leave_tail(path):
            page = path.pages[path.num_published]
            holder = self._give_tail(path, page)
        if holder is not None:
            path.tip = holder
            if kind is not None and is_state_kept:
                self._place(path, holder, kind, agent)
        return page

    def _end(self, path: Path, private: list[int]) -> None:
        if path.kept is not None:
            self._move_kept(path)
        self._free_row(path)
        self._release_sources(path)
        self._pool.free(self._tree.unlock(path.node, self._store.tick()))
        self._pool.free(private)
        self._paths.remove(path)
        path.is_open = False
        path.pages, path.twins = [], []

    def _move_kept(self, path: Path) -> None:
        if path.kept is not None:
            path.kept.node, path.kept.position = path.tip or path.node, path.num_tokens

    def _free_row(self, path: Path) -> None:
        if path.state_row is not None:
            self._states.rows.free(path.state_row)
            path.state_row = None

    def _release_sources(self, path: Path) -> None:
        if path.restored is not None:
            self._states.release(path.restored)
            path.restored = None
        if path.source is not None:
            self._pool.free(self._tree.unlock(path.source, self._store.now))
            path.source = None

    def _check_open(self, path: Path) -> None:
        if not path.is_open:
            raise PathClosed(f"path {path.number} was closed")
