"""Which checkpoints a hybrid's turns leave, what later turns restore, and that no state is ever mixed up.

The fake runner fails an assertion when a live state is not exactly the one of the tokens before a segment.
"""

from __future__ import annotations

import pytest

from kvcache.cache import Kind
from tests.fakes import END_ID, FakeModel, fake_submit
from tests.workers.engine_bench import Bench, prompt_of
from workers.messages import Cancel, Failed, Finished
from workers.pace import PaceLimits

LIMITS = PaceLimits(min_rows=64, min_idle_rows=256, max_rows=256)


def hybrid(num_states: int = 16, **changes: object) -> Bench:
    settings = {"num_pages": 1024, "context_length": 8192, "limits": LIMITS} | changes
    return Bench(num_states=num_states, **settings)  # type: ignore[arg-type]


def kinds(bench: Bench) -> list[tuple[Kind, int]]:
    """What is kept, by position."""
    kept = [(checkpoint.kind, checkpoint.position) for checkpoint in bench.cache._states]
    return sorted(kept, key=lambda pair: pair[1])


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16, 17, 33, 64, 100, 257, 600])
def test_tokens_equal_the_naive_ones_cold_repeated_and_continued(num_tokens: int) -> None:
    bench = hybrid()
    cold = bench.ask("cold", prompt_of(num_tokens), max_tokens=20)
    expected = bench.model.generate(cold, 20)
    bench.ask("again", prompt_of(num_tokens), max_tokens=20)
    longer = bench.ask("longer", [*prompt_of(num_tokens), *expected, 5, 6], max_tokens=20)
    assert bench.token_ids("cold") == bench.token_ids("again") == expected
    assert bench.token_ids("longer") == bench.model.generate(longer, 20)
    assert bench.end("longer").usage.cached_tokens == num_tokens + 20 - 1


def test_a_repeated_prompt_computes_no_row_of_it() -> None:
    bench = hybrid()
    bench.ask("cold", prompt_of(100), max_tokens=4)
    computed = bench.engine.stats().prompt_tokens_computed
    again = bench.ask("again", prompt_of(100), max_tokens=4)
    assert bench.token_ids("again") == bench.model.generate(again, 4)
    assert bench.engine.stats().prompt_tokens_computed == computed
    assert bench.end("again").usage.cached_tokens == 100
    first = next(plan for plan in bench.runner.plans if any(s.hidden_from is not None for s in plan.segments))
    assert first.num_rows == 0 and first.restores[0].row == first.segments[0].hidden_from


def test_checkpoints_are_taken_at_system_end_turn_end_and_answers_end() -> None:
    bench = hybrid()
    bench.ask("one", prompt_of(1000), max_tokens=5, system_tokens=300, turn_tokens=990)
    assert kinds(bench) == [(Kind.SYSTEM, 300), (Kind.TURN, 990), (Kind.GENERATED, 1004)]
    assert bench.engine.stats().num_checkpoints == 3


def test_after_a_stop_token_the_state_has_seen_the_whole_answer() -> None:
    bench = hybrid(model=FakeModel(end_every=5))
    submit = fake_submit("one", prompt_of(9), max_tokens=100)
    answer = bench.model.generate(submit, 100)
    answer = answer[: answer.index(END_ID)]
    assert answer
    bench.engine.submit(submit)
    bench.run()
    assert kinds(bench)[-1] == (Kind.GENERATED, 9 + len(answer))
    bench.ask("next", [*prompt_of(9), *answer, 3], max_tokens=1)
    assert bench.end("next").usage.cached_tokens == 9 + len(answer)


def test_the_last_checkpoint_is_saved_though_nobody_else_has_work() -> None:
    bench = hybrid()
    bench.engine.submit(fake_submit("one", prompt_of(20), max_tokens=3))
    while "one" not in bench.events or not isinstance(bench.events["one"][-1], Finished):
        bench.step()
    assert bench.engine.has_work
    bench.step()
    assert bench.engine.stats().num_live_pages == 0
    plan = bench.runner.plans[-1]
    assert not plan.segments and len(plan.saves_before) == 1


def test_a_worker_goes_to_the_next_turn_in_the_step_that_saves_its_state() -> None:
    bench = hybrid(num_workers=1)
    bench.engine.submit(fake_submit("one", prompt_of(20), max_tokens=3))
    bench.engine.submit(fake_submit("two", prompt_of(20, 1), max_tokens=3))
    bench.run()
    shared = [plan for plan in bench.runner.plans if plan.saves_before and plan.segments]
    assert shared and shared[0].saves_before[0].worker == shared[0].segments[0].worker


def test_system_text_close_to_the_turns_end_gets_no_checkpoint_of_its_own() -> None:
    bench = hybrid()
    bench.ask("one", prompt_of(1000), max_tokens=1, system_tokens=900)
    assert (Kind.SYSTEM, 900) not in kinds(bench) and (Kind.TURN, 1000) in kinds(bench)


def test_where_only_pages_match_a_branch_is_kept_for_the_next_one() -> None:
    bench = hybrid()
    head = prompt_of(2000)
    bench.ask("one", [*head, *prompt_of(500, 1)], max_tokens=1)
    bench.ask("two", [*head, *prompt_of(500, 2)], max_tokens=1)
    assert bench.end("two").usage.cached_tokens == 0
    assert (Kind.BRANCH, 2000) in kinds(bench)
    three = bench.ask("three", [*head, *prompt_of(500, 3)], max_tokens=4)
    assert bench.end("three").usage.cached_tokens == 2000
    assert bench.token_ids("three") == bench.model.generate(three, 4)


def test_rows_below_the_match_are_run_without_being_written() -> None:
    bench = hybrid()
    head = prompt_of(600)
    bench.ask("one", [*head, *prompt_of(50, 1)], max_tokens=1)
    before = len(bench.runner.plans)
    two = bench.ask("two", [*head, *prompt_of(50, 2)], max_tokens=4)
    assert bench.token_ids("two") == bench.model.generate(two, 4)
    sealed = [s for plan in bench.runner.plans[before:] for s in plan.segments if s.num_sealed > s.start]
    assert sealed and sealed[0].start == 0


def test_a_cancelled_prefill_leaves_its_last_chunk_border() -> None:
    bench = hybrid()
    bench.engine.submit(fake_submit("one", prompt_of(2000), max_tokens=4))
    for _ in range(3):
        bench.step()
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.run()
    assert kinds(bench) == [(Kind.BORDER, 768)]
    again = bench.ask("again", prompt_of(2000), max_tokens=4)
    assert bench.end("again").usage.cached_tokens == 768
    assert bench.token_ids("again") == bench.model.generate(again, 4)


def test_a_cancel_that_loses_little_takes_no_checkpoint() -> None:
    bench = hybrid(limits=PaceLimits(min_rows=64, min_idle_rows=128, max_rows=128))
    bench.engine.submit(fake_submit("one", prompt_of(2000), max_tokens=4))
    bench.step()
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.run()
    assert kinds(bench) == [] and not bench.engine.has_work


def test_a_preempted_turn_goes_on_from_where_it_was() -> None:
    bench = hybrid(num_pages=100, context_length=800)
    submits = [fake_submit(f"run{index}", prompt_of(300, index), max_tokens=120) for index in range(2)]
    for submit in submits:
        bench.engine.submit(submit)
    bench.run()
    assert bench.engine.stats().num_preempted > 0
    for submit in submits:
        assert bench.token_ids(submit.run_id) == bench.model.generate(submit, 120)


@pytest.mark.parametrize("num_states", [0, 1, 2])
def test_without_rows_for_states_everything_still_comes_to_its_end(num_states: int) -> None:
    bench = hybrid(num_states=num_states)
    submits = [fake_submit(f"run{index}", prompt_of(300, index % 2), max_tokens=9) for index in range(6)]
    for submit in submits:
        bench.engine.submit(submit)
    bench.run()
    for submit in submits:
        assert bench.token_ids(submit.run_id) == bench.model.generate(submit, 9)


def test_a_turn_that_fits_the_pool_fits_it_beside_what_it_could_begin_from() -> None:
    bench = hybrid(num_pages=16, context_length=128)
    head, whole = prompt_of(4), [*prompt_of(4), *prompt_of(123, 3)]
    bench.ask("beside", [*head, *prompt_of(80, 1)], max_tokens=1, retain="ephemeral")
    bench.ask("bare", whole[:20], max_tokens=1, retain="ephemeral")
    bench.ask("head", [*head, 0], max_tokens=1, retain="ephemeral", system_tokens=4)
    submit = bench.ask("whole", whole, max_tokens=1)
    assert bench.token_ids("whole") == bench.model.generate(submit, 1)


def test_a_last_call_leaves_nothing_that_only_it_could_use() -> None:
    bench = hybrid()
    bench.ask("one", prompt_of(600), max_tokens=4, agent="a", is_final=True, system_tokens=200)
    assert kinds(bench) == [(Kind.SYSTEM, 200)]
    bench.ask("two", prompt_of(600, 1), max_tokens=4, retain="ephemeral")
    assert kinds(bench) == [(Kind.SYSTEM, 200)]


def test_a_poisoned_turns_checkpoints_are_never_served() -> None:
    bench = hybrid()
    bench.engine.submit(fake_submit("bad", prompt_of(900), max_tokens=9, system_tokens=300))
    for _ in range(4):
        bench.step()
    assert kinds(bench)
    bench.runner.fault_of = lambda segment: "not a number"
    bench.step()
    bench.runner.fault_of = lambda segment: None
    assert isinstance(bench.end("bad"), Failed) and kinds(bench) == []
    good = bench.ask("good", prompt_of(900), max_tokens=4)
    assert bench.end("good").usage.cached_tokens == 0
    assert bench.token_ids("good") == bench.model.generate(good, 4)


def test_a_failed_step_ends_paths_that_were_waiting_for_their_save() -> None:
    bench = hybrid()
    bench.engine.submit(fake_submit("one", prompt_of(20), max_tokens=3))
    while "one" not in bench.events or not isinstance(bench.events["one"][-1], Finished):
        bench.step()
    bench.runner.fail_next = RuntimeError("gone")
    bench.step()
    assert not bench.engine.has_work and kinds(bench) == []
    assert bench.cache.stats().num_free == bench.num_pages


def test_the_next_call_of_an_agent_waits_the_step_that_keeps_its_state() -> None:
    bench = hybrid()
    first = fake_submit("one", prompt_of(300), max_tokens=3, agent="a")
    bench.engine.submit(first)
    while "one" not in bench.events or not isinstance(bench.events["one"][-1], Finished):
        bench.step()
    answer = bench.token_ids("one")
    bench.ask("two", [*prompt_of(300), *answer, 1, 2], max_tokens=3, agent="a")
    assert bench.end("two").usage.cached_tokens == 302
