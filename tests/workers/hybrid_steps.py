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

GREEDY = RowSampling(Sampling(temperature=0), 0, 0, array("I", [1]), array("I"))


@dataclass
class Stream:
    """One worker's path: its page table, and the tokens whose rows have run."""

    worker: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)


class HandDriven:
    """A real runner. Pages are handed out in order and never taken back."""

    def __init__(self, folder: Path, *, bits: Literal["8", "native"] = "native", num_states: int = 8) -> None:
        kvcache = KVCacheSettings(bits=bits, pool_tokens=16_384, states=num_states)
        self.loaded = load(EngineSettings(model=str(folder), weights="fp32", kvcache=kvcache))
        self.runner: ModelRunner = self.loaded.runner
        self.logits: list[mx.array] = []  # of the last step's segments that were sampled after, in order
        self._next_page = 0
        network = self.runner._network
        self.runner._network = dataclasses.replace(network, head=self._recorded(network.head))

    def _recorded(self, head: Any) -> Any:
        def recording(hidden: mx.array) -> Any:
            logits = head(hidden)
            self.logits = list(logits)
            return logits

        return recording

    def stream(self, worker: int, *, num_tokens: int = 448, behind: Sequence[int] = ()) -> Stream:
        """A path with room for so many tokens; the pages `behind` come first."""
        num_new = -(-num_tokens // PAGE_TOKENS) - len(behind)
        first = self._next_page
        self._next_page += num_new
        return Stream(worker, [*behind, *range(first, first + num_new)])

    def run(
        self, *segments: Segment, copies: Sequence[PageCopy] = (), restores: Any = (), saves_before: Any = ()
    ) -> StepResult:
        plan = StepPlan(tuple(copies), segments, restores=tuple(restores), saves_before=tuple(saves_before))
        return self.runner.run(plan)

    def feed(self, stream: Stream, tokens: Sequence[int], cuts: Sequence[int] = (), **last: Any) -> mx.array:
        """Run tokens alone in chunks that end at these positions; the logits after the last row."""
        end = len(stream.tokens) + len(tokens)
        whole = [*stream.tokens, *tokens]
        for cut in [*cuts, end]:
            chunk = whole[len(stream.tokens) : cut]
            self.run(rows_of(stream, chunk, **(last if cut == end else {})))
        return self.logits[0]


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

    def after(self, tokens: Sequence[int]) -> mx.array:
        """The logits behind the last of these tokens."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._model(mx.array([list(tokens)]))[0, -1]
            mx.eval(self._known[key])
        return self._known[key]
