"""What a hybrid's cache is held against: a memory that knows what each row and state was computed from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvcache.cache import Cache, Kept, PageCopy, Path
from kvcache.nodes import Node

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Content:
    """What a row of KV or a state was computed from, and the paths whose work it rests on."""

    digest: int
    sources: frozenset[int]


@dataclass(slots=True, eq=False)
class Turn:
    """An open path, what its tokens must be, and the worker's live state."""

    path: Path
    namespace: bytes
    agent: str
    tokens: Tokens  # committed
    prompt: Tokens
    copy: PageCopy | None
    restore: int | None  # before its first step
    sources: frozenset[int]


@dataclass(slots=True, eq=False)
class Ended:
    """What is known of a path that ended."""

    kept: Kept
    namespace: bytes
    tokens: Tokens
    promised: list[int] = field(default_factory=list)  # while pinned: tokens that stay, and where to go on


@lru_cache(maxsize=1 << 16)
def digest_of(namespace: bytes, tokens: Tokens) -> int:
    return hash((namespace, tokens))


class HybridMemory(RuleBasedStateMachine):
    """A cache, the memory under it, and how steps change that. Its rules are the extending machine's."""

    @initialize(
        num_pages=st.sampled_from([4, 9, 16, 60, 60]),
        page_tokens=st.sampled_from([1, 2, 4, 4, 4]),
        num_states=st.sampled_from([0, 1, 2, 3, 6, 20, 20]),
        num_small=st.sampled_from([0, 1, 2, 4, 20]),
    )
    def start(self, num_pages: int, page_tokens: int, num_states: int, num_small: int) -> None:
        self.cache = Cache(
            num_pages, page_tokens=page_tokens, num_states=num_states, num_small_states=num_small
        )
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.num_states, self.num_small = num_states, num_small
        self.memory: list[list[Content | None]] = [[None] * page_tokens for _ in range(num_pages)]
        self.states: dict[int, Content] = {}
        self.turns: list[Turn] = []
        self.ended: list[Ended] = []
        self.history: list[tuple[bytes, Tokens]] = []
        self.poisoned: set[int] = set()

    def state_at(self, row: int) -> Content:
        """What a checkpoint's row holds, once the next step has begun."""
        waiting = {move.target: move.source for move in self.cache._states.rows.demotions}
        return self.states[waiting.get(row, row)]

    def begin_step(self) -> None:
        """States move down; a row that one has left holds nothing."""
        for move in self.cache.take_demotions():
            assert move.source < self.num_states <= move.target < self.num_states + self.num_small
            self.states[move.target] = self.states.pop(move.source)

    def are_all_free(self) -> bool:
        stats = self.cache.stats()
        free = (stats.num_free, stats.num_free_states, stats.num_free_small_states)
        return free == (self.num_pages, self.num_states, self.num_small)

    def check_unread(self, turn: Turn) -> None:
        """What the next step copies and restores is there, and is of exactly this prefix."""
        num_tokens = len(turn.tokens)
        if turn.restore is not None:
            assert self.state_at(turn.restore).digest == digest_of(turn.namespace, turn.tokens)
        if turn.copy is not None:
            start = num_tokens - turn.copy.num_tokens
            for index in range(turn.copy.num_tokens):
                row = self.memory[turn.copy.source][index]
                expected = digest_of(turn.namespace, turn.tokens[: start + index + 1])
                assert row is not None and row.digest == expected

    def advance(self, turn: Turn, rows: Tokens) -> bool:
        """One evaluated step: demotions, copy, restore, rows, save, commit."""
        path = turn.path
        if not self.cache.reserve(path, len(turn.tokens) + len(rows)):
            return False
        self.check_unread(turn)
        self.begin_step()
        if turn.copy is not None:
            source = self.memory[turn.copy.source]
            self.memory[turn.copy.target][: turn.copy.num_tokens] = source[: turn.copy.num_tokens]
        if turn.restore is not None:
            turn.sources |= self.states[turn.restore].sources
        turn.copy = turn.restore = None
        turn.sources |= {path.number}
        start = len(turn.tokens)
        self.read(turn, 0, start)
        for position, token in enumerate(rows, start):
            turn.tokens += (token,)
            if position < path.num_sealed:
                self.read(turn, position, position + 1)
                continue
            page, index = divmod(position, self.page_tokens)
            assert path.pages[page] in path.private_pages()
            digest = digest_of(turn.namespace, turn.tokens)
            self.memory[path.pages[page]][index] = Content(digest, turn.sources)
        if path.state_row is not None:
            self.states[path.state_row] = Content(digest_of(turn.namespace, turn.tokens), turn.sources)
        self.cache.commit(path, rows)
        assert path.num_tokens == len(turn.tokens)
        return True

    def read(self, turn: Turn, first: int, last: int) -> None:
        for position in range(first, last):
            page, index = divmod(position, self.page_tokens)
            row = self.memory[turn.path.pages[page]][index]
            assert row is not None
            assert row.digest == digest_of(turn.namespace, turn.tokens[: position + 1])
            turn.sources |= row.sources

    def check_tree(self) -> None:
        """Whatever can be matched is what it claims to be, and rests on no poisoned path's work."""
        for namespace, root in self.cache._tree.roots.items():
            waiting: list[tuple[Node, Tokens]] = [(child, ()) for child in root.below()]
            while waiting:
                node, above = waiting.pop()
                tokens = above + tuple(memoryview(node.tokens).cast("I"))
                for index, position in enumerate(range(node.start, node.end)):
                    row = self.memory[node.pages[index // self.page_tokens]][index % self.page_tokens]
                    assert row is not None and row.digest == digest_of(namespace, tokens[: position + 1])
                    assert not row.sources & self.poisoned
                for checkpoint in node.checkpoints:
                    state = self.state_at(checkpoint.row)
                    assert state.digest == digest_of(namespace, tokens[: checkpoint.position])
                    assert not state.sources & self.poisoned
                waiting += [(child, tokens) for child in node.below()]

    def check_rows(self, pages: list[int], namespace: bytes, tokens: Tokens) -> None:
        for position in range(len(tokens)):
            row = self.memory[pages[position // self.page_tokens]][position % self.page_tokens]
            assert row is not None and row.digest == digest_of(namespace, tokens[: position + 1])

    def deepest_kept(self, namespace: bytes, tokens: Tokens) -> int:
        """By looking at every checkpoint there is."""
        root = self.cache._tree.roots.get(namespace)
        found = 0
        waiting: list[tuple[Node, Tokens]] = [(child, ()) for child in root.below()] if root else []
        while waiting:
            node, above = waiting.pop()
            held = above + tuple(memoryview(node.tokens).cast("I"))
            for checkpoint in node.checkpoints:
                if checkpoint.position <= len(tokens) and (
                    held[: checkpoint.position] == tokens[: checkpoint.position]
                ):
                    found = max(found, checkpoint.position)
            waiting += [(child, held) for child in node.below()]
        return found
