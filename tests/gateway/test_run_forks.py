"""Children of runs: from any point of a parent in any state, behind the parent's very tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.errors import GatewayError
from gateway.runs.commands import ToolOutput
from gateway.runs.events import Resumed, TurnOpened
from gateway.runs.spec import Budget, ForkPoint
from gateway.runs.told import CallDropped, tell
from tests.conftest import ValkeyServer
from workers.messages import Paused, Tokens, run_events_key

from .chatting import CALL, assert_adds_up, chatting, ended, generated, reaches, result, spec
from .samples import TOOLS
from .talking_engine import TalkingEngine, answer_ids, text_of
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


async def test_turns_of_a_run_can_be_forked_as_long_as_its_ids_are_kept(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers), chatting(valkey.url) as gate:
        parent = await gate.runs.create(spec(on_end="await_input"))
        await reaches(gate, parent, "input_required")
        await gate.runs.respond(parent, text="more")
        await reaches(gate, parent, "input_required")
        await gate.runs.cancel(parent, seconds=5)
        await ended(gate, parent)
        ats = [ForkPoint(run=parent, turn=1), ForkPoint(run=parent, turn=2)]
        before = [(await gate.runs.fork(at, spec("early"))).parent_tokens for at in ats]
        with valkey.client() as client:  # as an hour after the end
            client.delete(run_events_key(parent))
        assert [(await gate.runs.fork(at, spec("late"))).parent_tokens for at in ats] == before
        with pytest.raises(GatewayError) as caught:
            await gate.runs.fork(ForkPoint(run=parent, turn=3), spec("none"))
        assert caught.value.status == 400


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


TALK = f"I look.\n{CALL}"


def looks(prompt: str) -> str:
    """Says a word and calls a tool, in its first turn."""
    return TALK if prompt.endswith("Look<|im_end|>\n<|im_start|>assistant\n") else "fine"


def behind(engine: TalkingEngine, run_id: str) -> str:
    """What follows the first answer's opening in a child's prompt."""
    (ids,) = [turn.submit.token_ids for turn in engine.turns if turn.submit.run_id == run_id]
    return text_of(ids).split("<|im_start|>assistant\n", 1)[1]


WITHOUT_CALL = "I look.\n<|im_end|>\n<|im_start|>user\nchild<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("where", ["running", "paused", "cancelled", "cut off", "cut off, by its turn"])
async def test_a_fork_within_an_open_tool_call_leaves_before_it_and_tells_so(
    valkey: ValkeyServer, where: str
) -> None:
    async with TalkingEngine(valkey.url, looks) as engine, chatting(valkey.url) as gate:
        half = len(answer_ids(TALK)) - 8
        is_cut = where.startswith("cut off")
        engine.allowed = None if is_cut else half
        budget = Budget(output_tokens=half) if is_cut else Budget()
        parent = await gate.runs.create(spec("Look", tools=True, budget=budget))
        if is_cut:
            await ended(gate, parent)
        else:
            await generated(gate, parent, half)
        if where == "paused":
            await gate.runs.pause(parent)
        elif where == "cancelled":
            await gate.runs.cancel(parent, seconds=5)
            await ended(gate, parent)
        engine.allowed = None
        at = ForkPoint(run=parent, turn=1 if where.endswith("turn") else None)
        forked = await gate.runs.fork(at, spec("child"), command="f")
        assert (forked.dropped_call, forked.recomputed_tokens) == ("read_file", 0)
        assert (await gate.runs.fork(at, spec("child"), command="f")).dropped_call == "read_file"
        child = await ended(gate, forked.run_id)
        assert child.status == "completed"
        assert behind(engine, forked.run_id) == WITHOUT_CALL
        told = [said for event in stored(valkey, forked.run_id) for said in tell(forked.run_id, event, child)]
        (dropped,) = [said for said in told if isinstance(said, CallDropped)]
        assert (dropped.run, dropped.name) == (forked.run_id, "read_file")
        if where == "paused":
            await gate.runs.resume(parent)
        if where in ("running", "paused"):  # its own call is still whole
            assert (await reaches(gate, parent, "input_required")).calls[0].arguments == '{"path": "/a"}'
            await gate.runs.cancel(parent, seconds=5)


async def test_a_fork_behind_a_whole_call_keeps_it(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, looks) as engine, chatting(valkey.url) as gate:
        parent = await gate.runs.create(spec("Look", tools=True))
        state = await reaches(gate, parent, "input_required")
        forked = await gate.runs.fork(ForkPoint(run=parent), spec("child"))
        assert forked.dropped_call is None
        assert behind(engine, forked.run_id).startswith(TALK)
        await gate.runs.respond(parent, [ToolOutput(call_id=state.calls[0].id, output="contents")])
        await ended(gate, parent)
        await ended(gate, forked.run_id)


async def test_a_text_behind_a_turn_that_was_cut_off_in_a_call_drops_the_call(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, looks) as engine, chatting(valkey.url) as gate:
        half = len(answer_ids(TALK)) - 8
        body = {"messages": [{"role": "user", "content": "Look"}], "tools": TOOLS, "max_tokens": half}
        engine.allowed = 4
        run_id = await gate.runs.create(spec(body=msgspec.json.encode(body)))
        await generated(gate, run_id, 4)
        await gate.runs.steer(run_id, "child", "next_turn")
        engine.allowed = None
        state = await ended(gate, run_id)
        assert (state.turn, state.status) == (2, "completed")
        (opened,) = [event for event in stored(valkey, run_id) if isinstance(event, TurnOpened)]
        assert opened.dropped_call == "read_file"
        assert engine.prompt_of(1).endswith(WITHOUT_CALL)
