"""A hybrid's cache against a memory that remembers what each row and each state was computed from."""

from __future__ import annotations

from array import array

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvcache.cache import Kind
from kvcache.pins import chain
from tests.properties.hybrid_memory import Content, Ended, HybridMemory, Tokens, Turn, digest_of

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
progresses = st.sampled_from(["opened", "stepped", "kept", "kept", "bare", "closed", "closed", "pinned"])
namespaces = st.sampled_from([b"", b"", b"tenant"])
agents = st.sampled_from(["ann", "bob", "cem"])
kinds = st.sampled_from(list(Kind))
picks = st.integers(0, 1 << 16)
MAX_TURNS = 5


class HybridCacheMachine(HybridMemory):
    """Random turns of few agents over few pages, few states and two tokens, so that everything collides."""

    # Turns begin

    @precondition(lambda self: len(self.turns) < MAX_TURNS)
    @rule(namespace=namespaces, agent=agents, prompt=token_lists, progress=progresses, kind=kinds)
    def open_new(self, namespace: bytes, agent: str, prompt: Tokens, progress: str, kind: Kind) -> None:
        self.run(self.open(namespace, agent, prompt, len(prompt)), progress, kind)

    @precondition(lambda self: self.history and len(self.turns) < MAX_TURNS)
    @rule(
        pick=picks,
        agent=agents,
        cut=st.integers(0, 20),
        suffix=token_lists,
        spare=st.integers(0, 2),
        progress=progresses,
        kind=kinds,
    )
    def open_related(
        self, pick: int, agent: str, cut: int, suffix: Tokens, spare: int, progress: str, kind: Kind
    ) -> None:
        """A repeat, an extension, a fork, or a divergence inside a page of something seen before."""
        namespace, tokens = self.history[pick % len(self.history)]
        kept = tokens[: max(len(tokens) - cut, 0)] if cut % 3 else tokens
        prompt = tokens if cut == 3 else kept + suffix
        self.run(self.open(namespace, agent, prompt, len(prompt) - spare), progress, kind)

    def run(self, turn: Turn, progress: str, kind: Kind) -> None:
        """Takes a new turn some way at once, so that the tree fills faster than single rules fill it."""
        if progress == "opened":
            return
        is_kept = progress not in ("stepped", "bare") and self.cache.reserve_state(turn.path) is not None
        is_done = self.advance(turn, turn.prompt[len(turn.tokens) :])
        if is_done and is_kept and progress == "kept":
            self.keep_state(turn, kind)
        elif progress in ("bare", "closed", "pinned"):
            self.close_turn(turn, keep=True, kind=kind if is_done else None)
            if progress == "pinned":
                self.pin_one(self.ended[-1])

    def open(self, namespace: bytes, agent: str, prompt: Tokens, max_match: int) -> Turn:
        ids = array("I", prompt)
        wanted = prompt[: max(max_match, 0)]
        before = self.cache.stats()
        resident = self.cache.probe(namespace, ids, max_match=max_match)
        assert self.cache.stats() == before
        assert resident.num_cached == self.deepest_kept(namespace, wanted)
        assert resident.num_cached <= resident.num_matched <= len(wanted)
        opening = self.cache.open(namespace, ids, max_match=max_match, agent=agent)
        path, copy = opening.path, opening.copy
        self.history.append((namespace, prompt))
        assert path.num_tokens == path.num_cached <= resident.num_cached
        if copy is not None or before.num_free:
            assert path.num_tokens == resident.num_cached
        assert (opening.restore is None) == (path.num_tokens == 0)
        assert path.num_sealed == resident.num_matched // self.page_tokens * self.page_tokens
        turn = Turn(
            path, namespace, agent, prompt[: path.num_tokens], prompt, copy, opening.restore, frozenset()
        )
        self.check_rows(path.pages, namespace, prompt[: path.num_sealed])
        if copy is not None:
            assert copy.target == path.pages[-1] != copy.source
            assert path.num_sealed + copy.num_tokens == path.num_tokens
        self.check_unread(turn)
        self.turns.append(turn)
        return turn

    # Turns go on

    @precondition(lambda self: self.turns)
    @rule(
        pick=picks,
        num_rows=st.integers(1, 12),
        generated=token_lists,
        kind=kinds,
        end=st.sampled_from(["keep", "keep", "keep", "publish", "drop", "leave"]),
    )
    def step(self, pick: int, num_rows: int, generated: Tokens, kind: Kind, end: str) -> None:
        turn = self.turns[pick % len(self.turns)]
        row = self.cache.reserve_state(turn.path)
        assert row == turn.path.state_row == self.cache.reserve_state(turn.path)
        if not self.advance(turn, (turn.prompt[len(turn.tokens) :] or generated)[:num_rows]) or end == "drop":
            self.cache.drop_state(turn.path)
        elif row is not None and end == "keep":
            self.keep_state(turn, kind)
        elif end == "publish":
            self.cache.publish(turn.path)

    def keep_state(self, turn: Turn, kind: Kind) -> None:
        path, table = turn.path, list(turn.path.pages)
        is_last_free = self.cache.stats().num_free > 0
        copy = self.cache.keep_state(path, kind, turn.agent)
        assert path.state_row is None
        if copy is not None:
            turn.copy = copy
            assert copy.source == table[path.num_published] != copy.target == path.pages[path.num_published]
            assert copy.num_tokens == len(turn.tokens) % self.page_tokens
            self.check_unread(turn)
        if is_last_free and not (path.is_tainted or path.node.is_hidden):
            resident = self.cache.probe(turn.namespace, array("I", turn.tokens), max_match=len(turn.tokens))
            assert resident.num_matched == resident.num_cached == len(turn.tokens)

    @precondition(lambda self: self.turns)
    @rule(pick=picks, num_pages=st.integers(1, 8), has_state=st.booleans())
    def reserve_ahead(self, pick: int, num_pages: int, has_state: bool) -> None:
        """What a step will need; until one runs, states that make room have not moved."""
        turn = self.turns[pick % len(self.turns)]
        if has_state:
            self.cache.reserve_state(turn.path)
        self.cache.reserve(turn.path, len(turn.tokens) + num_pages * self.page_tokens)

    # Turns end

    @precondition(lambda self: self.turns)
    @rule(pick=picks, keep=st.booleans(), has_state=st.booleans(), kind=kinds)
    def close(self, pick: int, keep: bool, has_state: bool, kind: Kind) -> None:
        turn = self.turns[pick % len(self.turns)]
        is_fresh = turn.restore is None and turn.copy is None and bool(turn.tokens)
        if has_state and is_fresh and self.cache.reserve_state(turn.path) is not None:
            # A step of its own that only saves the live state.
            row = turn.path.state_row
            assert row is not None
            self.begin_step()
            self.states[row] = Content(digest_of(turn.namespace, turn.tokens), turn.sources)
            self.close_turn(turn, keep=keep, kind=kind)
        else:
            self.close_turn(turn, keep=keep, kind=None)

    def close_turn(self, turn: Turn, *, keep: bool, kind: Kind | None) -> None:
        self.turns.remove(turn)
        kept = self.cache.kept(turn.path)
        self.cache.close(turn.path, keep=keep, kind=kind, agent=turn.agent)
        self.ended.append(Ended(kept, turn.namespace, turn.tokens))
        self.history.append((turn.namespace, turn.tokens))

    @precondition(lambda self: self.turns)
    @rule(pick=picks)
    def poison(self, pick: int) -> None:
        turn = self.turns.pop(pick % len(self.turns))
        self.ended.append(Ended(self.cache.kept(turn.path), turn.namespace, turn.tokens))
        self.cache.poison(turn.path)
        self.poisoned.add(turn.path.number)
        self.history.append((turn.namespace, turn.tokens))
        for ended in self.ended:
            ended.promised.clear()

    # Agents wait and go

    @precondition(lambda self: self.ended)
    @rule(pick=picks)
    def pin(self, pick: int) -> None:
        self.pin_one(self.ended[pick % len(self.ended)])

    def pin_one(self, ended: Ended) -> None:
        if not self.cache.pin(ended.kept):
            return
        pin = next(pin for kept, pin in self.cache._store.pins._pins.items() if kept is ended.kept)
        is_kept = pin.checkpoint is not None and not pin.checkpoint.is_forgotten
        position = pin.checkpoint.position if pin.checkpoint is not None and is_kept else 0
        num_pinned = min(ended.kept.position, pin.node.end)
        ended.promised = [num_pinned, position]

    @precondition(lambda self: self.ended)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        ended = self.ended[pick % len(self.ended)]
        ended.promised.clear()
        self.cache.unpin(ended.kept)
        self.cache.unpin(ended.kept)

    @precondition(lambda self: self.ended)
    @rule(pick=picks)
    def retire(self, pick: int) -> None:
        before = self.cache.stats()
        self.cache.retire(self.ended[pick % len(self.ended)].kept)
        after = self.cache.stats()
        assert (after.num_tree, after.num_checkpoints) == (before.num_tree, before.num_checkpoints)

    # Room is made

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        before = self.cache.stats()
        num_evicted = self.cache.evict(num_pages)
        assert num_evicted <= num_pages
        after = self.cache.stats()
        assert after.num_free == before.num_free + num_evicted
        if not self.turns and not before.num_pinned_pages:
            assert num_evicted == min(num_pages, before.num_tree)

    @precondition(lambda self: not self.turns and len(self.history) > 20)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.history.clear()
        for ended in self.ended:
            ended.promised.clear()
        assert self.are_all_free()

    # What always holds

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        self.check_tree()
        for turn in self.turns:
            self.cache.check_path(turn.path)
            self.check_unread(turn)
        for ended in self.ended:
            if ended.promised:
                ids = array("I", ended.tokens)
                resident = self.cache.probe(ended.namespace, ids, max_match=len(ids))
                assert resident.num_matched >= ended.promised[0]
                assert resident.num_cached >= ended.promised[1]
        stats = self.cache.stats()
        assert stats.num_pinned_pages <= self.num_pages // 2
        pinned = {node for pin in self.cache._store.pins for node in chain(pin.node)}
        assert stats.num_pinned_pages == sum(len(node.pages) for node in pinned)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for turn in self.turns:
            self.cache.close(turn.path, keep=len(turn.tokens) % 2 == 0)
        for ended in self.ended:
            self.cache.unpin(ended.kept)
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.num_live == 0
        assert self.cache.evict(self.num_pages) == stats.num_tree
        assert self.are_all_free()
        assert not self.cache._tree.roots and not self.cache._tree.hidden


TestHybridCache = HybridCacheMachine.TestCase
