"""A chat call is a run too: it can be steered, paused and forked, and its client's stream goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.errors import Conflict
from gateway.runs.spec import ForkPoint
from tests.conftest import ValkeyServer
from workers.messages import RunEnded

from .chatting import assert_adds_up, chatting, ended, generated, result, spec
from .talking_engine import TalkingEngine
from .test_run_verbs import FIRST, answers
from .test_runs import Gateway


async def call(gate: Gateway) -> str:
    """A call as the HTTP side starts it: its body is not kept."""
    talk = gate.runs.talk
    assert talk is not None
    asked = spec()
    begun = await talk.begin(asked, None)
    return await gate.runs.start(begun.order, conversation=begun.conversation)


async def test_a_call_is_steered_paused_and_forked_as_a_run_is(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await call(gate)
        reading = asyncio.create_task(gate.collect(run_id))
        await generated(gate, run_id, 4)
        assert (await gate.runs.pause(run_id)).status == "paused"
        engine.allowed = 100
        child = await gate.runs.fork(ForkPoint(run=run_id), spec("child"))
        assert child.recomputed_tokens == 0
        engine.allowed = 3
        await gate.runs.resume(run_id)
        assert (await gate.runs.steer(run_id, "short")).applied == "now"
        engine.allowed = None
        state = await ended(gate, run_id)
        assert (state.status, state.turn) == ("completed", 2)
        assert_adds_up(valkey, run_id, state)
        assert isinstance((await reading)[-1].event, RunEnded)
        assert (await ended(gate, child.run_id)).status == "completed"


async def test_an_ended_call_can_be_forked_by_its_tokens(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, answers) as engine,
        chatting(valkey.url, "g1") as first,
        chatting(valkey.url, "g2") as second,
    ):
        run_id = await call(first)
        await ended(first, run_id)
        assert (await result(first, run_id)).text == FIRST
        child = await second.runs.fork(ForkPoint(run=run_id), spec("child"))
        await ended(second, child.run_id)
        assert engine.turns[1].submit.token_ids.startswith(engine.turns[0].submit.token_ids)


async def test_a_run_that_is_no_chat_has_one_turn(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        talk = gate.runs.talk
        assert talk is not None
        order = replace((await talk.begin(spec(), None)).order, tenant="")
        run_id = await gate.runs.start(order)
        await generated(gate, run_id, 4)
        with pytest.raises(Conflict) as caught:
            await gate.runs.steer(run_id, "no")
        assert caught.value.kind == "cannot_continue"
        engine.allowed = None
        await ended(gate, run_id)
