from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from tests.fakes import FakeModel, fake_submit
from tests.workers.engine_bench import PAGE_TOKENS, Bench, prompt_of
from workers.drafting import Drafter
from workers.messages import (
    Cancel,
    CancelAgents,
    Failed,
    Finished,
    Pause,
    Paused,
    Progress,
    Sampling,
    Started,
    Submit,
    Usage,
)
from workers.turn import Turn

KINDS = (None, 8)
"""Rows of states: a dense model, a hybrid."""


def resumed(submit: Submit, token_ids: list[int]) -> Submit:
    """The next attempt of a turn that has generated these tokens."""
    return msgspec.structs.replace(
        submit,
        attempt=submit.attempt + 1,
        token_ids=submit.token_ids + array("I", token_ids).tobytes(),
        generated_tokens=len(token_ids),
    )


def pause(bench: Bench, run_id: str, attempt: int = 1, *, hold_seconds: float = 600.0) -> Paused:
    """Pause a turn and run until its end is told and its state is saved."""
    bench.engine.pause(Pause(run_id=run_id, attempt=attempt, hold_seconds=hold_seconds))
    bench.run(2)
    end = bench.events[run_id][-1]
    assert isinstance(end, Paused)
    return end


def step_until(bench: Bench, run_id: str, num_tokens: int) -> None:
    while len(bench.token_ids(run_id)) < num_tokens:
        bench.step()


def run_with_pauses(bench: Bench, submit: Submit, every: int) -> int:
    """Pause a turn after every so many tokens until it ends; returns the number of its attempts."""
    asked = submit
    bench.engine.submit(asked)
    while True:
        target = len(bench.token_ids(submit.run_id)) + every
        while len(bench.token_ids(submit.run_id)) < target:
            bench.step()
            if isinstance(bench.events[submit.run_id][-1], Finished):
                return asked.attempt
        pause(bench, submit.run_id, asked.attempt)
        generated = bench.token_ids(submit.run_id)
        asked = msgspec.structs.replace(resumed(submit, generated), attempt=asked.attempt + 1)
        bench.engine.submit(asked)


@pytest.mark.parametrize("num_states", KINDS)
@pytest.mark.parametrize("every", [1, 3, PAGE_TOKENS, 13])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_turn_that_is_paused_and_sent_on_gives_what_it_would_have_given(
    num_states: int | None, every: int, temperature: float
) -> None:
    bench = Bench(num_states=num_states, model=FakeModel("aé漢b".encode(), end_every=0))
    sampling = Sampling(temperature=temperature, seed=7)
    submit = fake_submit("one", prompt_of(30), max_tokens=40, sampling=sampling)
    assert run_with_pauses(bench, submit, every) == -(-40 // every)
    whole = Bench(num_states=num_states, model=bench.model)
    whole.ask("one", prompt_of(30), max_tokens=40, sampling=sampling)
    assert bench.token_ids("one") == whole.token_ids("one")
    assert bench.text("one") == whole.text("one")
    end = bench.events["one"][-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == ("length", 30, 40)
    assert end.usage.cached_tokens <= 30


@pytest.mark.parametrize("num_states", KINDS)
def test_after_a_pause_nothing_is_computed_twice(num_states: int | None) -> None:
    bench = Bench(num_states=num_states)
    submit = fake_submit("one", prompt_of(29), max_tokens=40)
    run_with_pauses(bench, submit, 5)
    # 29 of the prompt, and each of 40 but the last once: those that a prefill of one row began with.
    assert sum(plan.num_rows for plan in bench.runner.plans) == 29 + 39
    assert [event.cached_tokens for event in bench.events["one"] if isinstance(event, Started)] == [
        0,
        *range(29 + 4, 29 + 35, 5),
    ]


@pytest.mark.parametrize("num_states", KINDS)
def test_a_prefill_is_paused_at_a_chunks_border_and_goes_on_from_there(num_states: int | None) -> None:
    bench = Bench(num_states=num_states)
    submit = fake_submit("one", prompt_of(100), max_tokens=3)
    bench.engine.submit(submit)
    bench.step()
    bench.step()
    processed = next(e for e in reversed(bench.events["one"]) if isinstance(e, Progress)).processed_tokens
    assert 0 < processed < 100
    assert pause(bench, "one").usage == Usage(prompt_tokens=100)
    bench.engine.submit(resumed(submit, []))
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, 3)
    assert bench.engine.stats().prompt_tokens_computed == 100
    end = bench.events["one"][-1]
    assert isinstance(end, Finished) and end.usage.cached_tokens == processed


def test_a_turn_in_line_is_paused_without_having_begun() -> None:
    bench = Bench(num_workers=1)
    bench.engine.submit(fake_submit("first", prompt_of(20), max_tokens=20))
    submit = fake_submit("one", prompt_of(20, 1), max_tokens=4)
    bench.engine.submit(submit)
    bench.step()
    end = pause(bench, "one")
    assert end.usage == Usage(prompt_tokens=20) and end.timings.worker is None
    bench.engine.submit(resumed(submit, []))
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, 4)
