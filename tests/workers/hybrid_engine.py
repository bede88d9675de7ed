"""A real engine over a small hybrid, every sampled row of it held to mlx-lm's own forward pass."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kvcache.settings import KVCacheSettings
from tests.models import EngineUnderTest, Reference
from tests.workers.hybrid_steps import Dense, LogitRecorder, difference
from workers.messages import Cancel, Finished, Progress, Sampling, Submit, Tokens
from workers.plan import StepPlan, StepResult
from workers.runner import ModelRunner
from workers.settings import EngineSettings

CHUNK_ROWS = 128
LEAST_MARGIN = 1e-4
"""Of the two best logits, as a part of the largest: a greedy token with less is decided by rounding."""


@dataclass(frozen=True)
class Answer:
    """A sampled row: the tokens before it and its logits."""

    tokens: tuple[int, ...]
    logits: mx.array


class WatchedRunner:
    """Runs steps for the engine and notes what was sampled after and which states came back."""

    def __init__(self, runner: ModelRunner) -> None:
        self.answers: list[Answer] = []
        self.num_restored = 0
        self.num_restored_small = 0  # of these, from 8 bits
        self.num_replayed = 0  # answered from a kept hidden row alone
        self._runner = runner
        self._recorder = LogitRecorder(runner)

    def run(self, plan: StepPlan) -> StepResult:
        asked = [segment for segment in plan.segments if segment.row is not None]
        before = [(*s.row.prompt, *s.row.generated) for s in asked if s.row is not None]
        result = self._runner.run(plan)
        if asked:
            self.answers += map(Answer, before, self._recorder.logits)
        restored = [restore.row for restore in plan.restores if restore.row is not None]
        self.num_restored += len(restored)
        if self._runner.states is not None:
            self.num_restored_small += sum(row >= self._runner.states.num_rows for row in restored)
        self.num_replayed += sum(segment.hidden_from is not None for segment in plan.segments)
        return result

    def rebuild(self) -> None:
        self._runner.rebuild()


@dataclass
class Call:
    """One turn as its caller sees it."""

    prompt: list[int]
    num_tokens: int = 3
    hints: dict[str, Any] = field(default_factory=dict)  # fields of Submit
    cancel_at: int | None = None  # prompt tokens that are in the cache when it is cancelled
    is_broken: bool = False  # it is to fail: there is no answer to compare
    tokens: list[int] = field(default_factory=list)
    end: Any = None

    @property
    def whole(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.tokens]

    @property
    def cached(self) -> int:
        """Position that it was restored at."""
        cached: int = self.end.usage.cached_tokens
        return cached


class Family:
    """One model folder with its reference; engines over it start with an empty cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dense = Dense(Reference(folder, fp32=True).model)

    def engine(
        self,
        bits: Literal["native", "8"] = "native",
        *,
        num_states: int = 40,
        num_small_states: int = 0,
    ) -> TestedEngine:
        kvcache = KVCacheSettings(
            bits=bits, pool_tokens=8192, states=num_states, small_states=num_small_states
        )
        settings = EngineSettings(model=str(self.folder), weights="fp32", kvcache=kvcache)
        return TestedEngine(self, EngineUnderTest(settings, max_rows=CHUNK_ROWS))


class TestedEngine:
    """Calls in, answers out; each answer is compared with mlx-lm's before it is handed back.

    A greedy answer is mlx-lm's own if each of its tokens is the best one behind those before it.
    """

    __test__ = False

    def __init__(self, family: Family, tested: EngineUnderTest) -> None:
        self.family = family
        self.tested = tested
        self.watched = WatchedRunner(tested.loaded.runner)
        tested.engine._runner = self.watched
        self.worst = 0.0  # difference of logits so far
        self._num_calls = 0

    def run(self, *calls: Call, exact: bool = True) -> None:
        """Run calls that come in together to their ends. exact: their tokens are mlx-lm's own too."""
        engine, by_run = self.tested.engine, {}
        self.watched.answers.clear()
        for call in calls:
            self._num_calls += 1
            run_id = str(self._num_calls)
            by_run[run_id] = call
            engine.submit(self._submit(run_id, call))
        while engine.has_work:
            for told in engine.step():
                call, event = by_run[told.run_id], told.event
                if isinstance(event, Tokens):
                    call.tokens += array("I", event.token_ids).tolist()
                elif isinstance(event, Progress) and event.processed_tokens == call.cancel_at:
                    engine.cancel(Cancel(run_id=told.run_id, attempt=1))
                elif hasattr(event, "usage"):
                    call.end = event
        engine.check_integrity()
        ended = [call for call in calls if call.cancel_at is None and not call.is_broken]
        self.family.dense.read([call.whole[:-1] for call in ended])
        for call in ended:
            self._compare(call, exact=exact)

    def _submit(self, run_id: str, call: Call) -> Submit:
        return Submit(
            run_id=run_id,
            attempt=1,
            incarnation=1,
            digest=self.tested.loaded.digest,
            token_ids=array("I", call.prompt).tobytes(),
            max_tokens=call.num_tokens,
            sampling=Sampling(temperature=0),
            ignore_eos=True,
            **call.hints,
        )

    def _compare(self, call: Call, *, exact: bool) -> None:
        assert isinstance(call.end, Finished), call.end
        expected = self.family.dense.along(call.whole[:-1])
        found = {
            len(answer.tokens): answer.logits
            for answer in self.watched.answers
            if list(answer.tokens) == call.whole[: len(answer.tokens)]
        }
        for length, token in zip(range(len(call.prompt), len(call.whole)), call.tokens, strict=True):
            logits = expected[length - 1]
            self.worst = max(self.worst, difference(found[length], logits))
            if exact:
                best = mx.sort(logits)[-2:]
                margin = float((best[1] - best[0]) / mx.abs(logits).max())
                assert margin > LEAST_MARGIN, "rounding decides this token: draw another prompt"
                assert token == int(logits.argmax())
