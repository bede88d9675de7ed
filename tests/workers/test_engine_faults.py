from __future__ import annotations

import threading

import pytest
from structlog.testing import capture_logs

from tests.fakes import FakeModel, FakeRunner, fake_submit
from tests.workers.engine_bench import Bench, prompt_of
from workers.messages import (
    Cancel,
    Cancelled,
    Failed,
    Finished,
    Sampling,
)
from workers.plan import Segment, StepPlan, StepResult


@pytest.mark.parametrize("num_steps", range(9))
def test_a_cancel_in_any_phase_ends_once_and_frees_all_pages(num_steps: int) -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("one", prompt_of(100), max_tokens=50))
    bench.engine.submit(fake_submit("two", prompt_of(100, 1), max_tokens=4))
    for _ in range(num_steps):
        bench.step()
    for _ in range(2):
        bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.engine.cancel(Cancel(run_id="unknown", attempt=1))
    bench.engine.cancel(Cancel(run_id="two", attempt=2))
    bench.run()
    assert isinstance(bench.end("one"), Cancelled)
    assert isinstance(bench.end("two"), Finished)
    assert "unknown" not in bench.events and bench.engine.stats().num_live_pages == 0


def test_a_cancelled_prefill_leaves_its_chunks_in_the_cache() -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("one", prompt_of(100)))
    bench.step()
    bench.step()
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.engine.submit(fake_submit("two", prompt_of(100)))
    bench.run()
    assert bench.end("two").usage.cached_tokens == 64


def test_a_turn_delivered_twice_runs_once() -> None:
    bench = Bench()
    for _ in range(2):
        bench.engine.submit(fake_submit("one", prompt_of(9)))
    bench.step()
    bench.engine.submit(fake_submit("one", prompt_of(9)))
    bench.run()
    assert len(bench.token_ids("one")) == 8
    assert bench.end("one")


def test_not_a_number_in_one_row_fails_that_turn_alone() -> None:
    bench = Bench()
    submits = [
        fake_submit(f"run{index}", [*prompt_of(40), index, index], max_tokens=12) for index in range(4)
    ]
    for submit in submits:
        bench.engine.submit(submit)

    def fault_of(segment: Segment) -> str | None:
        is_second = segment.worker == 1 and segment.row is not None and segment.row.step == 5
        return "not a number" if is_second else None

    bench.runner.fault_of = fault_of
    bench.run()
    failed = bench.end("run1")
    assert isinstance(failed, Failed) and failed.error == "row_fault" and not failed.retryable
    assert "not a number" in failed.message
    for index in (0, 2, 3):
        assert bench.token_ids(f"run{index}") == bench.model.generate(submits[index], 12)
    bench.runner.fault_of = lambda segment: None
    again = fake_submit("again", [*prompt_of(40), 1, 1], max_tokens=12)
    bench.engine.submit(again)
    bench.run()
    assert bench.token_ids("again") == bench.model.generate(again, 12)


def test_a_fault_in_a_prompt_chunk_takes_its_pages_out_of_the_cache() -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("bad", prompt_of(100)))
    bench.step()
    bench.runner.fault_of = lambda segment: "not a number"
    bench.step()
    bench.runner.fault_of = lambda segment: None
    assert isinstance(bench.end("bad"), Failed)
    good = fake_submit("good", prompt_of(100))
    bench.engine.submit(good)
    bench.run()
    assert bench.end("good").usage.cached_tokens == 0
    assert bench.token_ids("good") == bench.model.generate(good, 8)


def test_a_row_without_a_token_is_a_fault() -> None:
    bench = Bench()

    class Silent(FakeRunner):
        def run(self, plan: StepPlan) -> StepResult:
            result = super().run(plan)
            blank = [type(segment)(()) for segment in result.segments]
            return StepResult(tuple(blank), result.seconds)

    bench.runner.__class__ = Silent
    bench.engine.submit(fake_submit("one", prompt_of(9)))
    bench.run()
    assert isinstance(end := bench.end("one"), Failed) and end.error == "row_fault"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("anything")])
def test_a_failed_step_fails_its_turns_empties_the_tree_and_spares_the_waiting(error: Exception) -> None:
    bench = Bench(num_workers=2)
    submits = [fake_submit(f"run{index}", prompt_of(20, index), max_tokens=9) for index in range(3)]
    for submit in submits:
        bench.engine.submit(submit)
    for _ in range(3):
        bench.step()
    bench.runner.fail_next = error
    bench.step()
    for run_id in ("run0", "run1"):
        end = bench.end(run_id)
        assert isinstance(end, Failed) and (end.error, end.retryable) == ("step_failed", True)
    assert bench.runner.num_rebuilds == 1
    assert bench.cache.stats().num_free == bench.num_pages
    bench.run()
    assert bench.token_ids("run2") == bench.model.generate(submits[2], 9)
    again = fake_submit("again", prompt_of(20), max_tokens=9)
    bench.engine.submit(again)
    bench.run()
    assert bench.end("again").usage.cached_tokens == 0
    assert bench.token_ids("again") == bench.model.generate(again, 9)


def test_a_failed_step_and_a_broken_turn_are_logged_with_runs_and_told_without_details() -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("one", prompt_of(9)))
    bench.step()
    bench.runner.fail_next = RuntimeError("a secret of the library")
    with capture_logs() as lines:
        bench.step()
    (line,) = lines
    assert (line["event"], line["runs"], line["exc_info"]) == ("a step failed", ["one"], True)
    assert isinstance(end := bench.end("one"), Failed) and "secret" not in end.message


def test_a_turn_that_breaks_the_engines_checks_fails_alone() -> None:
    bench = Bench()
    bench.engine.submit(good := fake_submit("good", prompt_of(9)))
    broken = fake_submit("broken", prompt_of(9), sampling=Sampling(temperature=0.0, seed="7"))  # type: ignore[arg-type]
    with capture_logs() as lines:
        bench.engine.submit(broken)
    bench.run()
    assert isinstance(end := bench.end("broken"), Failed)
    assert (end.error, end.retryable) == ("planning_failed", True)
    assert [(line["run"], line["exc_info"]) for line in lines] == [("broken", True)]
    assert bench.token_ids("good") == bench.model.generate(good, 8)


def test_a_sampling_fault_leaves_the_shared_prefix_in_the_cache() -> None:
    bench = Bench()
    bench.runner.are_rows_spoiled = False
    bench.engine.submit(fake_submit("bad", prompt_of(100)))
    bench.engine.submit(neighbour := fake_submit("neighbour", [*prompt_of(96), 1], max_tokens=20))
    bench.runner.fault_of = lambda segment: "no such setting" if segment.worker == 0 and segment.row else None
    bench.run()
    assert isinstance(end := bench.end("bad"), Failed) and end.error == "row_fault"
    assert bench.end("neighbour").usage.cached_tokens == 96
    assert bench.token_ids("neighbour") == bench.model.generate(neighbour, 20)


def test_a_cancel_that_breaks_still_ends_the_turn() -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("one", [*prompt_of(9)], stop=("zzz",)))
    bench.step()

    def decode(token_ids: object) -> str:
        raise RuntimeError("broken")

    object.__setattr__(bench.rules.detokenizer, "decode", decode)
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.run()
    assert isinstance(end := bench.end("one"), Failed) and end.error == "cancel_failed"


def test_a_tokenizer_that_breaks_fails_the_turn_and_not_the_engine() -> None:
    bench = Bench(model=FakeModel(b"ab", end_every=0))
    bench.engine.submit(fake_submit("bad", prompt_of(9)))
    bench.engine.submit(good := fake_submit("good", prompt_of(9, 1)))

    def decode(token_ids: object) -> str:
        raise RuntimeError("broken")

    original = bench.rules.detokenizer.decode
    object.__setattr__(bench.rules.detokenizer, "decode", decode)
    bench.step()
    object.__setattr__(bench.rules.detokenizer, "decode", original)
    bench.run()
    assert isinstance(end := bench.end("bad"), Failed) and end.error == "row_fault"
    assert bench.token_ids("good") == bench.model.generate(good, 8)


def test_abandoned_turns_say_nothing_and_leave_their_prefix() -> None:
    bench = Bench()
    for index in range(6):
        bench.engine.submit(fake_submit(f"run{index}", prompt_of(40, index), max_tokens=50))
    for _ in range(5):
        bench.step()
    bench.events.clear()
    bench.engine.abandon()
    assert not bench.engine.has_work and bench.engine.step() == []
    bench.engine.check_integrity()
    assert bench.engine.stats().num_live_pages == 0
    bench.engine.submit(fake_submit("again", prompt_of(40)))
    bench.run()
    assert bench.end("again").usage.cached_tokens == 39


def test_an_engine_that_begins_again_counts_from_nothing() -> None:
    bench = Bench(num_pages=16, context_length=128)
    for index in range(4):
        bench.engine.submit(fake_submit(f"run{index}", prompt_of(60, index), max_tokens=30))
        bench.run()
    before = bench.engine.stats()
    assert before.num_evicted_pages and before.generated_tokens == 120
    bench.engine.abandon()
    after = bench.engine.stats()
    assert (after.num_evicted_pages, after.generated_tokens, after.num_steps) == (0, 0, 0)
    assert after.num_tree_pages == before.num_tree_pages


def test_a_stuck_step_is_seen_from_another_thread() -> None:
    bench = Bench()
    entered, leave = threading.Event(), threading.Event()

    class Stuck(FakeRunner):
        def run(self, plan: StepPlan) -> StepResult:
            entered.set()
            assert leave.wait(10)
            return super().run(plan)

    bench.engine.submit(fake_submit("one", prompt_of(9), max_tokens=2))
    bench.step()
    seen = [bench.engine.step_started_at]
    bench.runner.__class__ = Stuck
    thread = threading.Thread(target=bench.step)
    thread.start()
    assert entered.wait(10)
    seen.append(bench.engine.step_started_at)
    leave.set()
    thread.join(10)
    assert seen[0] is None and seen[1] is not None and bench.engine.step_started_at is None
    assert isinstance(bench.end("one"), Finished)
