"""Pages, rows of states and the tree over them, and how room is made among them. Knows no paths."""

from __future__ import annotations

from .checkpoints import Cause, Checkpoints
from .nodes import Checkpoint, Rank
from .paths import CacheStats
from .pins import Pins
from .pool import PagePool
from .state_rows import StateRows
from .tree import PrefixTree


class Store:
    """What the cache keeps. Times are its own logical clock."""

    def __init__(
        self, num_pages: int, page_tokens: int, states: StateRows | None, max_pinned_share: float
    ) -> None:
        self.pool = PagePool(num_pages)
        self.has_states = states is not None
        self.states = Checkpoints(states or StateRows(0, 0))
        self.tree = PrefixTree(page_tokens, self.states if self.has_states else None)
        self.pins = Pins(self.tree, self.states, int(num_pages * max_pinned_share))
        self.now = 0
        self._num_evicted_tails = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def allocate(self, num_pages: int) -> list[int] | None:
        """Free pages, after evicting as many as are missing; None, and nothing evicted, if that cannot do."""
        num_missing = num_pages - self.pool.num_free
        if num_missing > self.tree.num_unlocked_pages:
            return None
        if num_missing > 0:
            self.evict(num_missing)
        return self.pool.allocate(num_pages)

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` pages of unlocked leaves, those least worth first; returns how many."""
        evicted = self.tree.evict(num_pages)
        self.pool.free(evicted)
        return len(evicted)

    def allocate_row(self) -> int | None:
        """An exact state row; where none is free, of the first victim among them; None if all are held.

        The victim moves to a small row, or goes for good where those hold better ones.
        """
        if not self.states.rows.exact.num_free:
            victim = self.states.victim()
            if victim is None:
                return None
            outdone = self.states.outdone_by(victim)
            if outdone is not None:
                self._evict_state(outdone)
            if outdone is not victim:
                self.states.demote(victim)
        return self.states.rows.reserve()

    def _evict_state(self, checkpoint: Checkpoint) -> None:
        self.states.count_eviction(checkpoint)
        pages = self.tree.detach(checkpoint)
        self._num_evicted_tails += len(pages)
        self.pool.free(pages)

    def clear(self) -> None:
        """Forgets every prefix and pin."""
        self.pool.free(self.pins.clear(self.tick()))
        self.pool.free(self.tree.clear())

    def stats(self) -> CacheStats:
        pages, states = self.tree.num_evicted, self.states
        num_bare = pages[Rank.BARE] if self.has_states else 0  # a dense leaf is as good as any
        return CacheStats(
            num_pages=self.pool.num_pages,
            num_free=self.pool.num_free,
            num_tree=self.pool.num_tree,
            num_live=self.pool.num_live,
            num_nodes=self.tree.num_nodes,
            num_pinned_pages=self.pins.num_pages,
            num_evicted=sum(pages.values()) + self._num_evicted_tails,
            num_evicted_retired=pages[Rank.RETIRED],
            num_evicted_bare=num_bare,
            num_evicted_aged=pages[Rank.AGED] + pages[Rank.BARE] - num_bare,
            num_evicted_tails=self._num_evicted_tails,
            num_states=states.rows.exact.num_pages,
            num_free_states=states.rows.exact.num_free,
            num_small_states=states.rows.small.num_pages,
            num_free_small_states=states.rows.small.num_free,
            num_checkpoints=len(states),
            num_restored=states.num_restored,
            num_states_evicted=sum(states.num_evicted.values()),
            num_states_superseded=states.num_evicted[Cause.SUPERSEDED],
            num_states_retired=states.num_evicted[Cause.RETIRED],
            num_states_aged=states.num_evicted[Cause.AGED],
            num_states_demoted=states.rows.num_demoted,
            num_states_lost=states.num_lost,
        )
