"""Children of runs: from any point of a parent in any state, behind the parent's very tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import GatewayError
from gateway.runs.events import Resumed
from gateway.runs.spec import Budget, ForkPoint
from tests.conftest import ValkeyServer
from workers.messages import Paused, Tokens

from .chatting import assert_adds_up, chatting, ended, generated, reaches, result, spec
from .talking_engine import TalkingEngine, text_of
from .test_run_verbs import FIRST, answers
from .test_runs import stored


async def test_a_fork_of_a_running_parent_leaves_at_a_border_and_the_parent_goes_on(
    valkey: ValkeyServer,
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 6
        parent = await gate.runs.create(spec(session="s", agent="a"))
        await generated(gate, parent, 6)
        computed = engine.num_computed
        engine.seconds_per_token = 0.03  # it is still at work when the fork comes
        engine.allowed = 100
        forked = await gate.runs.fork(ForkPoint(run=parent), spec("Now you"), command="f")
        assert forked.recomputed_tokens == 0
        state = await ended(gate, parent)
        child = await ended(gate, forked.run_id)
        assert_adds_up(valkey, parent, state)
        assert_adds_up(valkey, forked.run_id, child)
        assert (await result(gate, parent)).text == FIRST
        assert [type(e) for e in stored(valkey, parent) if isinstance(e, Paused | Resumed)] == [
            Paused,
            Resumed,
        ]
        submits = [turn.submit for turn in engine.turns]
        first = next(s for s in submits if s.run_id == parent)
        begun = next(s for s in submits if s.run_id == forked.run_id)
        kept = b"".join(e.token_ids for e in stored(valkey, parent) if isinstance(e, Tokens))
        ids = (first.token_ids + kept)[: 4 * forked.parent_tokens]
        assert begun.token_ids.startswith(ids)
        assert begun.fork_tokens == forked.parent_tokens
        assert (begun.session, begun.parent) == ("s", "a")
        assert text_of(begun.token_ids[len(ids) :]).endswith(
            "user\nNow you<|im_end|>\n<|im_start|>assistant\n"
        )
        assert engine.num_computed - computed == len(begun.token_ids) // 4 - forked.parent_tokens
        assert (child.spec.parent_run, child.spec.tree) == (parent, parent)
        again = await gate.runs.fork(ForkPoint(run=parent), spec("Now you"), command="f")
        assert again.run_id == forked.run_id


async def test_a_fork_of_a_paused_run_leaves_it_paused(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 6
        parent = await gate.runs.create(spec())
        await generated(gate, parent, 6)
        await gate.runs.pause(parent)
        engine.allowed = None
        children = await asyncio.gather(
            *(gate.runs.fork(ForkPoint(run=parent), spec(f"child {n}")) for n in range(8))
        )
        for child in children:
            assert child.recomputed_tokens == 0
            assert (await ended(gate, child.run_id)).status == "completed"
        assert (await gate.runs.state(parent)).status == "paused"
        await gate.runs.resume(parent)
        state = await ended(gate, parent)
        assert_adds_up(valkey, parent, state)


async def test_forks_at_a_turns_end_and_at_a_token_of_an_ended_parent(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        parent = await gate.runs.create(spec(on_end="await_input"))
        await reaches(gate, parent, "input_required")
        at_turn = await gate.runs.fork(ForkPoint(run=parent, turn=1), spec("c1"))
        await gate.runs.respond(parent, text="more")
        await reaches(gate, parent, "input_required")
        earlier = await gate.runs.fork(ForkPoint(run=parent, turn=1), spec("c2"))
        assert earlier.parent_tokens == at_turn.parent_tokens
        await gate.runs.cancel(parent, seconds=5)
        await ended(gate, parent)
        late = await gate.runs.fork(ForkPoint(run=parent, turn=2), spec("c3"))
        assert late.parent_tokens > earlier.parent_tokens
        at_token = await gate.runs.fork(ForkPoint(run=parent, token=earlier.parent_tokens - 3), spec("c4"))
        now = await gate.runs.fork(ForkPoint(run=parent), spec("c5"))
        assert now.parent_tokens == late.parent_tokens
        for child in (at_turn, earlier, late, at_token, now):
            await ended(gate, child.run_id)
        prompts = [text_of(turn.submit.token_ids) for turn in engine.turns]
        assert sum("c3" in prompt and "more" in prompt for prompt in prompts) == 1
        assert not any("c2" in prompt and "more" in prompt for prompt in prompts)


@pytest.mark.parametrize("at", [{"turn": 3}, {"turn": 1}, {"token": 100_000}])
async def test_a_point_that_a_run_does_not_have_is_refused(valkey: ValkeyServer, at: dict[str, Any]) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 2
        parent = await gate.runs.create(spec())
        await generated(gate, parent, 2)
        with pytest.raises(GatewayError) as caught:
            await gate.runs.fork(ForkPoint(run=parent, **at), spec("child"))
        assert caught.value.status == 400
        engine.allowed = None
        await ended(gate, parent)


async def test_a_child_counts_against_its_parents_tree(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers), chatting(valkey.url) as gate:
        parent = await gate.runs.create(spec(tree_budget=Budget(output_tokens=5)))
        state = await ended(gate, parent)
        assert (state.status, state.ended is not None and state.ended.error) == ("failed", "budget_exceeded")
        assert state.usage.completion_tokens == 5
        child = await gate.runs.create(spec(parent_run=parent))
        state = await ended(gate, child)
        assert (state.status, state.usage.completion_tokens) == ("failed", 0)
