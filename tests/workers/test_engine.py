from __future__ import annotations

import msgspec
import pytest

from kvcache.cache import Cache
from tests.fakes import END_ID, FakeClock, FakeModel, FakeRunner, fake_rules, fake_submit
from tests.workers.engine_bench import PAGE_TOKENS, Bench, prompt_of
from workers.engine import Engine
from workers.errors import SettingsError
from workers.messages import (
    Failed,
    Finished,
    Progress,
    Sampling,
    Started,
    Submit,
    Tokens,
)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16, 17, 33, 64, 100])
def test_tokens_equal_the_naive_ones_cold_repeated_and_continued(num_tokens: int) -> None:
    bench = Bench()
    submit = fake_submit("cold", prompt_of(num_tokens), max_tokens=20)
    expected = bench.model.generate(submit, 20)
    bench.engine.submit(submit)
    bench.run()
    bench.engine.submit(fake_submit("again", prompt_of(num_tokens), max_tokens=20))
    bench.run()
    longer = fake_submit("longer", [*prompt_of(num_tokens), *expected, 5, 6], max_tokens=20)
    bench.engine.submit(longer)
    bench.run()
    assert bench.token_ids("cold") == bench.token_ids("again") == expected
    assert bench.token_ids("longer") == bench.model.generate(longer, 20)
    assert bench.end("again").usage.cached_tokens == num_tokens - 1
    # The last generated token was never fed: the next turn computes it and what follows.
    assert bench.end("longer").usage.cached_tokens == num_tokens + 20 - 1


def test_four_turns_in_company_give_what_each_gives_alone() -> None:
    bench = Bench()
    submits = [
        fake_submit(f"run{index}", prompt_of(10 + 17 * index, index), max_tokens=12) for index in range(7)
    ]
    for submit in submits:
        bench.engine.submit(submit)
    bench.run()
    for submit in submits:
        assert bench.token_ids(submit.run_id) == bench.model.generate(submit, 12)
        assert isinstance(end := bench.end(submit.run_id), Finished) and end.reason == "length"
    assert max(plan.num_decode_rows for plan in bench.runner.plans) == 4


def test_events_come_in_order_and_progress_tells_each_chunk() -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("one", prompt_of(70), max_tokens=3))
    bench.run()
    kinds = [type(event).__name__ for event in bench.events["one"]]
    assert kinds == ["Started", *["Progress"] * 3, *["Tokens"] * 3, "Finished"]
    progress = [event.processed_tokens for event in bench.events["one"] if isinstance(event, Progress)]
    assert progress == [32, 64, 70]


def test_timings_tell_queue_prefill_and_decode_apart() -> None:
    bench = Bench(num_workers=1)
    bench.engine.submit(fake_submit("first", prompt_of(8), max_tokens=3))
    bench.engine.submit(fake_submit("second", prompt_of(8, 1), max_tokens=3))
    bench.run()
    first, second = bench.end("first").timings, bench.end("second").timings
    assert first.queue_seconds == 0.0 and first.prefill_seconds == pytest.approx(0.066)
    assert first.decode_seconds == pytest.approx(0.1)
    assert second.queue_seconds == pytest.approx(0.166) and second.worker == 0


def test_a_waiting_turn_shares_what_the_prefill_before_it_published() -> None:
    bench = Bench()
    for index in range(4):
        bench.engine.submit(fake_submit(f"run{index}", [*prompt_of(96), index, index], max_tokens=4))
    bench.run()
    cached = [bench.end(f"run{index}").usage.cached_tokens for index in range(4)]
    assert cached == [0, 96, 96, 96]


def test_tenants_share_no_prefix() -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("ours", prompt_of(40), tenant="ours"))
    bench.run()
    bench.engine.submit(fake_submit("theirs", prompt_of(40), tenant="theirs"))
    bench.run()
    assert bench.end("theirs").usage.cached_tokens == 0


def test_the_end_token_is_neither_sent_nor_counted_nor_cached() -> None:
    bench = Bench(model=FakeModel(end_every=5))
    submit = fake_submit("one", prompt_of(9), max_tokens=100)
    expected = bench.model.generate(submit, 100)
    expected = expected[: expected.index(END_ID)]
    assert expected
    bench.engine.submit(submit)
    bench.run()
    assert bench.token_ids("one") == expected
    assert isinstance(end := bench.end("one"), Finished) and (end.reason, end.stop_text) == ("stop", None)
    bench.engine.submit(fake_submit("next", [*prompt_of(9), *expected, END_ID, 3], max_tokens=1))
    bench.run()
    assert bench.end("next").usage.cached_tokens == 9 + len(expected)


def test_ignore_eos_goes_on_and_keeps_the_end_token_out_of_the_text() -> None:
    bench = Bench(model=FakeModel(end_every=5))
    submit = fake_submit("one", prompt_of(9), max_tokens=30, ignore_eos=True)
    bench.engine.submit(submit)
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, 30)
    assert END_ID in bench.token_ids("one") and "<|end|>" not in bench.text("one")


def test_a_stop_token_id_ends_the_turn_like_the_end_token() -> None:
    bench = Bench()
    submit = fake_submit("one", prompt_of(9), max_tokens=60, stop_token_ids=(ord("c"),))
    expected = bench.model.generate(submit, 60)
    bench.engine.submit(submit)
    bench.run()
    assert bench.token_ids("one") == expected[: expected.index(ord("c"))]


@pytest.mark.parametrize("num_before", range(1, 9))
def test_a_stop_string_caps_tokens_and_text_where_it_is_complete(num_before: int) -> None:
    bench = Bench(model=FakeModel(b"abcdefgh", end_every=0))
    free = fake_submit("free", prompt_of(9), max_tokens=12)
    answer = bytes(bench.model.generate(free, 12)).decode()
    stop = answer[num_before : num_before + 3]
    bench.engine.submit(fake_submit("one", prompt_of(9), max_tokens=12, stop=("zzz", stop)))
    bench.run()
    end = bench.end("one")
    assert isinstance(end, Finished) and (end.reason, end.stop_text) == ("stop", stop)
    assert bench.text("one") == answer[: answer.index(stop)]
    assert end.usage.completion_tokens == answer.index(stop) + 3


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_tokens_sent_equal_usage_equal_cache_position(max_tokens: int) -> None:
    bench = Bench()
    submit = fake_submit("one", prompt_of(13), max_tokens=max_tokens)
    bench.engine.submit(submit)
    bench.run()
    assert bench.token_ids("one") == bench.model.generate(submit, max_tokens)
    pages = bench.cache.stats()
    assert pages.num_tree == -(-(13 + max_tokens - 1) // PAGE_TOKENS) and pages.num_live == 0


def test_text_held_for_a_stop_string_goes_out_at_the_limit() -> None:
    bench = Bench(model=FakeModel(b"a", end_every=0))
    bench.engine.submit(fake_submit("one", prompt_of(3), max_tokens=3, stop=("aaaa",)))
    bench.run()
    assert bench.text("one") == "aaa"
    assert isinstance(bench.events["one"][-2], Tokens) and bench.events["one"][-2].token_ids


def test_seeds_repeat_differ_and_ignore_the_neighbours() -> None:
    bench = Bench()
    for index, seed in enumerate([1, 2, 3, 1, None, None]):
        sampling = Sampling(temperature=1.0, seed=seed)
        bench.engine.submit(fake_submit(f"run{index}", prompt_of(9), max_tokens=12, sampling=sampling))
    bench.run()
    answers = [tuple(bench.token_ids(f"run{index}")) for index in range(6)]
    assert answers[0] == answers[3]
    assert len(set(answers)) == 5


@pytest.mark.parametrize("seed", [-1, 2**70, 0])
def test_any_integer_seed_is_taken(seed: int) -> None:
    bench = Bench()
    sampling = Sampling(temperature=1.0, seed=seed)
    for run_id in ("one", "two"):
        bench.engine.submit(fake_submit(run_id, prompt_of(9), sampling=sampling))
    bench.run()
    assert bench.token_ids("one") == bench.token_ids("two")


def test_logprobs_carry_the_tokens_own_bytes() -> None:
    bench = Bench(model=FakeModel("é".encode(), end_every=0))
    sampling = Sampling(temperature=0.0, top_logprobs=1)
    bench.engine.submit(fake_submit("one", prompt_of(9), max_tokens=6, sampling=sampling))
    bench.run()
    tokens = [event for event in bench.events["one"] if isinstance(event, Tokens)]
    assert [event.logprobs[0].chosen.token for event in tokens] == [
        bytes([token_id]) for token_id in bench.token_ids("one")
    ]
    assert all(event.logprobs[0].top for event in tokens)


CUT = msgspec.structs.replace(fake_submit("one", [1]), token_ids=b"12345")


@pytest.mark.parametrize(
    ("submit", "error"),
    [
        (fake_submit("one", prompt_of(256)), "context_exceeded"),
        (fake_submit("one", []), "invalid_request"),
        (fake_submit("one", [1, 257]), "invalid_request"),
        (fake_submit("one", [1], max_tokens=0), "invalid_request"),
        (fake_submit("one", [1], sampling=Sampling(logit_bias={257: 1.0})), "invalid_request"),
        (CUT, "invalid_request"),
    ],
)
def test_a_turn_that_cannot_be_accepted_ends_at_once(submit: Submit, error: str) -> None:
    bench = Bench()
    bench.engine.submit(submit)
    bench.run()
    end = bench.end("one")
    assert isinstance(end, Failed) and end.error == error and end.message
    assert not bench.runner.plans


def test_the_answer_is_capped_by_the_context() -> None:
    bench = Bench(context_length=40)
    bench.engine.submit(fake_submit("one", prompt_of(33), max_tokens=10_000))
    bench.run()
    assert isinstance(end := bench.end("one"), Finished)
    assert (end.reason, end.usage.completion_tokens) == ("length", 7)


def test_a_context_beyond_the_pool_is_refused_with_both_numbers() -> None:
    with pytest.raises(SettingsError, match=r"300.*64"):
        Engine(
            FakeRunner(8, FakeClock(), page_tokens=8), Cache(8, page_tokens=8), fake_rules(context_length=300)
        )


def test_stats_count_computed_cached_and_generated_tokens() -> None:
    bench = Bench()
    for run_id in ("one", "two"):
        bench.engine.submit(fake_submit(run_id, prompt_of(40), max_tokens=5))
        bench.run()
    counts = bench.engine.stats()
    assert (counts.prompt_tokens_computed, counts.prompt_tokens_cached) == (41, 39)
    assert (counts.generated_tokens, counts.num_steps) == (10, len(bench.runner.plans))
    assert (counts.num_running, counts.num_waiting, counts.num_live_pages) == (0, 0, 0)
    assert counts.num_free_pages + counts.num_tree_pages == bench.num_pages
    assert counts.prefill_tokens_per_second > 0 and counts.decode_tokens_per_second > 0


def test_an_agent_returns_to_its_last_worker_and_others_take_the_longest_free() -> None:
    bench = Bench()
    workers = []
    for index, agent in enumerate(["ann", "bob", "ann", "", "", "bob", "ann", ""]):
        bench.engine.submit(fake_submit(f"run{index}", prompt_of(5, index), agent=agent))
        bench.run()
        started = bench.events[f"run{index}"][0]
        assert isinstance(started, Started)
        workers.append(started.worker)
    assert workers == [0, 1, 0, 2, 3, 1, 0, 2]
