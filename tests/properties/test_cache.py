"""The cache against a memory that remembers, for each row of each page, for which prefix it was computed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import lru_cache

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.cache import Cache, PageCopy, Path

Tokens = tuple[int, ...]
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
progresses = st.sampled_from(["opened", "computed", "published", "published", "closed", "closed"])
namespaces = st.sampled_from([b"", b"tenant"])
picks = st.integers(0, 1 << 16)
MAX_TURNS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """What a row of KV was computed from, a digest of namespace and prefix, and who put it there."""

    digest: int
    writer: int


@dataclass(slots=True, eq=False)
class Turn:
    """An open path and what its tokens must be."""

    path: Path
    namespace: bytes
    tokens: Tokens  # committed
    prompt: Tokens
    copy: PageCopy | None
    table: list[int] = field(default_factory=list)  # the page table as last seen
    is_tainted: bool = False  # open while another was poisoned: it may keep nothing


@lru_cache(maxsize=1 << 16)
def digests(namespace: bytes, tokens: Tokens) -> list[int]:
    """One digest for each prefix of `tokens`, the whole included."""
    digest = sum(namespace)
    return [digest := hash((digest, token)) for token in tokens]


def common_length(one: Tokens, other: Tokens) -> int:
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal.index(False) if False in equal else len(equal)


class CacheMachine(RuleBasedStateMachine):
    """Random turns over few pages and two tokens, so that everything collides."""

    @initialize(
        num_pages=st.sampled_from([3, 9, 16, 60, 60, 60]),
        page_tokens=st.sampled_from([1, 2, 4, 4]),
    )
    def start(self, num_pages: int, page_tokens: int) -> None:
        self.cache = Cache(num_pages, page_tokens=page_tokens)
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.memory: list[list[Row | None]] = [[None] * page_tokens for _ in range(num_pages)]
        self.turns: list[Turn] = []
        self.history: list[tuple[bytes, Tokens]] = []
        self.kept: set[tuple[bytes, Tokens]] = set()  # must be found as long as nothing is evicted
        self.poisoned: set[int] = set()
        self.num_evicted = 0

    # Turns begin

    @precondition(lambda self: len(self.turns) < MAX_TURNS)
    @rule(namespace=namespaces, prompt=token_lists, spare=st.integers(0, 2), progress=progresses)
    def open_new(self, namespace: bytes, prompt: Tokens, spare: int, progress: str) -> None:
        self.run(self.open(namespace, prompt, len(prompt) - spare), progress)

    @precondition(lambda self: self.history and len(self.turns) < MAX_TURNS)
    @rule(
        pick=picks, cut=st.integers(0, 20), suffix=token_lists, spare=st.integers(0, 2), progress=progresses
    )
    def open_related(self, pick: int, cut: int, suffix: Tokens, spare: int, progress: str) -> None:
        """A repeat, an extension, a fork, or a divergence inside a page of something seen before."""
        namespace, tokens = self.history[pick % len(self.history)]
        kept = tokens[: max(len(tokens) - cut, 0)] if cut % 3 else tokens
        prompt = tokens if cut == 3 else kept + suffix
        self.run(self.open(namespace, prompt, len(prompt) - spare), progress)

    @precondition(lambda self: len(self.turns) < MAX_TURNS)
    @rule(namespace=namespaces, prompt=token_lists, suffix=token_lists, progress=progresses)
    def race(self, namespace: bytes, prompt: Tokens, suffix: Tokens, progress: str) -> None:
        """Two turns compute the same tokens side by side; neither sees the other's."""
        first = self.open(namespace, prompt, len(prompt) - 1)
        second = self.open(namespace, prompt + suffix, len(prompt) - 1)
        self.run(first, "published")
        self.run(second, progress)

    def run(self, turn: Turn, progress: str) -> None:
        """Takes a new turn some way at once, so that the tree fills faster than single rules fill it."""
        if progress == "opened":
            return
        self.advance(turn, turn.prompt[len(turn.tokens) :])
        if progress != "computed":
            self.publish_turn(turn)
        if progress == "closed":
            self.close_turn(turn, keep=True)

    def open(self, namespace: bytes, prompt: Tokens, max_match: int) -> Turn:
        wanted = prompt[: max(max_match, 0)]
        at_least = max(
            (common_length(wanted, kept) for name, kept in self.kept if name == namespace), default=0
        )
        before = self.cache.stats()
        opening = self.cache.open(namespace, array("I", prompt), max_match=max_match)
        path, copy = opening.path, opening.copy
        self.history.append((namespace, prompt))
        assert path.num_tokens == path.num_cached <= max(max_match, 0)
        num_shared = path.num_cached // self.page_tokens
        if copy is not None:
            assert 0 < copy.num_tokens == path.num_cached - num_shared * self.page_tokens
            assert copy.target == path.pages[-1] != copy.source
            assert len(path.pages) == num_shared + 1
            self.check_rows([copy.source], num_shared, namespace, prompt[: path.num_cached])
        else:
            assert path.num_cached == len(path.pages) * self.page_tokens
        self.check_rows(path.pages[:num_shared], 0, namespace, prompt[: num_shared * self.page_tokens])
        if self.cache.stats().num_evicted == before.num_evicted and (copy is not None or before.num_free):
            assert path.num_cached >= at_least
        turn = Turn(path, namespace, prompt[: path.num_cached], prompt, copy)
        self.turns.append(turn)
        return turn

    # Turns go on

    @precondition(lambda self: self.turns)
    @rule(pick=picks, num_rows=st.integers(1, 12), generated=token_lists, is_published=st.booleans())
    def step(self, pick: int, num_rows: int, generated: Tokens, is_published: bool) -> None:
        turn = self.turns[pick % len(self.turns)]
        self.advance(turn, (turn.prompt[len(turn.tokens) :] or generated)[:num_rows])
        if is_published:
            self.publish_turn(turn)

    def advance(self, turn: Turn, rows: Tokens) -> None:
        """One evaluated step: the copy first, then the rows, then the commit."""
        if not rows or not self.reserve(turn, len(turn.tokens) + len(rows)):
            return
        if turn.copy is not None:
            source = self.memory[turn.copy.source]
            num_shared = (len(turn.tokens) - turn.copy.num_tokens) // self.page_tokens
            self.check_rows([turn.copy.source], num_shared, turn.namespace, turn.tokens, may_be_poisoned=True)
            for index in range(turn.copy.num_tokens):
                row = source[index]
                assert row is not None
                self.memory[turn.copy.target][index] = Row(row.digest, turn.path.number)
            turn.copy = None
        start, turn.tokens = len(turn.tokens), turn.tokens + rows
        for position, digest in enumerate(digests(turn.namespace, turn.tokens)[start:], start):
            page, index = divmod(position, self.page_tokens)
            self.memory[turn.path.pages[page]][index] = Row(digest, turn.path.number)
        self.cache.commit(turn.path, rows)
        assert turn.path.num_tokens == len(turn.tokens)

    @precondition(lambda self: self.turns)
    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        self.publish_turn(self.turns[pick % len(self.turns)])

    def publish_turn(self, turn: Turn) -> None:
        self.cache.publish(turn.path)
        self.keep(turn, len(turn.tokens) // self.page_tokens * self.page_tokens)

    @precondition(lambda self: self.turns)
    @rule(pick=picks, num_pages=st.integers(1, 8))
    def reserve_ahead(self, pick: int, num_pages: int) -> None:
        turn = self.turns[pick % len(self.turns)]
        self.reserve(turn, len(turn.tokens) + num_pages * self.page_tokens)

    def reserve(self, turn: Turn, num_tokens: int) -> bool:
        before = self.cache.stats()
        path = turn.path
        num_new = -(-num_tokens // self.page_tokens) - len(path.pages)
        is_reserved = self.cache.reserve(path, num_tokens)
        after = self.cache.stats()
        if is_reserved:
            assert len(path.pages) * self.page_tokens >= num_tokens
            assert after.num_evicted - before.num_evicted == max(num_new - before.num_free, 0)
        else:
            assert after == before
            assert num_new > before.num_free
            if len(self.turns) == 1 and path.source is None:
                assert len(path.pages) + len(path.twins) + num_new > self.num_pages
        return is_reserved

    # Turns end

    @precondition(lambda self: self.turns)
    @rule(pick=picks, keep=st.booleans())
    def close(self, pick: int, keep: bool) -> None:
        self.close_turn(self.turns[pick % len(self.turns)], keep=keep)

    def close_turn(self, turn: Turn, *, keep: bool) -> None:
        self.turns.remove(turn)
        if keep:
            unread = turn.copy.num_tokens if turn.copy is not None else 0
            self.keep(turn, len(turn.tokens) - unread)
        self.cache.close(turn.path, keep=keep)
        self.history.append((turn.namespace, turn.tokens))

    @precondition(lambda self: self.turns)
    @rule(pick=picks)
    def poison(self, pick: int) -> None:
        turn = self.turns.pop(pick % len(self.turns))
        self.cache.poison(turn.path)
        self.poisoned.add(turn.path.number)
        self.history.append((turn.namespace, turn.tokens))
        self.kept.clear()
        for other in self.turns:
            other.is_tainted = True

    # Room is made

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        before = self.cache.stats()
        num_evicted = self.cache.evict(num_pages)
        assert num_evicted <= num_pages
        assert self.cache.stats().num_free == before.num_free + num_evicted
        if not self.turns:
            assert num_evicted == min(num_pages, before.num_tree)

    @precondition(lambda self: not self.turns and len(self.history) > 20)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.history.clear()
        self.kept.clear()
        assert self.cache.stats().num_free == self.num_pages

    # What always holds

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        if self.cache.stats().num_evicted != self.num_evicted:
            self.num_evicted = self.cache.stats().num_evicted
            self.kept.clear()
        for namespace, root in self.cache._tree.roots.items():
            waiting = [(child, b"", 0) for child in root.children.values()]
            while waiting:
                node, above, num_above = waiting.pop()
                data = above + bytes(node.tokens)
                tokens = tuple(memoryview(data).cast("I"))
                self.check_rows(node.pages, num_above, namespace, tokens)
                num_pages = num_above + len(node.pages)
                waiting += [(child, data, num_pages) for child in node.children.values()]
        for turn in self.turns:
            readable = turn.tokens[: len(turn.tokens) - (turn.copy.num_tokens if turn.copy else 0)]
            self.check_rows(turn.path.pages, 0, turn.namespace, readable, may_be_poisoned=True)
            assert turn.path.pages[: len(turn.table)] == turn.table
            turn.table = list(turn.path.pages)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for turn in self.turns:
            self.cache.close(turn.path, keep=len(turn.tokens) % 2 == 0)
            self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.num_live == 0
        assert self.cache.evict(self.num_pages) == stats.num_tree
        assert self.cache.stats().num_free == self.num_pages
        assert self.cache.stats().num_nodes == 0
        assert not self.cache._tree.roots and not self.cache._tree.hidden

    def keep(self, turn: Turn, num_tokens: int) -> None:
        if not turn.is_tainted:
            self.kept.add((turn.namespace, turn.tokens[:num_tokens]))

    def check_rows(
        self, pages: list[int], first: int, namespace: bytes, tokens: Tokens, *, may_be_poisoned: bool = False
    ) -> None:
        """Pages [first, ...) of a table hold exactly these tokens' rows."""
        start = first * self.page_tokens
        found = [row for page in pages for row in self.memory[page]][: len(tokens) - start]
        expected = digests(namespace, tokens)[start : start + len(pages) * self.page_tokens]
        assert [row and row.digest for row in found] == expected
        assert may_be_poisoned or not any(row and row.writer in self.poisoned for row in found)


TestCache = CacheMachine.TestCase
