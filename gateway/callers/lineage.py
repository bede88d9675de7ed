"""Which agent a call without a name continues: the one whose last prompt it contains, or a new one.

Pure: chained hashes of 64-token blocks, a bound and a time to live. A wrong guess costs affinity, never an
answer; two gateways need not agree. An agent with a turn in flight is never continued, so equal children that
start together stay two.
"""

from __future__ import annotations

import math
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from .hints import Names

BLOCK_TOKENS = 64
KEEP_SECONDS = 3600.0
MAX_TURNS = 4096
MAX_MARKS_PER_PLACE = 64
"""Of equal prompts only so many are told apart."""

NEAR_TOKENS = 256
NEAR_SHARE = 0.75
"""A prompt that parts within the last 256 tokens of an agent's last one still continues it, when they share
this much of what follows the system text: history that a template or a client writes anew."""

_BLOCK_BYTES = 4 * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A prompt as lineage sees it. `turn_tokens`: its length before the generation prompt."""

    token_ids: bytes  # little-endian uint32
    system_tokens: int
    turn_tokens: int

    @classmethod
    def of(cls, token_ids: bytes, system_tokens: int, turn_tokens: int) -> PromptShape:
        """`turn_tokens` 0 is the whole prompt, as in Submit."""
        return cls(token_ids, system_tokens, turn_tokens or len(token_ids) // 4)


class _Kind(IntEnum):
    NEAR = 0
    PROMPT = 1
    ANSWER = 2


@dataclass(eq=False, slots=True)
class Turn:
    """An agent's newest turn. Names stay as they are; the rest is Lineage's."""

    names: Names
    turn_tokens: int
    seen: float  # seconds of the clock
    head: int = 0  # chain hash of the prompt's whole blocks
    rest: bytes = b""  # its last, partial block
    is_open: bool = True
    is_answered: bool = False
    places: list[int] = field(default_factory=list)  # chain hashes under which it has marks


@dataclass(frozen=True, slots=True)
class _Mark:
    """A prefix of a turn: the blocks whose chain hash it is filed under, and `tail` after them."""

    turn: Turn
    kind: _Kind
    tail: bytes = b""


class Lineage:
    """Newest turns of agents that have no name. `clock` in seconds; `new_name` names an agent."""

    def __init__(
        self,
        clock: Callable[[], float],
        new_name: Callable[[], str] = lambda: f"auto-{uuid.uuid4().hex[:16]}",
    ) -> None:
        self._clock = clock
        self._new_name = new_name
        self._turns: OrderedDict[Turn, None] = OrderedDict()  # least recently seen first
        self._marks: dict[int, list[_Mark]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def join(self, realm: tuple[str, ...], names: Names, prompt: PromptShape) -> Turn:
        """The turn of a call whose agent has no name, under the names that it gets. `realm`: calls of
        different ones never meet (tenant, model), nor do those of different sessions and parents. To be
        closed with `leave`.
        """
        self._expire()
        chain = _chain(hash((*realm, names.session, names.parent)), prompt.token_ids)
        earlier = self._find(chain, prompt)
        if earlier is not None:
            names = earlier.names
            self._drop(earlier)
        else:
            agent = self._new_name()
            names = Names(names.session or agent, agent, names.parent)
        rest = prompt.token_ids[(len(chain) - 1) * _BLOCK_BYTES :]
        turn = Turn(names, prompt.turn_tokens, self._clock(), chain[-1], rest)
        self._turns[turn] = None
        near = _near_block(prompt)
        if near is not None:
            self._mark(chain[near], _Mark(turn, _Kind.NEAR))
        whole = prompt.turn_tokens // BLOCK_TOKENS
        tail = prompt.token_ids[whole * _BLOCK_BYTES : 4 * prompt.turn_tokens]
        self._mark(chain[whole], _Mark(turn, _Kind.PROMPT, tail))
        return turn

    def answered(self, turn: Turn, answer: bytes) -> None:
        """The turn generated these ids: of twins, the next prompt continues the one whose answer it holds."""
        if turn not in self._turns:
            return
        turn.is_answered = True
        chain = _chain(turn.head, turn.rest + answer[:-4])  # the last one may be the end token
        rest = (turn.rest + answer[:-4])[(len(chain) - 1) * _BLOCK_BYTES :]
        self._mark(chain[-1], _Mark(turn, _Kind.ANSWER, rest))

    def leave(self, turn: Turn, *, is_final: bool) -> None:
        """The turn has ended, however; its agent may be continued unless that was its last one."""
        turn.is_open = False
        if turn in self._turns:
            turn.seen = self._clock()
            self._turns.move_to_end(turn)
            if is_final:
                self._drop(turn)

    def _find(self, chain: Sequence[int], prompt: PromptShape) -> Turn | None:
        for depth in range(len(chain) - 1, -1, -1):
            after = prompt.token_ids[depth * _BLOCK_BYTES : (depth + 1) * _BLOCK_BYTES]
            found = [mark for mark in self._marks.get(chain[depth], ()) if _continues(mark, after, prompt)]
            if found:
                return max(found, key=lambda mark: (len(mark.tail), mark.kind)).turn
        return None

    def _mark(self, place: int, mark: _Mark) -> None:
        marks = self._marks.setdefault(place, [])
        marks.append(mark)
        mark.turn.places.append(place)
        if len(marks) > MAX_MARKS_PER_PLACE:
            del marks[0]

    def _drop(self, turn: Turn) -> None:
        del self._turns[turn]
        for place in set(turn.places):
            left = [mark for mark in self._marks.get(place, ()) if mark.turn is not turn]
            if left:
                self._marks[place] = left
            else:
                self._marks.pop(place, None)

    def _expire(self) -> None:
        now = self._clock()
        while self._turns:
            oldest = next(iter(self._turns))
            if len(self._turns) < MAX_TURNS and now - oldest.seen <= KEEP_SECONDS:
                return
            if oldest.is_open and len(self._turns) < MAX_TURNS:
                oldest.seen = now
                self._turns.move_to_end(oldest)
            else:
                self._drop(oldest)


def _continues(mark: _Mark, after: bytes, prompt: PromptShape) -> bool:
    turn = mark.turn
    if turn.is_open or not after.startswith(mark.tail):
        return False
    if prompt.turn_tokens > turn.turn_tokens:
        return True
    is_same = mark.kind is _Kind.PROMPT and prompt.turn_tokens == turn.turn_tokens
    return is_same and not turn.is_answered  # a retry; after an answer it would be a twin


def _near_block(prompt: PromptShape) -> int | None:
    """How many leading blocks a prompt must share to continue this one though it parts before its end."""
    own = prompt.turn_tokens - prompt.system_tokens
    least = max(prompt.turn_tokens - NEAR_TOKENS, prompt.system_tokens + NEAR_SHARE * own)
    block = math.ceil(least / BLOCK_TOKENS)
    return block if own >= NEAR_TOKENS and block <= prompt.turn_tokens // BLOCK_TOKENS else None


def _chain(seed: int, token_ids: bytes) -> list[int]:
    """The hash of each prefix of whole blocks, the empty one first. Python salts them for each process."""
    chain = [seed]
    for start in range(0, len(token_ids) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        chain.append(hash((chain[-1], token_ids[start : start + _BLOCK_BYTES])))
    return chain
