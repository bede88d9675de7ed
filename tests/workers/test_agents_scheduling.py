"""Agents that come back, fork, wait for tools and are cancelled: who goes first and what is kept for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.fakes import FakeModel, fake_submit
from tests.workers.engine_bench import Bench, prompt_of
from workers.agents import name_of
from workers.errors import IntegrityError
from workers.line import LineRules
from workers.messages import Cancel, CancelAgents, Cancelled, Finished
from workers.pace import PaceLimits
from workers.pins import AgentKey
from workers.turn import Turn

LARGE = PaceLimits(min_rows=512, min_idle_rows=2048, max_rows=2048)


def large(**changes: object) -> Bench:
    num_pages = changes.get("num_pages", 2048)
    assert isinstance(num_pages, int)
    settings = {
        "num_pages": 2048,
        "page_tokens": 64,
        "context_length": min(32768, num_pages * 64),
        "limits": LARGE,
        "num_states": 32,
    } | changes
    return Bench(**settings)  # type: ignore[arg-type]


def order_of_starts(bench: Bench) -> list[str]:
    """Run ids by the time they got a worker."""
    starts = [(bench.end(run_id).timings.queue_seconds, run_id) for run_id in bench.events]
    return [run_id for _, run_id in sorted(starts)]


def run_children(bench: Bench, head: Sequence[int], *, fork_tokens: int) -> None:
    """Eight that come at once, each with a tail of its own of 60 tokens."""
    for index in range(8):
        child = fake_submit(
            f"child{index}",
            [*head, *prompt_of(60, index + 1)],
            max_tokens=2,
            session="s",
            agent=f"child{index}",
            parent="parent",
            fork_tokens=fork_tokens,
        )
        bench.engine.submit(child)
    bench.run()


def test_eight_children_forked_at_once_cost_one_prefill() -> None:
    bench = large()
    bench.runner.keeps_plans = False
    head = prompt_of(20_000)
    parent = fake_submit("parent", head, max_tokens=2, session="s", agent="parent", expects="children")
    bench.engine.submit(parent)
    bench.run()
    run_children(bench, head, fork_tokens=20_000)
    assert bench.engine.stats().prompt_tokens_computed == 20_000 + 8 * 60
    assert bench.engine.stats().num_restored == 8
    assert all(bench.end(f"child{index}").usage.cached_tokens == 20_000 for index in range(8))


@pytest.mark.parametrize("fork_tokens", [0, 20_000])
def test_children_of_a_parent_that_nobody_ran_share_the_first_ones_prefill(fork_tokens: int) -> None:
    bench = large()
    bench.runner.keeps_plans = False
    head = prompt_of(20_000)
    run_children(bench, head, fork_tokens=fork_tokens)
    # The children's own tails begin alike by chance for some tokens at most.
    assert bench.engine.stats().prompt_tokens_computed <= 20_000 + 8 * 60
    assert bench.engine.stats().num_restored == 7


def test_a_subtrees_cancel_frees_everything_within_two_steps() -> None:
    bench = large()
    bench.runner.keeps_plans = False
    head = prompt_of(5000)
    names = ["parent", *(f"child{index}" for index in range(8))]
    for index, name in enumerate(names):
        parent = "" if name == "parent" else "parent"
        submit = fake_submit(
            name, [*head, index], max_tokens=500, session="s", agent=name, parent=parent, expects="search"
        )
        bench.engine.submit(submit)
    bench.engine.submit(fake_submit("other", prompt_of(100, 3), max_tokens=500, session="t", agent="parent"))
    for _ in range(8):
        bench.step()
    bench.engine.cancel_agents(CancelAgents(session="s", agent="parent"))
    bench.step()
    bench.step()
    counts = bench.engine.stats()
    assert all(isinstance(bench.end(name), Cancelled) for name in names)
    assert (counts.num_running, counts.num_waiting, counts.num_pinned_pages) == (1, 0, 0)
    assert counts.num_live_pages <= 3 + 100 // 64
    bench.run()
    assert isinstance(bench.end("other"), Finished)


@pytest.mark.parametrize("num_states", [None, 32])
def test_a_subtrees_cancel_leaves_what_was_there_before(num_states: int | None) -> None:
    bench = large(num_states=num_states)
    bench.runner.keeps_plans = False
    head = prompt_of(3000)
    bench.ask("other", [*head, *prompt_of(500, 8)], max_tokens=2, session="t", agent="other")
    before = bench.cache.stats()
    for round_number in range(2):
        for index, name in enumerate(["parent", "child1", "child2", "grandchild"]):
            parent = {"parent": "", "grandchild": "child1"}.get(name, "parent")
            prompt = [*head, *prompt_of(2000, index), *prompt_of(700, 9 + round_number)]
            run_id = f"{name}{round_number}"
            bench.ask(run_id, prompt, max_tokens=3, session="s", agent=name, parent=parent, expects="search")
    bench.engine.submit(
        fake_submit("last", prompt_of(900, 3), max_tokens=500, session="s", agent="child2", parent="parent")
    )
    for _ in range(3):
        bench.step()
    bench.engine.cancel_agents(CancelAgents(session="s", agent="parent"))
    bench.step()
    bench.step()
    after = bench.cache.stats()
    assert (after.num_free, after.num_tree) == (before.num_free, before.num_tree)
    assert (after.num_free_states, after.num_pinned_pages) == (before.num_free_states, 0)
    bench.ask("again", [*head, *prompt_of(500, 8), 1], max_tokens=2, session="t", agent="other")
    assert bench.end("again").usage.cached_tokens >= 3500, "what the others had is still there"


def test_pins_run_out_while_nobody_calls() -> None:
    bench = large()
    waits = [bench.engine.idle_seconds]
    bench.ask("one", prompt_of(4000), max_tokens=2, session="s", agent="a", expects="search")
    assert not bench.engine.has_work
    for seconds in (0.0, 59.0, 2.0):
        bench.clock.advance(seconds)
        waits.append(bench.engine.idle_seconds)
    assert waits == [None, pytest.approx(60.0, abs=0.5), pytest.approx(1.0, abs=0.5), 0.0]
    assert bench.engine.stats().num_pinned_pages > 60
    bench.engine.rest()
    assert (bench.engine.stats().num_pinned_pages, bench.engine.idle_seconds) == (0, None)
    bench.engine.check_integrity()
    bench.cache.clear()
    assert bench.cache.stats().num_free == bench.cache.stats().num_pages


def test_a_pin_that_would_stay_for_ever_is_noticed() -> None:
    bench = large()
    bench.ask("one", prompt_of(4000), max_tokens=2, session="s", agent="a", expects="search")
    bench.engine._scheduler.pins.next_expiry = float("inf")
    with pytest.raises(IntegrityError, match="pin"):
        bench.engine.check_integrity()


def test_a_subtree_is_found_by_agents_that_have_no_turn_any_more() -> None:
    bench = large()
    bench.ask("one", prompt_of(100), max_tokens=2, session="s", agent="middle", parent="top")
    bench.engine.submit(
        fake_submit("two", prompt_of(100, 1), max_tokens=500, session="s", agent="leaf", parent="middle")
    )
    bench.step()
    bench.engine.cancel_agents(CancelAgents(session="s", agent="top"))
    bench.run()
    assert isinstance(bench.end("two"), Cancelled)


def test_an_agent_whose_prefix_is_here_goes_before_those_that_came_first() -> None:
    bench = large(num_workers=1)
    first = bench.ask("first", prompt_of(3000), max_tokens=2, session="s", agent="a")
    bench.engine.submit(fake_submit("busy", prompt_of(50, 9), max_tokens=4))
    bench.step()
    bench.engine.submit(fake_submit("cold", prompt_of(6000, 1), max_tokens=2, session="s", agent="b"))
    answer = bench.model.generate(first, 2)
    bench.engine.submit(
        fake_submit("back", [*prompt_of(3000), *answer, 7], max_tokens=2, session="s", agent="a")
    )
    bench.run()
    assert bench.end("back").timings.queue_seconds < bench.end("cold").timings.queue_seconds


def test_the_shortest_uncached_work_goes_first_until_the_long_one_has_waited() -> None:
    bench = large(num_workers=1, num_states=None)
    bench.engine.submit(fake_submit("busy", prompt_of(50, 9), max_tokens=4))
    bench.step()
    bench.engine.submit(fake_submit("long", prompt_of(8000, 1), max_tokens=2))
    bench.engine.submit(fake_submit("short", prompt_of(100, 2), max_tokens=2))
    bench.run()
    assert bench.end("short").timings.queue_seconds < bench.end("long").timings.queue_seconds
    bench.engine.submit(fake_submit("busy2", prompt_of(50, 8), max_tokens=4))
    bench.step()
    bench.engine.submit(fake_submit("long2", prompt_of(2000, 3), max_tokens=2))
    bench.step()
    bench.clock.advance(150.0)
    bench.engine.submit(fake_submit("short2", prompt_of(100, 4), max_tokens=2))
    bench.run()
    assert bench.end("long2").timings.queue_seconds < 151 and "short2" in bench.events
    assert bench.clock.now - bench.end("short2").timings.queue_seconds > 0


def test_in_order_of_arrival_nobody_passes() -> None:
    bench = large(num_workers=1, num_states=None, line=LineRules(order="arrival"))
    bench.engine.submit(fake_submit("busy", prompt_of(50, 9), max_tokens=4))
    bench.engine.submit(fake_submit("long", prompt_of(8000, 1), max_tokens=2))
    bench.engine.submit(fake_submit("short", prompt_of(100, 2), max_tokens=2))
    bench.run()
    assert order_of_starts(bench) == ["busy", "long", "short"]


def crowd(bench: Bench, num_agents: int, num_tokens: int) -> None:
    """Agents that were here and are expected back."""
    for index in range(num_agents):
        bench.ask(
            f"crowd{index}",
            prompt_of(num_tokens, index),
            max_tokens=2,
            session="s",
            agent=f"crowd{index}",
            expects="search",
        )


def test_a_new_agent_waits_while_those_expected_back_fill_the_pool() -> None:
    bench = large(num_pages=256)
    crowd(bench, 3, 4000)
    started = bench.clock.now
    bench.ask("new", prompt_of(6000, 7), max_tokens=2, session="s", agent="new")
    waited = bench.end("new").timings.queue_seconds
    assert 10.0 < waited <= 300.0, "until those expected back are given up"
    assert bench.clock.now - started < 320.0


def test_a_first_call_that_shares_most_of_its_prompt_does_not_wait_for_room() -> None:
    bench = large(num_pages=256)
    crowd(bench, 3, 4000)
    for name, num_own in (("sibling", 1500), ("stranger", 4500)):
        prompt = [*prompt_of(4000), *prompt_of(num_own, num_own)]
        bench.engine.submit(fake_submit(name, prompt, max_tokens=2, session="s", agent=name))
    bench.run()
    assert bench.end("sibling").timings.queue_seconds == 0.0
    assert bench.end("stranger").timings.queue_seconds > 10.0


def test_nobody_is_held_for_longer_than_the_rule_says() -> None:
    bench = large(num_pages=256, line=LineRules(max_hold_seconds=20.0))
    crowd(bench, 3, 4000)
    bench.ask("new", prompt_of(6000, 7), max_tokens=2, session="s", agent="new")
    assert bench.end("new").timings.queue_seconds == pytest.approx(20.0, abs=0.5)


def test_nobody_is_held_where_nobody_else_is_expected() -> None:
    bench = large(num_pages=256)
    bench.ask("new", prompt_of(15_000, 7), max_tokens=2, session="s", agent="new")
    assert bench.end("new").timings.queue_seconds == 0.0


def test_a_cancel_that_makes_room_wakes_those_held_for_good() -> None:
    bench = large(num_pages=256)
    crowd(bench, 3, 4000)
    bench.engine.submit(fake_submit("new", prompt_of(6000, 7), max_tokens=20, session="t", agent="new"))
    bench.engine.step()
    assert bench.engine.rest_seconds > 10.0
    bench.engine.cancel_agents(CancelAgents(session="s"))
    while bench.engine.has_work:
        assert bench.engine.rest_seconds == 0.0
        bench.engine.step()


def test_while_an_agent_waits_for_its_tool_its_prefix_stays() -> None:
    bench = large(num_pages=200)
    first = bench.ask("one", prompt_of(4000), max_tokens=2, session="s", agent="a", expects="search")
    assert bench.engine.stats().num_pinned_pages > 60
    for index in range(4):
        bench.ask(f"noise{index}", prompt_of(5000, index + 1), max_tokens=2)
    answer = bench.model.generate(first, 2)
    bench.ask("back", [*prompt_of(4000), *answer, 3], max_tokens=2, session="s", agent="a")
    assert bench.end("back").usage.cached_tokens == 4001
    assert bench.engine.stats().num_pinned_pages == 0


def test_a_pin_ends_with_its_time() -> None:
    bench = large(num_pages=200)
    bench.ask("one", prompt_of(4000), max_tokens=2, session="s", agent="a", expects="search")
    bench.clock.advance(61.0)
    bench.ask("two", prompt_of(10, 3), max_tokens=2)
    assert bench.engine.stats().num_pinned_pages == 0


def test_a_running_turn_gets_pinned_pages_before_anyone_gives_way() -> None:
    bench = large(num_pages=100, context_length=6400)
    bench.ask("one", prompt_of(3000), max_tokens=2, session="s", agent="a", expects="search")
    bench.ask("two", prompt_of(4500, 1), max_tokens=2)
    assert bench.engine.stats().num_preempted == 0 and bench.engine.stats().num_pinned_pages == 0
    assert isinstance(bench.end("two"), Finished)


def test_a_parent_is_kept_until_its_children_are_done() -> None:
    bench = large()
    bench.ask("parent", prompt_of(4000), max_tokens=2, session="s", agent="parent")
    assert bench.engine.stats().num_pinned_pages == 0
    bench.engine.submit(
        fake_submit("child", prompt_of(100, 1), max_tokens=20, session="s", agent="child", parent="parent")
    )
    bench.step()
    assert bench.engine.stats().num_pinned_pages > 60
    bench.run()
    assert bench.engine.stats().num_pinned_pages == 0


def test_a_prefix_that_is_held_for_two_reasons_stays_until_both_are_gone() -> None:
    bench = large()
    bench.ask("parent", prompt_of(4000), max_tokens=2, session="s", agent="parent", expects="Task")
    pinned = bench.engine.stats().num_pinned_pages
    bench.ask(
        "child", prompt_of(100, 1), max_tokens=2, session="s", agent="child", parent="parent", is_final=True
    )
    assert bench.engine.stats().num_pinned_pages == pinned > 60, "its children are done, the tool is not"
    bench.clock.advance(61.0)
    bench.ask("other", prompt_of(10, 3), max_tokens=2)
    assert bench.engine.stats().num_pinned_pages == 0


def test_retain_pin_outlasts_the_tools_time_and_ends_with_the_session() -> None:
    bench = large()
    bench.ask("one", prompt_of(4000), max_tokens=2, session="s", agent="a", retain="pin")
    bench.clock.advance(1800.0)
    bench.ask("two", prompt_of(10, 3), max_tokens=2)
    assert bench.engine.stats().num_pinned_pages > 60
    bench.engine.cancel_agents(CancelAgents(session="s"))
    assert bench.engine.stats().num_pinned_pages == 0


@pytest.mark.parametrize("is_final", [False, True])
def test_a_long_prefill_makes_room_for_an_agent_that_is_at_home(is_final: bool) -> None:
    bench = large(num_workers=1)
    first = bench.ask("first", prompt_of(3000), max_tokens=2, session="s", agent="a")
    long = fake_submit("long", prompt_of(20_000, 1), max_tokens=2, session="s", agent="b", is_final=is_final)
    bench.engine.submit(long)
    bench.step()
    answer = bench.model.generate(first, 2)
    bench.engine.submit(
        fake_submit("back", [*prompt_of(3000), *answer, 7], max_tokens=2, session="s", agent="a")
    )
    bench.run()
    assert bench.engine.stats().num_preempted == 1
    assert bench.end("back").timings.queue_seconds < 6.0
    assert bench.token_ids("long") == bench.model.generate(long, 2)
    assert bench.engine.stats().prompt_tokens_computed == 3000 + 20_000 + 2, (
        "the prefill went on where it was"
    )


def test_a_prefill_is_not_interrupted_by_one_that_needs_it() -> None:
    bench = large(num_workers=1)
    head = prompt_of(20_000, 1)
    bench.ask("first", head[:1500], max_tokens=2, session="s", agent="a")
    bench.engine.submit(fake_submit("long", head, max_tokens=2, session="s", agent="b"))
    bench.step()
    bench.engine.submit(fake_submit("back", [*head[:3500], 7], max_tokens=2, session="s", agent="a"))
    bench.run()
    assert bench.engine.stats().num_preempted == 0


def test_a_killed_producer_leaves_its_chunks_to_those_that_waited() -> None:
    bench = large(num_workers=1)
    head = prompt_of(9000)
    for index in range(3):
        bench.engine.submit(fake_submit(f"run{index}", [*head, index], max_tokens=2, agent=f"agent{index}"))
    for _ in range(3):
        bench.step()
    bench.engine.cancel(Cancel(run_id="run0", attempt=1))
    bench.run()
    assert bench.engine.stats().prompt_tokens_computed <= 9000 + 3
    assert all(isinstance(bench.end(f"run{index}"), Finished) for index in (1, 2))


def test_a_miss_is_explained_by_where_the_prompts_part() -> None:
    bench = large()
    bench.ask("one", prompt_of(5000), max_tokens=2, session="s", agent="a")
    changed = [*prompt_of(3000), *prompt_of(2000, 5)]
    bench.ask("two", changed, max_tokens=2, session="s", agent="a", explain=True)
    missed = bench.started("two").missed
    assert missed is None or missed.cause in ("diverged", "evicted")
    bench.ask("three", prompt_of(5000, 9), max_tokens=2, session="s", agent="a", explain=True)
    missed = bench.started("three").missed
    assert missed is not None and (missed.cause, missed.position) == ("diverged", 0)
    assert missed.before == tuple(changed[:8]) and missed.now == tuple(prompt_of(5000, 9)[:8])
    assert bench.engine.stats().missed_tokens["diverged"] >= missed.recomputed_tokens > 4900


def test_a_miss_because_of_eviction_says_so_without_tokens() -> None:
    bench = large(num_pages=120, context_length=7000)
    bench.ask("one", prompt_of(5000), max_tokens=2, session="s", agent="a")
    bench.ask("noise", prompt_of(6500, 2), max_tokens=2)
    bench.ask("two", [*prompt_of(5000), 1], max_tokens=2, session="s", agent="a")
    missed = bench.started("two").missed
    assert missed is not None and missed.cause == "evicted" and not missed.before
    assert missed.page == missed.position // 64


def test_a_miss_after_a_failed_turn_says_that_nothing_was_kept() -> None:
    bench = large()
    bench.engine.submit(fake_submit("one", prompt_of(5000), max_tokens=2, session="s", agent="a"))
    bench.runner.fault_of = lambda segment: "not a number" if segment.end > 4000 else None
    bench.run()
    bench.runner.fault_of = lambda segment: None
    bench.ask("two", prompt_of(5000), max_tokens=2, session="s", agent="a")
    missed = bench.started("two").missed
    assert missed is not None and missed.cause == "never_published"


def test_a_prompt_that_left_most_behind_gives_up_the_old_path() -> None:
    bench = large(num_pages=256)
    bench.ask("one", prompt_of(9000), max_tokens=2, session="s", agent="a")
    bench.ask("two", prompt_of(2000, 3), max_tokens=2, session="s", agent="a")
    bench.ask("three", prompt_of(7000, 4), max_tokens=2, session="s", agent="b")
    stats = bench.cache.stats()
    assert stats.num_evicted_retired == stats.num_evicted > 0


class Oracle:
    """Proposes what the model will say, and then something else."""

    def __init__(self, num_right: int, num_wrong: int) -> None:
        self.bench: Bench | None = None
        self.num_right = num_right
        self.num_wrong = num_wrong

    def propose(self, turn: Turn) -> Sequence[int]:
        assert self.bench is not None
        submit = fake_submit("", turn.prompt)
        num_said = len(turn.generated)
        right = self.bench.model.generate(submit, num_said + self.num_right)[num_said:]
        return [*right, *[0] * self.num_wrong]


@pytest.mark.parametrize("num_states", [None, 8])
@pytest.mark.parametrize(("num_right", "num_wrong"), [(0, 3), (3, 0), (3, 2), (40, 0)])
def test_proposed_tokens_change_nothing_but_the_number_of_steps(
    num_right: int, num_wrong: int, num_states: int | None
) -> None:
    drafter = Oracle(num_right, num_wrong)
    bench = Bench(drafter=drafter, num_states=num_states)
    drafter.bench = bench
    submit = bench.ask("one", prompt_of(20), max_tokens=30, stop=("zz",))
    assert bench.token_ids("one") == bench.model.generate(submit, 30)
    num_decoding = sum(plan.num_decode_rows > 0 for plan in bench.runner.plans)
    assert num_decoding <= -(-29 // (num_right + 1)) + 1
    answer = bench.model.generate(submit, 30)
    after = bench.ask("next", [*prompt_of(20), *answer, 5], max_tokens=3)
    assert bench.end("next").usage.cached_tokens == 49
    assert bench.token_ids("next") == bench.model.generate(after, 3)


@pytest.mark.parametrize("num_states", [None, 8])
def test_an_end_among_proposed_tokens_caps_what_is_kept(num_states: int | None) -> None:
    drafter = Oracle(12, 0)
    bench = Bench(drafter=drafter, num_states=num_states, model=FakeModel(b"abcdefgh", end_every=0))
    drafter.bench = bench
    submit = fake_submit("one", prompt_of(20), max_tokens=30)
    answer = bench.model.generate(submit, 30)
    stop = bytes(answer[4:7]).decode()
    bench.ask("one", prompt_of(20), max_tokens=30, stop=(stop,))
    assert bench.token_ids("one") == answer[:7]
    after = bench.ask("next", [*prompt_of(20), *answer[:7], 5], max_tokens=3)
    assert bench.token_ids("next") == bench.model.generate(after, 3)


def test_a_child_of_two_parents_in_turn_is_counted_by_the_one_it_came_for() -> None:
    bench = large()
    for parent in ("p", "q"):
        bench.ask(parent, prompt_of(4000, len(parent)), max_tokens=2, session="s", agent=parent)
    bench.engine.submit(
        fake_submit("c1", prompt_of(100, 1), max_tokens=20, session="s", agent="c", parent="p")
    )
    bench.step()
    pinned = bench.engine.stats().num_pinned_pages
    assert pinned > 0
    bench.engine.submit(
        fake_submit("c2", prompt_of(100, 1), max_tokens=2, session="s", agent="c", parent="q")
    )
    bench.run()
    assert bench.engine.stats().num_pinned_pages == 0, "p's child is done, q had none of its own"


def test_a_cancelled_call_waits_for_no_tool() -> None:
    bench = large()
    bench.engine.submit(
        fake_submit("one", prompt_of(4000), max_tokens=50, session="s", agent="a", expects="Task")
    )
    while not bench.token_ids("one"):
        bench.step()
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.run()
    assert bench.engine.stats().num_pinned_pages == 0


def test_names_that_hold_separators_are_still_two_agents() -> None:
    assert name_of(AgentKey("a", "b:1", "c")) != name_of(AgentKey("a", "b", "1:c"))
    assert name_of(AgentKey("a", "b\x1fc", "d")) != name_of(AgentKey("a\x1fb", "c", "d"))


def test_a_cancel_that_names_nobody_ends_nobody() -> None:
    bench = large()
    bench.engine.submit(fake_submit("one", prompt_of(100), max_tokens=4))
    bench.step()
    bench.engine.cancel_agents(CancelAgents(session="", agent=""))
    bench.run()
    assert isinstance(bench.end("one"), Finished)
