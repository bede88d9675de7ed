from __future__ import annotations

import pytest

from tests.fakes import FakeModel, fake_submit
from tests.workers.engine_bench import PAGE_TOKENS, Bench, prompt_of
from workers.messages import Cancel, Finished, Started
from workers.pace import Pace, PaceLimits
from workers.plan import RowSampling, Segment, StepPlan
from workers.turn import open_turn

LIMITS = PaceLimits()


def plan_of(*, num_prefill: int = 0, num_decode: int = 0) -> StepPlan:
    submit = fake_submit("one", [1])
    row = RowSampling(submit.sampling, 0, 0, [1], [])
    segments = [Segment(worker, 0, [1], [0], row) for worker in range(num_decode)]
    if num_prefill:
        segments.append(Segment(9, 0, [1] * num_prefill, [0], None))
    return StepPlan((), tuple(segments))


def learned(base_seconds: float, row_seconds: float, limits: PaceLimits = LIMITS) -> Pace:
    pace = Pace(limits)
    for _ in range(20):
        pace.observe(plan_of(num_decode=3), base_seconds)
        pace.observe(plan_of(num_prefill=64, num_decode=3), base_seconds + 64 * row_seconds)
    return pace


def test_a_plan_counts_its_rows_by_kind() -> None:
    plan = plan_of(num_prefill=40, num_decode=3)
    assert (plan.num_rows, plan.num_prefill_rows, plan.num_decode_rows) == (43, 40, 3)


def test_before_anything_is_known_chunks_are_the_smallest() -> None:
    pace = Pace(LIMITS)
    assert (pace.chunk_rows(0), pace.chunk_rows(2)) == (128, 32)
    assert pace.predicted_step_seconds(plan_of(num_decode=1)) is None


def test_a_chunk_beside_decoding_turns_keeps_the_step_in_its_budget() -> None:
    pace = learned(0.02, 0.001)
    rows = pace.chunk_rows(3)
    assert rows == pytest.approx(100, abs=1)
    assert pace.predicted_step_seconds(plan_of(num_prefill=rows, num_decode=3)) <= 0.1201  # type: ignore[operator]


def test_a_budget_that_is_used_up_still_allows_the_smallest_chunk() -> None:
    assert learned(0.2, 0.003).chunk_rows(4) == 32


def test_alone_a_chunk_is_large_but_lets_a_cancel_through_in_a_second() -> None:
    assert learned(0.05, 0.0001).chunk_rows(0) == 2048
    assert learned(0.06, 0.002).chunk_rows(0) == pytest.approx(470, abs=1)
    assert learned(0.5, 0.05).chunk_rows(0) == 128


def test_one_quiet_step_does_not_allow_a_huge_chunk() -> None:
    pace = Pace(LIMITS)
    pace.observe(plan_of(num_decode=4), 0.1)
    pace.observe(plan_of(num_prefill=40, num_decode=4), 0.1)
    assert pace.chunk_rows(4) < 64


def test_no_stall_beyond_the_budget_while_a_long_prompt_comes_in() -> None:
    limits = PaceLimits(step_seconds=0.12, min_rows=16, min_idle_rows=32)
    bench = Bench(num_pages=256, context_length=1024, limits=limits)
    bench.engine.submit(fake_submit("short", prompt_of(10), max_tokens=60))
    for _ in range(6):
        bench.step()
    bench.engine.submit(fake_submit("long", prompt_of(900, 1), max_tokens=4))
    gaps = []
    while "long" not in bench.events or not isinstance(bench.events["long"][-1], Finished):
        before, num_before = bench.clock.now, len(bench.token_ids("short"))
        bench.step()
        if len(bench.token_ids("short")) > num_before:
            gaps.append(bench.clock.now - before)
    assert len(gaps) > 25 and max(gaps[1:]) <= 0.121


def test_chunks_end_on_page_borders_and_the_last_takes_the_rest() -> None:
    bench = Bench(limits=PaceLimits(min_rows=20, min_idle_rows=20, max_rows=20))
    bench.engine.submit(fake_submit("one", prompt_of(70), max_tokens=1))
    bench.run()
    assert [plan.segments[0].end for plan in bench.runner.plans] == [16, 32, 48, 64, 70]


def test_equal_row_bounds_make_a_fixed_grid() -> None:
    bench = Bench(limits=PaceLimits(min_rows=16, min_idle_rows=16, max_rows=16))
    bench.engine.submit(fake_submit("one", prompt_of(60), max_tokens=9))
    bench.engine.submit(fake_submit("two", prompt_of(60, 1), max_tokens=9))
    bench.run()
    ends = [plan.segments[-1].end for plan in bench.runner.plans if plan.num_prefill_rows]
    assert ends == [16, 32, 48, 60] * 2


def test_one_prefill_at_a_time_and_decode_rows_ride_along() -> None:
    bench = Bench()
    for index in range(5):
        bench.engine.submit(fake_submit(f"run{index}", prompt_of(60, index), max_tokens=30))
    bench.run()
    mixed = [plan for plan in bench.runner.plans if plan.num_decode_rows and plan.num_prefill_rows]
    assert mixed
    for plan in bench.runner.plans:
        assert [len(segment.token_ids) for segment in plan.segments[:-1]] == [1] * (len(plan.segments) - 1)


def test_page_shortage_preempts_the_newest_and_nobody_notices() -> None:
    bench = Bench(num_pages=24, context_length=24 * PAGE_TOKENS)
    submits = [fake_submit(f"run{index}", prompt_of(30, index), max_tokens=70) for index in range(4)]
    for submit in submits:
        bench.engine.submit(submit)
    bench.run()
    assert bench.engine.stats().num_preempted > 0
    for submit in submits:
        assert bench.token_ids(submit.run_id) == bench.model.generate(submit, 70)
        assert sum(isinstance(event, Started) for event in bench.events[submit.run_id]) == 1
        assert bench.end(submit.run_id).usage.cached_tokens <= 30
    assert bench.engine.stats().num_live_pages == 0


def test_a_preempted_turns_text_seed_and_stop_go_on() -> None:
    model = FakeModel("aé漢".encode(), end_every=0)
    bench = Bench(num_pages=24, context_length=24 * PAGE_TOKENS, model=model)
    submits = [
        fake_submit(f"run{index}", prompt_of(20, index), max_tokens=120, stop=("aaaaaa", "éaé"))
        for index in range(3)
    ]
    for submit in submits:
        bench.engine.submit(submit)
    bench.run()
    assert bench.engine.stats().num_preempted > 0
    for submit in submits:
        alone = Bench(model=bench.model)
        alone.engine.submit(submit)
        alone.run()
        assert bench.text(submit.run_id) == alone.text(submit.run_id)
        assert bench.token_ids(submit.run_id) == alone.token_ids(submit.run_id)


@pytest.mark.parametrize("num_prompt", [8, 9, 15, 16, 17, 24, 30, 31])
def test_a_turn_as_large_as_the_pool_runs_alone_cold_and_repeated(num_prompt: int) -> None:
    bench = Bench(num_pages=4, context_length=4 * PAGE_TOKENS)
    for attempt in range(3):
        submit = fake_submit(f"run{attempt}", prompt_of(num_prompt), max_tokens=100)
        bench.engine.submit(submit)
        bench.run()
        num_expected = 4 * PAGE_TOKENS - num_prompt
        assert bench.token_ids(submit.run_id) == bench.model.generate(submit, num_expected)
        assert isinstance(bench.end(submit.run_id), Finished)


def test_a_prompt_that_finds_no_pages_waits_without_a_worker_until_someone_ends() -> None:
    bench = Bench(num_pages=16, context_length=16 * PAGE_TOKENS)
    bench.engine.submit(fake_submit("large", prompt_of(60), max_tokens=20))
    bench.engine.submit(fake_submit("other", prompt_of(60, 1), max_tokens=20))
    for _ in range(6):
        bench.step()
    counts = bench.engine.stats()
    assert (counts.num_running, counts.num_waiting) == (1, 1) and not bench.events["other"]
    bench.run()
    assert isinstance(bench.end("other"), Finished)


def test_a_cancel_of_a_preempted_turn_counts_what_it_sent() -> None:
    bench = Bench(num_pages=24, context_length=24 * PAGE_TOKENS)
    for index in range(2):
        bench.engine.submit(fake_submit(f"run{index}", prompt_of(20, index), max_tokens=120))
    while bench.engine.has_work and not bench.engine.stats().num_preempted:
        bench.step()
    assert bench.engine.stats().num_waiting == 1
    bench.engine.cancel(Cancel(run_id="run1", attempt=1))
    bench.step()
    assert bench.end("run1").usage.completion_tokens > 64
    bench.run()
    assert isinstance(bench.end("run0"), Finished)


def test_a_turns_tokens_read_across_prompt_and_answer() -> None:
    turn = open_turn(fake_submit("one", [1, 2, 3]), Bench().rules, 0.0)
    turn.generated.extend([4, 5])
    for start in range(6):
        for end in range(start, 6):
            assert list(turn.tokens(start, end)) == [1, 2, 3, 4, 5][start:end]


@pytest.mark.parametrize(("num_decoding", "rows"), [(0, 48), (1, 47), (3, 45), (16, 48)])
def test_a_chunk_and_its_decode_rows_fill_the_kernels_multiple(num_decoding: int, rows: int) -> None:
    pace = Pace(PaceLimits(min_rows=50, min_idle_rows=50, row_multiple=16))
    assert pace.chunk_rows(num_decoding) == rows


def test_a_chunk_smaller_than_the_multiple_stays_as_it_is() -> None:
    assert Pace(PaceLimits(min_rows=8, row_multiple=16)).chunk_rows(3) == 8
