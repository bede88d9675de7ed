"""A runner driven by hand: plans as scheduler and cache would make them, and the logits that came of them."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kvcache.cache import PageCopy
from kvcache.settings import PAGE_TOKENS, KVCacheSettings
from workers.messages import Sampling
from workers.model import load
from workers.plan import RowSampling, Segment, StepPlan, StepResult
from workers.runner import ModelRunner
from workers.settings import EngineSettings

EXACT = 1e-4
"""Largest difference from mlx-lm's logits, as a part of the largest logit, with native KV in fp32."""
EIGHT_BITS = {"qwen3_moe": 0.04, "qwen3_next": 0.005, "qwen3_5": 0.005, "qwen3_5_moe": 0.005}
"""The same for 8-bit KV. Of qwen3_moe every layer is attention, and a moved row may take another expert."""
SMALL_STATE = {"qwen3_next": 0.2, "qwen3_5": 0.04, "qwen3_5_moe": 0.25}
"""The same after a state came back from 8 bits, which is off by 0.8 % of its size; with experts as above."""

GREEDY = RowSampling(Sampling(temperature=0), 0, 0, array("I", [1]), array("I"))


@dataclass
class Stream:
    """One worker's path: its page table, and the tokens whose rows have run."""

    worker: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)


class LogitRecorder:
    """Keeps what the head of a runner's model gave last, a row for each that was sampled after."""

    def __init__(self, runner: ModelRunner) -> None:
        self.logits: list[mx.array] = []
        self._head = runner._network.head
        runner._network = dataclasses.replace(runner._network, head=self._recorded)

    def _recorded(self, hidden: mx.array) -> mx.array:
        logits = self._head(hidden)
        self.logits = list(logits)
        return logits


class HandDriven:
    """A real runner. Pages are handed out in order and never taken back."""

    def __init__(
        self,
        folder: Path,
        *,
        bits: Literal["8", "native"] = "native",
        weights: Literal["fp32", "native"] = "fp32",
        num_states: int = 8,
        num_small_states: int = 0,
    ) -> None:
        kvcache = KVCacheSettings(
            bits=bits, pool_tokens=16_384, states=num_states, small_states=num_small_states
        )
        self.loaded = load(EngineSettings(model=str(folder), weights=weights, kvcache=kvcache))
        self.runner: ModelRunner = self.loaded.runner
        self._recorder = LogitRecorder(self.runner)
        self._next_page = 0

    @property
    def logits(self) -> list[mx.array]:
        """Of the last step's segments that were sampled after, in order."""
        return self._recorder.logits

    def stream(self, worker: int, *, num_tokens: int = 448, behind: Sequence[int] = ()) -> Stream:
        """A path with room for so many tokens; the pages `behind` come first."""
        num_new = -(-num_tokens // PAGE_TOKENS) - len(behind)
        first = self._next_page
        self._next_page += num_new
        return Stream(worker, [*behind, *range(first, first + num_new)])

    def run(self, *segments: Segment, copies: Sequence[PageCopy] = (), **states: Any) -> StepResult:
        """`states`: StepPlan's restores, saves_before and demotions."""
        moved = {name: tuple(entries) for name, entries in states.items()}
        return self.runner.run(StepPlan(tuple(copies), segments, **moved))

    def feed(self, stream: Stream, tokens: Sequence[int], cuts: Sequence[int] = (), **last: Any) -> mx.array:
        """Run tokens alone in chunks that end at these positions; the logits after the last row."""
        end = len(stream.tokens) + len(tokens)
        whole = [*stream.tokens, *tokens]
        for cut in [*cuts, end]:
            chunk = whole[len(stream.tokens) : cut]
            self.run(rows_of(stream, chunk, **(last if cut == end else {})))
        return self.logits[0]


def bound_of(family: str, bits: str) -> float:
    return EXACT if bits == "native" else EIGHT_BITS[family]


def rows_of(stream: Stream, tokens: Sequence[int], **fields: Any) -> Segment:
    """The segment that runs these tokens next, sampled after its last row; they count as run from here on."""
    start = len(stream.tokens)
    stream.tokens += tokens
    return Segment(stream.worker, start, list(tokens), tuple(stream.pages), GREEDY, **fields)


def difference(found: mx.array, expected: mx.array) -> float:
    """Largest difference of logits, as a part of the largest logit."""
    return float(mx.abs(found - expected).max() / mx.abs(expected).max())


class Dense:
    """mlx-lm's own forward pass over a whole text at once, without a cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], mx.array] = {}

    def along(self, tokens: Sequence[int]) -> mx.array:
        """The logits behind each of these tokens, [tokens, vocabulary]."""
        if tuple(tokens) not in self._known:
            self.read([tokens])
        return self._known[tuple(tokens)]

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Several texts in one pass, filled up at their ends: what comes later changes nothing before it."""
        new = [tuple(text) for text in texts if tuple(text) not in self._known]
        if not new:
            return
        longest = max(map(len, new))
        logits = self._model(mx.array([[*text] + [0] * (longest - len(text)) for text in new]))
        mx.eval(logits)
        self._known |= {text: rows[: len(text)] for text, rows in zip(new, logits, strict=True)}

    def after(self, tokens: Sequence[int]) -> mx.array:
        """The logits behind the last of these tokens."""
        return self.along(tokens)[-1]
