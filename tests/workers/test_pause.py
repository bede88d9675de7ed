from __future__ import annotations

import msgspec
import pytest

from tests.fakes import FakeModel, fake_submit
from tests.workers.engine_bench import PAGE_TOKENS, Bench, prompt_of, resumed
from workers.messages import (
    Cancel,
    Cancelled,
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
        asked = resumed(asked, bench.token_ids(submit.run_id))
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
    assert [e.cached_tokens for e in bench.events["one"] if isinstance(e, Started)] == [0, processed]
    end = bench.events["one"][-1]
    assert isinstance(end, Finished) and end.usage.cached_tokens == processed


@pytest.mark.parametrize(("most_cached", "told"), [(None, 30), (64, 30), (7, 7), (0, 0)])
def test_what_an_earlier_attempt_computed_is_not_told_as_cached(most_cached: int | None, told: int) -> None:
    bench = Bench()
    submit = fake_submit("one", prompt_of(30), max_tokens=20)
    bench.engine.submit(submit)
    while not bench.token_ids("one"):
        bench.step()
    pause(bench, "one")
    asked = resumed(submit, bench.token_ids("one"))
    bench.engine.submit(msgspec.structs.replace(asked, most_cached=most_cached))
    bench.run()
    assert bench.end("one").usage.cached_tokens == told


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


@pytest.mark.parametrize("num_states", KINDS)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_stop_string_and_a_character_cut_by_a_pause_are_found_and_whole(
    num_states: int | None, every: int
) -> None:
    model = FakeModel("aé漢".encode(), end_every=0)
    stop = ("aaé", "éaé", "a\ufffda")
    whole = Bench(num_states=num_states, model=model)
    whole.ask("one", prompt_of(20), max_tokens=200, stop=stop)
    expected = whole.events["one"][-1]
    assert isinstance(expected, Finished) and expected.stop_text and len(whole.token_ids("one")) > every
    bench = Bench(num_states=num_states, model=model)
    run_with_pauses(bench, fake_submit("one", prompt_of(20), max_tokens=200, stop=stop), every)
    end = bench.events["one"][-1]
    assert isinstance(end, Finished)
    assert (bench.text("one"), end.reason, end.stop_text) == (whole.text("one"), "stop", expected.stop_text)


def test_a_pause_sends_no_held_text() -> None:
    bench = Bench(model=FakeModel(b"ab", end_every=0))
    submit = fake_submit("one", prompt_of(20), max_tokens=20, stop=("a" * 20, "b" * 20, "ab" * 20, "ba" * 20))
    bench.engine.submit(submit)
    step_until(bench, "one", 6)
    text = bench.text("one")
    assert len(text) < len(bench.token_ids("one"))
    pause(bench, "one")
    assert bench.text("one") == text


@pytest.mark.parametrize("num_states", KINDS)
def test_drafted_tokens_go_on_behind_a_pause(num_states: int | None) -> None:
    model = FakeModel(end_every=0)
    submit = fake_submit("one", prompt_of(20), max_tokens=40)
    expected = model.generate(submit, 40)

    class Foresight:
        """Proposes what will come, and every third time something else."""

        def propose(self, turn: Turn) -> list[int]:
            rest = expected[len(turn.generated) : len(turn.generated) + 3]
            return rest if len(turn.generated) % 3 else [*rest[:1], 0]

    bench = Bench(num_states=num_states, model=model, drafter=Foresight())
    run_with_pauses(bench, submit, 7)
    assert bench.token_ids("one") == expected


@pytest.mark.parametrize(
    ("generated_tokens", "max_tokens", "word"),
    [(20, 40, "generated_tokens"), (-1, 40, "generated_tokens"), (8, 8, "max_tokens"), (9, 8, "max_tokens")],
)
def test_a_turn_that_cannot_go_on_is_refused_by_name(
    generated_tokens: int, max_tokens: int, word: str
) -> None:
    bench = Bench()
    bench.ask("one", prompt_of(20), max_tokens=max_tokens, generated_tokens=generated_tokens)
    end = bench.end("one")
    assert isinstance(end, Failed) and end.error == "invalid_request"
    assert word in end.message and str(generated_tokens) in end.message


def test_the_largest_number_of_generated_tokens_leaves_a_prompt_of_one() -> None:
    bench = Bench()
    bench.ask("one", prompt_of(20), max_tokens=30, generated_tokens=19)
    end = bench.events["one"][-1]
    assert isinstance(end, Finished) and len(bench.token_ids("one")) == 11
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (1, 30)


def test_a_pause_of_an_unknown_or_ended_turn_changes_nothing() -> None:
    bench = Bench()
    bench.ask("one", prompt_of(20), max_tokens=3)
    events = list(bench.events["one"])
    for run_id, attempt in (("one", 1), ("one", 2), ("other", 1)):
        bench.engine.pause(Pause(run_id=run_id, attempt=attempt))
    bench.run()
    assert bench.events["one"] == events and not bench.events["other"]
    assert bench.engine.stats().num_pinned_pages == 0


@pytest.mark.parametrize("num_states", KINDS)
def test_a_second_pause_and_a_late_cancel_are_harmless(num_states: int | None) -> None:
    bench = Bench(num_states=num_states)
    bench.engine.submit(fake_submit("one", prompt_of(20), max_tokens=20))
    step_until(bench, "one", 3)
    for _ in range(2):
        bench.engine.pause(Pause(run_id="one", attempt=1))
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.run()
    assert [type(event) for event in bench.events["one"][-2:]] == [type(bench.events["one"][-2]), Paused]
    assert sum(isinstance(event, Paused | Cancelled) for event in bench.events["one"]) == 1
    assert bench.engine.stats().num_pinned_pages == 0
