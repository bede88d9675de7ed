"""What a paused turn computed: for how long it is held, against what, and what lets go of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import fake_submit
from tests.workers.engine_bench import PAGE_TOKENS, Bench, prompt_of, resumed
from workers.messages import Cancel, CancelAgents, Finished, Pause, Paused, Started, Submit
from workers.pins import AgentKey

KINDS = (None, 8)
NUM_PROMPT = 5 * PAGE_TOKENS


def paused_bench(
    *, num_states: int | None = None, num_pages: int = 32, hold_seconds: float = 600.0, agent: str = "a"
) -> tuple[Bench, Submit]:
    """A turn that was paused after a few tokens, and its Submit."""
    bench = Bench(num_states=num_states, num_pages=num_pages, context_length=num_pages * PAGE_TOKENS)
    submit = fake_submit("one", prompt_of(NUM_PROMPT), max_tokens=30, agent=agent, session="s")
    bench.engine.submit(submit)
    while len(bench.token_ids("one")) < 4:
        bench.step()
    bench.engine.pause(Pause(run_id="one", attempt=1, hold_seconds=hold_seconds))
    bench.run()
    assert isinstance(bench.events["one"][-1], Paused)
    return bench, submit


def num_pinned(bench: Bench) -> int:
    bench.engine.rest()
    bench.engine.check_integrity()
    return bench.engine.stats().num_pinned_pages


def fill(bench: Bench, num_turns: int = 8) -> None:
    """Others go through the pool, more than it holds."""
    for index in range(num_turns):
        bench.ask(f"other{index}", prompt_of(10 * PAGE_TOKENS, 1 + index), max_tokens=4)


@pytest.mark.parametrize("num_states", KINDS)
@pytest.mark.parametrize("agent", ["a", ""])
def test_what_a_paused_turn_computed_outlives_other_prefixes(num_states: int | None, agent: str) -> None:
    bench, submit = paused_bench(num_states=num_states, agent=agent)
    assert num_pinned(bench) >= NUM_PROMPT // PAGE_TOKENS
    fill(bench)
    assert bench.engine.stats().num_evicted_pages > 0
    generated = bench.token_ids("one")
    bench.engine.submit(resumed(submit, generated))
    bench.run()
    started = [event.cached_tokens for event in bench.events["one"] if isinstance(event, Started)]
    assert started == [0, NUM_PROMPT + len(generated) - 1]
    assert bench.token_ids("one") == bench.model.generate(submit, 30)


def test_it_is_given_up_when_a_turn_could_not_go_on_otherwise() -> None:
    bench, submit = paused_bench(num_pages=12)
    bench.ask("large", prompt_of(11 * PAGE_TOKENS, 1), max_tokens=4)
    assert isinstance(bench.end("large"), Finished) and num_pinned(bench) == 0
    bench.engine.submit(resumed(submit, bench.token_ids("one")))
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, 30)


@pytest.mark.parametrize("hold_seconds", [0.0, -1.0, float("nan")])
def test_no_time_holds_nothing(hold_seconds: float) -> None:
    bench, submit = paused_bench(hold_seconds=hold_seconds)
    assert num_pinned(bench) == 0
    bench.engine.submit(resumed(submit, bench.token_ids("one")))
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, 30)


@pytest.mark.parametrize(
    ("hold_seconds", "limit"), [(50.0, 50.0), (1e12, 86_400.0), (float("inf"), 86_400.0)]
)
def test_its_time_runs_out(hold_seconds: float, limit: float) -> None:
    bench, _ = paused_bench(hold_seconds=hold_seconds)
    bench.clock.advance(limit - 10.0)
    assert num_pinned(bench) > 0
    assert bench.engine.idle_seconds is not None and bench.engine.idle_seconds <= 10.0
    bench.clock.advance(10.0)
    assert num_pinned(bench) == 0


@pytest.mark.parametrize("num_states", KINDS)
def test_it_is_let_go_when_the_next_attempt_starts_and_not_before(num_states: int | None) -> None:
    bench, submit = paused_bench(num_states=num_states)
    bench.engine.submit(resumed(submit, bench.token_ids("one")))
    assert num_pinned(bench) > 0
    bench.step()
    assert sum(isinstance(event, Started) for event in bench.events["one"]) == 2
    assert num_pinned(bench) == 0


def let_go_by_cancel(bench: Bench) -> None:
    bench.engine.cancel(Cancel(run_id="one", attempt=7))


def let_go_by_cancelling_its_agent(bench: Bench) -> None:
    bench.engine.cancel_agents(CancelAgents(session="s", agent="a"))


def let_go_by_cancelling_its_session(bench: Bench) -> None:
    bench.engine.cancel_agents(CancelAgents(session="s"))


def let_go_by_beginning_again(bench: Bench) -> None:
    bench.engine.abandon()


@pytest.mark.parametrize("num_states", KINDS)
@pytest.mark.parametrize(
    "let_go",
    [
        let_go_by_cancel,
        let_go_by_cancelling_its_agent,
        let_go_by_cancelling_its_session,
        let_go_by_beginning_again,
    ],
)
@pytest.mark.parametrize("num_steps", [0, 2], ids=["before its state is saved", "later"])
def test_it_is_let_go(num_states: int | None, let_go: Callable[[Bench], None], num_steps: int) -> None:
    bench = Bench(num_states=num_states)
    bench.engine.submit(fake_submit("one", prompt_of(NUM_PROMPT), max_tokens=30, agent="a", session="s"))
    while len(bench.token_ids("one")) < 4:
        bench.step()
    bench.engine.pause(Pause(run_id="one", attempt=1))
    bench.run(num_steps)
    let_go(bench)
    bench.run()
    assert num_pinned(bench) == 0


@pytest.mark.parametrize("num_states", KINDS)
def test_others_cancels_do_not_let_go_of_it(num_states: int | None) -> None:
    bench, _ = paused_bench(num_states=num_states)
    bench.engine.cancel(Cancel(run_id="two", attempt=1))
    bench.engine.cancel_agents(CancelAgents(session="s", agent="b"))
    bench.engine.cancel_agents(CancelAgents(session="t"))
    bench.engine.cancel_agents(CancelAgents(session="s", tenant="other"))
    bench.run()
    assert num_pinned(bench) > 0


def test_a_session_takes_its_nameless_runs_along() -> None:
    bench, _ = paused_bench(agent="")
    bench.engine.cancel_agents(CancelAgents(session="s"))
    assert num_pinned(bench) == 0


def test_a_descendants_paused_run_is_let_go_with_its_ancestor() -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("parent", prompt_of(20), max_tokens=2, agent="p", session="s"))
    bench.run()
    child = fake_submit("one", prompt_of(40, 1), max_tokens=30, agent="a", parent="p", session="s")
    bench.engine.submit(child)
    bench.run(4)
    bench.engine.pause(Pause(run_id="one", attempt=1))
    bench.run()
    assert num_pinned(bench) > 0
    bench.engine.cancel_agents(CancelAgents(session="s", agent="p"))
    assert num_pinned(bench) == 0


def test_a_pause_in_line_prolongs_what_is_held() -> None:
    bench, submit = paused_bench(hold_seconds=50.0)
    bench.clock.advance(40.0)
    second = resumed(submit, bench.token_ids("one"))
    bench.engine.submit(second)
    bench.engine.pause(Pause(run_id="one", attempt=2, hold_seconds=50.0))
    bench.run()
    end = bench.events["one"][-1]
    assert isinstance(end, Paused)
    assert end.usage.completion_tokens == len(bench.token_ids("one"))
    bench.clock.advance(45.0)
    assert num_pinned(bench) > 0
    bench.clock.advance(10.0)
    assert num_pinned(bench) == 0


@pytest.mark.parametrize("num_states", [None, 16])
def test_a_turn_that_lost_its_worker_is_paused_in_line_with_what_it_had(num_states: int | None) -> None:
    bench = Bench(num_pages=24, context_length=24 * PAGE_TOKENS, num_states=num_states)
    submits = [fake_submit(f"run{index}", prompt_of(20, index), max_tokens=120) for index in range(2)]
    for submit in submits:
        bench.engine.submit(submit)
    while not bench.engine.stats().num_waiting or not bench.engine.stats().num_preempted:
        bench.step()
    bench.engine.pause(Pause(run_id="run1", attempt=1))
    bench.step()
    end = bench.events["run1"][-1]
    assert isinstance(end, Paused) and end.usage.completion_tokens == len(bench.token_ids("run1")) > 64
    bench.engine.submit(resumed(submits[1], bench.token_ids("run1")))
    bench.run()
    for submit in submits:
        assert bench.token_ids(submit.run_id) == bench.model.generate(submit, 120)


def test_a_failed_step_takes_what_is_held() -> None:
    bench, submit = paused_bench()
    bench.engine.submit(fake_submit("two", prompt_of(20, 1), max_tokens=4))
    bench.runner.fail_next = RuntimeError("gone")
    bench.run()
    assert num_pinned(bench) == 0
    bench.engine.submit(resumed(submit, bench.token_ids("one")))
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, 30)


@pytest.mark.parametrize("hints", [{"is_final": True}, {"retain": "ephemeral"}], ids=["final", "ephemeral"])
@pytest.mark.parametrize("num_states", KINDS)
def test_a_turn_after_which_nobody_comes_back_is_held_too(
    num_states: int | None, hints: dict[str, Any]
) -> None:
    bench = Bench(num_states=num_states)
    submit = fake_submit("one", prompt_of(NUM_PROMPT), max_tokens=30, agent="a", **hints)
    bench.engine.submit(submit)
    while len(bench.token_ids("one")) < 4:
        bench.step()
    bench.engine.pause(Pause(run_id="one", attempt=1))
    bench.run()
    generated = bench.token_ids("one")
    bench.engine.submit(resumed(submit, generated))
    bench.run()
    started = [event.cached_tokens for event in bench.events["one"] if isinstance(event, Started)]
    assert started == [0, NUM_PROMPT + len(generated) - 1]
    assert bench.engine._scheduler._agents._agents[AgentKey("", "", "a")].is_dead


def test_a_run_and_its_agent_may_hold_the_same_prefix() -> None:
    bench, submit = paused_bench()
    child = fake_submit("child", prompt_of(20, 1), max_tokens=40, agent="b", parent="a", session="s")
    bench.engine.submit(child)
    bench.run(3)
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    assert num_pinned(bench) > 0  # for the parent that waits for its child
    bench.run()
    assert num_pinned(bench) == 0
    bench.engine.submit(resumed(submit, bench.token_ids("one")))
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, 30)
