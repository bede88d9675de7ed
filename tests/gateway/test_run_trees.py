"""What a tree may have together: each turn counts once, and siblings leave one another what they need not."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.runs.spec import Budget, ForkPoint
from tests.conftest import ValkeyServer
from workers.messages import run_events_key

from .chatting import assert_adds_up, chatting, ended, generated, reaches, result, spec
from .fake_engine import until
from .talking_engine import TalkingEngine, answer_ids
from .test_run_verbs import FIRST, answers


async def test_siblings_that_could_take_all_wait_for_what_the_others_leave(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.seconds_per_token = 0.01
        root = await gate.runs.create(spec(tree_budget=Budget(output_tokens=1000)))
        children = [await gate.runs.create(spec(f"child {n}", parent_run=root)) for n in range(3)]
        states = [await ended(gate, run_id) for run_id in (root, *children)]
        assert [state.status for state in states] == ["completed"] * 4
        total = await gate.runs.keeper.store.tree_usage.total(root)
        assert total.output_tokens == sum(state.usage.completion_tokens for state in states)


async def test_a_turn_that_was_cut_off_by_a_steer_counts_against_its_tree(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 5
        root = await gate.runs.create(spec(tree_budget=Budget(output_tokens=1000)))
        await generated(gate, root, 5)
        engine.allowed = None
        await gate.runs.steer(root, "something else")
        state = await ended(gate, root)
        total = await gate.runs.keeper.store.tree_usage.total(root)
        assert (total.prompt_tokens, total.output_tokens) == (
            state.usage.prompt_tokens,
            state.usage.completion_tokens,
        )


async def test_what_a_paused_turn_has_had_is_not_given_to_it_again(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 5
        root = await gate.runs.create(spec(tree_budget=Budget(output_tokens=7)))
        for num_tokens in (5, 6):
            await generated(gate, root, num_tokens)
            await gate.runs.pause(root)
            engine.allowed = 1 if num_tokens == 5 else None
            await gate.runs.resume(root)
        state = await ended(gate, root)
        assert (state.status, state.usage.completion_tokens) == ("failed", 7)
        assert_adds_up(valkey, root, state)
        assert FIRST.startswith((await result(gate, root)).text)


async def test_a_paused_run_leaves_its_siblings_what_it_has_not_used(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 5
        root = await gate.runs.create(spec(tree_budget=Budget(output_tokens=30)))
        await generated(gate, root, 5)
        await gate.runs.pause(root)
        engine.allowed = None
        child = await ended(gate, await gate.runs.create(spec("child", parent_run=root)))
        assert child.status == "completed"
        most = 30 - child.usage.completion_tokens
        await gate.runs.resume(root)
        await ended(gate, root)
        assert engine.turns[-1].submit.max_tokens == most


async def test_a_run_whose_stream_is_lost_leaves_its_siblings_what_it_has_not_used(
    valkey: ValkeyServer,
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        root = await gate.runs.create(spec(tree_budget=Budget(output_tokens=100)))
        had = (await ended(gate, root)).usage.completion_tokens
        engine.allowed = 3
        lost = await gate.runs.create(spec("lost", parent_run=root))
        await generated(gate, lost, 3)
        waiting = await gate.runs.create(spec("waiting", parent_run=root))
        engine.allowed_of[waiting] = None
        with valkey.client() as client:
            client.delete(run_events_key(lost))
        await gate.bus._look_for_gone_streams()  # as when the bus is back
        state = await ended(gate, waiting)
        assert state.status == "completed"
        total = await gate.runs.keeper.store.tree_usage.total(root)
        assert total.output_tokens == had + 3 + state.usage.completion_tokens


async def test_a_run_that_waits_for_its_tree_can_be_cancelled(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 1
        root = await gate.runs.create(spec(tree_budget=Budget(output_tokens=100)))
        await generated(gate, root, 1)
        child = await gate.runs.create(spec("child", parent_run=root))
        await asyncio.sleep(1)
        assert (await gate.runs.state(child)).status == "queued"
        assert len(engine.turns) == 1
        assert (await gate.runs.cancel(child, seconds=5)).status == "cancelled"
        engine.allowed = None
        await reaches(gate, root, "completed")


async def test_a_cancelled_run_is_not_blamed_for_a_prompt_that_its_tree_had_room_for(
    valkey: ValkeyServer,
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 1
        root = await gate.runs.create(spec(tree_budget=Budget(prompt_tokens=20)))
        await generated(gate, root, 1)
        assert (await gate.runs.cancel(root, seconds=5)).status == "cancelled"


async def test_a_trees_time_is_over_for_its_root_and_all_below_at_once(valkey: ValkeyServer) -> None:
    """Waiting for its caller, generating, paused or made by a fork; and those that come too late."""
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        root = await gate.runs.create(spec(tree_budget=Budget(wall_ms=4000), on_end="await_input"))
        ends = ((await reaches(gate, root, "input_required")).accepted_at or 0) + 4
        engine.allowed = 3
        below = await gate.runs.create(spec("child", parent_run=root))
        forked = (await gate.runs.fork(ForkPoint(run=root), spec("fork"))).run_id
        held = await gate.runs.create(spec("held", parent_run=below))
        await generated(gate, held, 3)
        await gate.runs.pause(held)
        for run_id in (root, below, forked, held):
            state = await ended(gate, run_id)
            assert state.ended is not None
            assert (state.status, state.ended.error) == ("failed", "budget_exceeded")
            assert "tree_budget.wall_ms is 4000" in state.ended.message
            assert_adds_up(valkey, run_id, state)
        assert time.time() >= ends
        late = await ended(gate, await gate.runs.create(spec("late", parent_run=below)))
        assert late.ended is not None and "tree_budget.wall_ms is 4000" in late.ended.message
        assert late.num_tokens == 0


async def test_siblings_read_no_more_prompts_together_than_their_tree_may(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.seconds_per_token = 0.02
        first = await ended(gate, await gate.runs.create(spec()))
        limit = 3 * first.prompt_tokens + 6
        root = await gate.runs.create(spec(tree_budget=Budget(prompt_tokens=limit)))
        runs = [root, *[await gate.runs.create(spec(parent_run=root)) for _ in range(8)]]
        states = [await ended(gate, run_id) for run_id in runs]
        assert [state.status for state in states].count("completed") == 3 == len(engine.turns) - 1
        for state in states:
            assert state.ended is not None
            if state.status != "completed":
                assert (state.status, state.ended.error) == ("failed", "budget_exceeded")
                assert f"tree_budget.prompt_tokens is {limit}" in state.ended.message
        total = await gate.runs.keeper.store.tree_usage.total(root)
        assert total.prompt_tokens == 3 * first.prompt_tokens, "what was refused was not read"


async def test_a_prompt_that_does_not_fit_leaves_its_tree_to_smaller_ones(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers), chatting(valkey.url) as gate:
        root = await gate.runs.create(spec(tree_budget=Budget(prompt_tokens=60)))
        large = await gate.runs.create(spec("word " * 100, parent_run=root))
        assert (await ended(gate, large)).status == "failed"
        small = await gate.runs.create(spec(parent_run=root))
        assert (await ended(gate, small)).status == "completed"


async def test_a_paused_turns_prompt_is_read_and_is_not_paid_for_twice(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        size = (await ended(gate, await gate.runs.create(spec()))).prompt_tokens
        engine.allowed = 3
        root = await gate.runs.create(spec(tree_budget=Budget(prompt_tokens=size)))
        await generated(gate, root, 3)
        await gate.runs.pause(root)
        engine.allowed = None
        child = await ended(gate, await gate.runs.create(spec(parent_run=root)))
        assert child.ended is not None and "tree_budget.prompt_tokens" in child.ended.message
        await gate.runs.resume(root)
        assert (await ended(gate, root)).status == "completed"
        total = await gate.runs.keeper.store.tree_usage.total(root)
        assert total.prompt_tokens == size


@pytest.mark.parametrize("num_children", [0, 2])
async def test_a_thought_ends_where_its_tree_has_thought_all_it_may(
    valkey: ValkeyServer, num_children: int
) -> None:
    thought, limit = f"<think>\n{FIRST * 40}</think>\n\nok", 100
    async with TalkingEngine(valkey.url, lambda prompt: thought) as engine, chatting(valkey.url) as gate:
        engine.seconds_per_token = 0.02
        root = await gate.runs.create(spec(tree_budget=Budget(thinking_tokens=limit)))
        children = [await gate.runs.create(spec("child", parent_run=root)) for _ in range(num_children)]
        states = [await ended(gate, run_id) for run_id in (root, *children)]
        for run_id, state in zip((root, *children), states, strict=True):
            assert state.ended is not None
            assert (state.status, state.ended.error) == ("failed", "budget_exceeded")
            assert f"tree_budget.thinking_tokens is {limit}" in state.ended.message
            assert state.num_tokens < len(answer_ids(thought)) / 2
            assert_adds_up(valkey, run_id, state)
        total = await gate.runs.keeper.store.tree_usage.total(root)
        kept = [(await result(gate, run_id)).thinking_tokens for run_id in (root, *children)]
        assert total.thinking_tokens == sum(kept) > limit
        if children:
            assert sum(kept) < len(kept) * limit, "they hear of each other while they think"
        assert total.output_tokens == sum(state.usage.completion_tokens for state in states)


async def test_a_tree_may_think_all_that_it_may(valkey: ValkeyServer) -> None:
    thought = f"<think>\n{FIRST}</think>\n\nok"
    async with TalkingEngine(valkey.url, lambda prompt: thought) as engine, chatting(valkey.url) as gate:
        alone = await gate.runs.create(spec())
        await ended(gate, alone)
        limit = 2 * (await result(gate, alone)).thinking_tokens
        engine.seconds_per_token = 0.02
        root = await gate.runs.create(spec(tree_budget=Budget(thinking_tokens=limit)))
        child = await gate.runs.create(spec("child", parent_run=root))
        assert [(await ended(gate, run_id)).status for run_id in (root, child)] == ["completed"] * 2
        over = await ended(gate, await gate.runs.create(spec("another", parent_run=root)))
        assert over.ended is not None
        assert f"tree_budget.thinking_tokens is {limit}" in over.ended.message


async def test_what_a_dead_gateway_had_counted_of_a_thought_counts_once(
    valkey: ValkeyServer,
) -> None:
    thought = f"<think>\n{FIRST}</think>\n\nok"
    async with TalkingEngine(valkey.url, lambda prompt: thought) as engine:
        async with chatting(valkey.url, kill=True) as gate:
            alone = await gate.runs.create(spec())
            await ended(gate, alone)
            limit = (await result(gate, alone)).thinking_tokens
            engine.allowed, engine.seconds_per_token = limit * 3 // 4, 0.03
            root = await gate.runs.create(spec(tree_budget=Budget(thinking_tokens=limit)))
            await generated(gate, root, limit * 3 // 4)
            assert (await gate.runs.keeper.store.tree_usage.total(root)).thinking_tokens
        async with chatting(valkey.url, "g2") as second:
            await until(lambda: second.runs.mine(root) is not None, 10)
            engine.allowed = None
            assert (await ended(second, root)).status == "completed"
            total = await second.runs.keeper.store.tree_usage.total(root)
            assert total.thinking_tokens == limit
