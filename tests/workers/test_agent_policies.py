"""The small policies below the scheduler: gaps, common prefixes, misses and the cost of rows by depth."""

from __future__ import annotations

from array import array

import pytest

from tests.fakes import fake_submit
from tests.workers.engine_bench import Bench, prompt_of
from workers.gaps import LONGEST_SECONDS, Gaps
from workers.messages import Finished, Missed
from workers.misses import Found, Histories, History, Restart, explain
from workers.pace import PaceLimits, RowCost
from workers.pins import AgentKey
from workers.sharing import common_length


def test_an_agent_stays_for_a_minute_of_its_tool_and_five_of_its_user() -> None:
    assert (Gaps().stay("search"), Gaps().stay("")) == (60.0, 300.0)


def test_stays_are_learned_by_tool_and_bounded() -> None:
    gaps = Gaps()
    for seconds in [2.0, 3.0, 4.0, 3.0] * 5:
        gaps.observe("search", seconds)
        gaps.observe("build", 100.0 * seconds)
    assert 3.0 < gaps.stay("search") < 6.0 and gaps.median("search") == pytest.approx(3.0, rel=0.2)
    assert gaps.stay("build") == LONGEST_SECONDS
    assert gaps.stay("other") == 60.0


@pytest.mark.parametrize("parting", [0, 1, 4095, 4096, 4097, 9999])
def test_common_prefixes_are_token_exact(parting: int) -> None:
    one = array("I", range(10_000))
    other = array("I", one)
    other[parting] = 2**32 - 1
    assert common_length(one, other) == common_length(other, one) == parting
    assert common_length(one, one[:parting]) == parting


HAD = array("I", range(10_000))


def found(prompt: array[int], num_cached: int, namespace: bytes = b"n") -> Found:
    return Found(namespace, prompt, num_cached, page_tokens=64, is_shown=True)


def missed(now: Found, *, was_published: bool = True) -> Missed:
    told = explain(Restart(common_length(HAD, now.prompt), History(b"n", HAD, was_published)), now)
    assert told is not None
    return told


def test_a_little_recomputed_is_no_miss() -> None:
    assert explain(Restart(len(HAD), History(b"n", HAD, was_published=True)), found(HAD, 9000)) is None


def test_prompts_that_part_where_reuse_ends_diverged() -> None:
    told = missed(found(HAD[:5000] + array("I", [7] * 5000), 4990))
    assert (told.cause, told.position, told.page, told.recomputed_tokens) == ("diverged", 5000, 78, 5010)
    assert told.before == tuple(range(5000, 5008)) and told.now == (7,) * 8


def test_equal_tokens_that_are_gone_were_evicted_or_never_published() -> None:
    told = missed(found(HAD, 640))
    assert (told.cause, told.position) == ("evicted", 640)
    assert missed(found(HAD, 640), was_published=False).cause == "never_published"


def test_another_namespace_is_named_whatever_the_tokens_are() -> None:
    assert missed(found(HAD, 0, b"other")).cause == "other_namespace"


def test_histories_stay_within_their_bytes_and_the_oldest_go() -> None:
    histories = Histories(max_bytes=100)
    keys = [AgentKey("", "s", str(index)) for index in range(4)]
    for key in keys:
        histories.remember(key, History(b"", array("I", range(10)), was_published=True))
    restarts = [histories.restart(key, array("I", range(5))) for key in keys]
    assert [restart is not None for restart in restarts] == [False, False, True, True]


def test_what_a_row_costs_is_learned_as_a_line_over_its_depth() -> None:
    cost = RowCost()
    for start in range(0, 60_000, 1000):
        cost.observe(start + 500, 1e-3 + 1e-8 * (start + 500))
    assert cost.at(60_000) == pytest.approx(1.6e-3, rel=0.05)
    assert cost.at(120_000) == pytest.approx(2.2e-3, rel=0.1)
    rows = cost.rows_within(0.3, 60_000)
    assert cost.of_rows(60_000, rows) == pytest.approx(0.3, rel=0.05)


def test_a_16k_prefill_keeps_three_decoding_workers_gaps_under_twice_the_budget() -> None:
    limits = PaceLimits(step_seconds=0.3, min_rows=32, min_idle_rows=128, max_rows=2048)
    bench = Bench(num_pages=512, page_tokens=64, context_length=32_000, num_states=8, limits=limits)
    bench.runner.keeps_plans = False
    bench.runner.row_seconds, bench.runner.depth_seconds = 2e-4, 1e-7
    for index in range(3):
        bench.engine.submit(fake_submit(f"short{index}", prompt_of(50, index), max_tokens=400))
    for _ in range(8):
        bench.step()
    bench.engine.submit(fake_submit("long", prompt_of(16_000, 5), max_tokens=1))
    gaps = []
    while not any(isinstance(event, Finished) for event in bench.events["long"]):
        before, num_before = bench.clock.now, len(bench.token_ids("short0"))
        bench.step()
        if len(bench.token_ids("short0")) > num_before:
            gaps.append(bench.clock.now - before)
    assert len(gaps) > 10 and max(gaps) < 2 * 0.3
