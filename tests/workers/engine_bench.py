"""An engine over fakes, and what it told."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcache.cache import Cache
from tests.fakes import FakeClock, FakeModel, FakeRunner, fake_rules, fake_submit
from workers.drafting import Drafter
from workers.engine import Engine
from workers.line import LineRules
from workers.messages import (
    Cancelled,
    Event,
    Failed,
    Finished,
    Started,
    Submit,
    Tokens,
)
from workers.pace import PaceLimits
from workers.plan import GrammarSource

PAGE_TOKENS = 8


@dataclass
class Bench:
    """An engine over fakes, and what it told about each run."""

    num_pages: int = 64
    context_length: int = 256
    num_workers: int = 4
    num_states: int | None = None
    num_small_states: int = 0
    page_tokens: int = PAGE_TOKENS
    line: LineRules | None = None
    drafter: Drafter | None = None
    grammars: GrammarSource | None = None
    model: FakeModel = field(default_factory=lambda: FakeModel(end_every=0))
    limits: PaceLimits = field(default_factory=lambda: PaceLimits(min_rows=16, min_idle_rows=32, max_rows=32))

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.cache = Cache(
            self.num_pages,
            page_tokens=self.page_tokens,
            num_states=self.num_states,
            num_small_states=self.num_small_states,
        )
        self.runner = FakeRunner(
            self.num_pages,
            self.clock,
            page_tokens=self.page_tokens,
            model=self.model,
            num_states=self.num_states,
            num_small_states=self.num_small_states,
        )
        self.rules = fake_rules(context_length=self.context_length)
        self.engine = Engine(
            self.runner,
            self.cache,
            self.rules,
            num_workers=self.num_workers,
            limits=self.limits,
            line=self.line,
            drafter=self.drafter,
            grammars=self.grammars,
            clock=self.clock,
        )
        self.events: dict[str, list[Event]] = defaultdict(list)

    def step(self) -> None:
        self.clock.advance(self.engine.rest_seconds)
        for told in self.engine.step():
            self.events[told.run_id].append(told.event)
        self.engine.check_integrity()

    def run(self, num_steps: int = 10_000) -> None:
        for _ in range(num_steps):
            if not self.engine.has_work:
                return
            self.step()
        assert num_steps < 10_000, "the engine does not come to an end"

    def ask(self, run_id: str, prompt: Sequence[int], **settings: Any) -> Submit:
        """Submit a turn and run until nothing is left."""
        submit = fake_submit(run_id, prompt, **settings)
        self.engine.submit(submit)
        self.run()
        return submit

    def started(self, run_id: str) -> Started:
        return next(event for event in self.events[run_id] if isinstance(event, Started))

    def token_ids(self, run_id: str) -> list[int]:
        data = b"".join(event.token_ids for event in self.events[run_id] if isinstance(event, Tokens))
        return list(array("I", data))

    def text(self, run_id: str) -> str:
        return "".join(event.text for event in self.events[run_id] if isinstance(event, Tokens))

    def end(self, run_id: str) -> Finished | Cancelled | Failed:
        ends = [event for event in self.events[run_id] if isinstance(event, Finished | Cancelled | Failed)]
        assert len(ends) == 1 and self.events[run_id][-1] is ends[0]
        assert ends[0].usage.completion_tokens == len(self.token_ids(run_id))
        return ends[0]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + index * 7 + index // 5) % 251 for index in range(num_tokens)]


def resumed(submit: Submit, token_ids: Sequence[int]) -> Submit:
    """The attempt after this one of a turn that has generated these tokens."""
    prompt = submit.token_ids[: len(submit.token_ids) - 4 * submit.generated_tokens]
    return msgspec.structs.replace(
        submit,
        attempt=submit.attempt + 1,
        token_ids=prompt + array("I", token_ids).tobytes(),
        generated_tokens=len(token_ids),
    )
