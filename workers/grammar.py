"""Grammars of turns: built on a thread of their own, then held as the state that goes along with one turn.

Knows llguidance and the tokenizer; knows no model, no line and no bus. The engine's thread owns a TurnGrammar
from the moment `poll` gave it out.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from .errors import DeadEnd, TurnRefused
from .messages import Grammar
from .text import Detokenizer

log = structlog.get_logger(__name__)

_SIMPLIFY = "simplify the schema, or split it over several calls"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What a grammar may cost. Sizes are in characters of its source."""

    build_seconds: float = 10.0
    max_source: int = 1_000_000
    max_marker: int = 256
    num_kept: int = 64  # built grammars that are kept for further turns
    kept_source: int = 4_000_000  # the sum of their sources


def parser_limits() -> LLParserLimits:
    """Of one matcher: a step's work stays under some 20 ms, its automaton under some 100 MB."""
    return LLParserLimits(
        max_lexer_states=50_000,
        verbose_errors=False,  # errors must not tell what the turn wrote
    )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as grammars need them: `width` logits, and the ids that end a turn."""

    tokenizer: LLTokenizer
    detokenizer: Detokenizer
    width: int
    all_but_ends: NDArray[np.bool_]

    @classmethod
    def of(cls, detokenizer: Detokenizer, width: int, end_ids: Collection[int]) -> Vocabulary:
        """Takes up to a second. Raises ValueError for a width below the tokenizer's, or without end ids."""
        made = LLTokenizer(detokenizer.tokenizer.to_str(), n_vocab=width, eos_token=sorted(end_ids))
        allowed = np.ones(width, np.bool_)
        allowed[list(end_ids)] = False
        return cls(made, detokenizer, width, allowed)


class TurnGrammar:
    """What one turn may say next. `after`: it may say anything but its end until these bytes were written."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, after: bytes = b"") -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._after = after
        self._tail = b""  # while it waits: the last bytes, which may be the marker's first
        self.is_complete = False  # nothing may follow

    @property
    def is_free(self) -> bool:
        """Whether it does not apply yet."""
        return bool(self._after)

    def allowed(self) -> NDArray[np.bool_]:
        """By token id. Raises DeadEnd: a library in trouble allows the end of the turn, we do not."""
        if self._after:
            return self._vocabulary.all_but_ends
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise DeadEnd("the grammar's state grew too large, or it allows nothing more")
        allowed = np.unpackbits(packed, count=self._vocabulary.width, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise DeadEnd("no token of this model goes on as the grammar demands")
        return allowed

    def advance(self, token_id: int) -> None:
        """Take a token that the turn has. What the grammar refuses makes the next `allowed` raise."""
        if self._after:
            self._wait(self._vocabulary.detokenizer.token_bytes(token_id))
        else:
            self._matcher.consume_token(token_id)
        self.is_complete = not self._after and self._is_over()

    def _is_over(self) -> bool:
        matcher = self._matcher
        return matcher.is_stopped() and not matcher.is_error() and matcher.is_accepting()

    def _wait(self, new: bytes) -> None:
        written = self._tail + new
        found = written.find(self._after)
        if found < 0:
            self._tail = written[-(len(self._after) - 1) :] if len(self._after) > 1 else b""
            return
        rest = written[found + len(self._after) :]
        self._after = self._tail = b""
        token_ids = self._vocabulary.tokenizer.tokenize_bytes(rest) if rest else []
        if self._matcher.validate_tokens(token_ids) == len(token_ids) or rest.strip():
            self._matcher.consume_tokens(token_ids)


class Building:
    """A grammar that a turn waits for. Its results are written once, before `_is_done` is."""

    def __init__(self, grammar: Grammar, generated: Sequence[int], deadline: float) -> None:
        self.grammar = grammar
        self.generated = generated  # the turn's tokens so far
        self._deadline = deadline
        self._result: TurnGrammar | None = None
        self._problem = ""
        self._is_done = False

    def poll(self, now: float) -> TurnGrammar | None:
        """The grammar, None as long as it is being built. Raises TurnRefused."""
        if self._result is not None:
            return self._result
        if self._is_done:
            raise TurnRefused("grammar_error", self._problem)
        if now >= self._deadline:
            raise TurnRefused("grammar_error", f"the grammar could not be built in time: {_SIMPLIFY}")
        return None

    @property
    def is_done(self) -> bool:
        return self._is_done

    def succeed(self, result: TurnGrammar) -> None:
        self._result = result
        self._is_done = True

    def fail(self, problem: str) -> None:
        self._problem = problem
        self._is_done = True


class Grammars:
    """Builds the grammars of one engine, one after the other, off its thread."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        width: int,
        end_ids: Collection[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._detokenizer = detokenizer
        self._width = width
        self._end_ids = end_ids
        self._builder: _Builder | None = None

    def begin(self, grammar: Grammar, generated: Sequence[int], now: float) -> Building:
        """Have it built; now: the clock that `poll` will be asked with. Raises TurnRefused at once where
        size alone forbids it.
        """
        limits = self._limits
        if len(grammar.source) > limits.max_source:
            size = f"{len(grammar.source)} characters, more than {limits.max_source}"
            raise TurnRefused("grammar_error", f"the grammar has {size}: {_SIMPLIFY}")
        if grammar.after is not None and not 0 < len(grammar.after) <= limits.max_marker:
            raise TurnRefused("grammar_error", "grammar.after must be the text of a token, or absent")
        building = Building(grammar, generated, now + limits.build_seconds)
        if self._builder is not None and self._builder.is_late(now):
            self._builder.retire()
            self._builder = None
        if self._builder is None:
            self._builder = _Builder(self._vocabulary, limits)
        self._builder.put(building, now)
        return building

    @property
    def num_kept(self) -> int:
        """Grammars that further turns would find built."""
        return 0 if self._builder is None else self._builder.num_kept

    def _vocabulary(self) -> Vocabulary:
        try:
            return Vocabulary.of(self._detokenizer, self._width, self._end_ids)
        except ValueError as error:
            raise ValueError(
                f"this model's tokenizer takes no grammars ({error}): ask without a schema"
            ) from None


class _Builder:
    """One thread and what it has built. One that is late is left to itself and another takes its place."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits) -> None:
        self._make_vocabulary = vocabulary
        self._limits = limits
        self._waiting: list[tuple[Building, float]] = []  # with the times of `put`; the engine's thread only
        self._queue: SimpleQueue[Building | None] = SimpleQueue()  # None: no more will come
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        threading.Thread(target=self._run, name="grammars", daemon=True).start()

    def put(self, building: Building, now: float) -> None:
        self._waiting.append((building, now))
        self._queue.put(building)

    def retire(self) -> None:
        """Ends the thread, and with it all that it keeps, once it has done what it was given."""
        self._queue.put(None)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def is_late(self, now: float) -> bool:
        """Whether the first that waits has waited for longer than any may."""
        self._waiting = [(building, put) for building, put in self._waiting if not building.is_done]
        return bool(self._waiting) and now >= self._waiting[0][1] + self._limits.build_seconds

    def _run(self) -> None:
        while (building := self._queue.get()) is not None:
            try:
                building.succeed(self._build(building))
            except ValueError as error:
                building.fail(str(error))
            except BaseException as error:  # noqa: BLE001 - its panics are no Exceptions; they end one turn
                log.error("a grammar could not be built", error_kind=type(error).__name__)
                building.fail(f"the grammar could not be built: {_SIMPLIFY}")

    def _build(self, building: Building) -> TurnGrammar:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        grammar = building.grammar
        matcher = self._matcher(grammar.source, self._vocabulary).deep_copy()
        after = (grammar.after or "").encode()
        built = TurnGrammar(matcher, self._vocabulary, after)
        for token_id in building.generated:
            built.advance(token_id)
        return built

    def _matcher(self, source: str, vocabulary: Vocabulary) -> LLMatcher:
        """At its start. Raises ValueError, in words for the caller and without the grammar's text."""
        key = hashlib.blake2b(source.encode(errors="replace"), digest_size=16).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # tells what allows nothing at all, and prepares the first step
        if matcher.is_error():
            raise ValueError(f"the grammar is not valid, too large, or allows nothing: {_SIMPLIFY}")
        self._kept[key] = (matcher, len(source))
        self._forget()
        return matcher

    def _forget(self) -> None:
        limits = self._limits
        while len(self._kept) > 1 and (
            len(self._kept) > limits.num_kept
            or sum(size for _, size in self._kept.values()) > limits.kept_source
        ):
            self._kept.popitem(last=False)
