"""Two gateways, one run: verbs at the one that does not own it, and runs of a gateway that is gone."""

from __future__ import annotations

import asyncio

import pytest

from gateway.runs.commands import ToolOutput
from gateway.runs.making import IDS_GONE
from gateway.runs.spec import ForkPoint
from tests.conftest import ValkeyServer
from workers.messages import KEY_PREFIX, RunEnded, gateway_lease_key

from .chatting import assert_adds_up, chatting, ended, generated, reaches, result, spec
from .talking_engine import TalkingEngine
from .test_run_verbs import FIRST, SECOND, answers, calls
from .test_runs import Gateway


async def test_verbs_at_another_gateway_reach_the_owner(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, answers) as engine,
        chatting(valkey.url, "g1") as first,
        chatting(valkey.url, "g2") as second,
    ):
        engine.allowed = 4
        run_id = await first.runs.create(spec())
        await generated(second, run_id, 4)
        assert (await second.runs.pause(run_id)).status == "paused"
        engine.allowed = 100
        child = await second.runs.fork(ForkPoint(run=run_id), spec("child"))
        assert child.recomputed_tokens == 0
        assert first.is_live(child.run_id) or (await second.runs.state(child.run_id)).ended
        engine.allowed = 3
        assert (await second.runs.resume(run_id)).recomputed_tokens == 0
        steered = await second.runs.steer(run_id, "short", command="c")
        assert (steered.applied, steered.turn) == ("now", 2)
        engine.allowed = None
        state = await ended(first, run_id)
        assert_adds_up(valkey, run_id, state)
        assert (await result(second, run_id)).text == SECOND
        assert not second.is_live(run_id)


async def test_a_cancel_at_another_gateway_reaches_a_run_in_line(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, answers, workers=1) as engine,
        chatting(valkey.url, "g1") as first,
        chatting(valkey.url, "g2") as second,
    ):
        engine.allowed = 1
        ids = [await first.runs.create(spec()) for _ in range(3)]
        await engine.turn(1)
        assert (await second.runs.cancel(ids[2], seconds=5)).status == "cancelled"
        assert len(engine.turns) == 2
        engine.allowed = None
        for run_id in ids:
            await ended(first, run_id)


@pytest.mark.parametrize("phase", ["line", "engine", "decoding", "paused", "input_required", "second_turn"])
async def test_another_gateway_goes_on_with_a_dead_ones_run(valkey: ValkeyServer, phase: str) -> None:
    script = calls if phase in ("input_required", "second_turn") else answers
    async with TalkingEngine(valkey.url, script, workers=1) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed, engine.is_starting = 4, phase in ("decoding", "paused")
            if phase in ("input_required", "second_turn"):
                engine.allowed, engine.is_starting = None, True
            others = [await first.runs.create(spec("other")) for _ in range(2 if phase == "line" else 0)]
            run_id = await first.runs.create(spec(tools=phase in ("input_required", "second_turn")))
            if phase in ("decoding", "paused"):
                await generated(first, run_id, 4)
            if phase == "paused":
                await first.runs.pause(run_id)
            if phase in ("input_required", "second_turn"):
                state = await reaches(first, run_id, "input_required")
                outputs = [ToolOutput(call_id=state.calls[0].id, output="contents")]
            if phase == "second_turn":
                engine.allowed = 1
                await first.runs.respond(run_id, outputs)
                await reaches(first, run_id, "decoding")
            if phase == "engine":
                await engine.turn(0)
        engine.allowed, engine.is_starting = None, True
        async with chatting(valkey.url, "g2") as second:
            if phase == "paused":
                await asyncio.sleep(1)
                assert (await second.runs.state(run_id)).status == "paused"
                assert (await second.runs.resume(run_id)).recomputed_tokens == 0
            if phase == "input_required":
                await second.runs.respond(run_id, outputs)
            state = await ended(second, run_id)
            assert state.status == "completed"
            assert_adds_up(valkey, run_id, state)
            assert (await result(second, run_id)).text == (FIRST if script is answers else "done")
            for other in others:
                await ended(second, other)


async def fork_in_line(gate: Gateway, engine: TalkingEngine) -> tuple[str, list[str], str]:
    """An ended parent, runs that keep a one-worker engine from more, and the parent's fork behind them."""
    parent = await gate.runs.create(spec())
    await ended(gate, parent)
    engine.allowed = 1
    blocking = [await gate.runs.create(spec("other")) for _ in range(2)]
    child = (await gate.runs.fork(ForkPoint(run=parent), spec("child"))).run_id
    return parent, blocking, child


async def test_a_dead_gateways_fork_is_rebuilt_from_its_parents_kept_tokens(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers, workers=1) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            _, blocking, child = await fork_in_line(first, engine)
            assert (await first.runs.state(child)).status == "queued"
        engine.allowed = None
        async with chatting(valkey.url, "g2") as second:
            for run_id in [*blocking, child]:
                assert (await ended(second, run_id)).status == "completed"
        (prompt,) = [t.submit.token_ids for t in engine.turns if t.submit.run_id == child]
        assert prompt.startswith(engine.turns[0].submit.token_ids)


async def test_a_run_that_can_be_rebuilt_nowhere_is_rejected(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers, workers=1) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            parent, blocking, child = await fork_in_line(first, engine)
            assert (await first.runs.state(child)).attempt == 0
        with valkey.client() as client:
            client.delete(*(f"{KEY_PREFIX}run:{run_id}:ids" for run_id in (parent, child)))
        engine.allowed = None
        async with chatting(valkey.url, "g2") as second:
            state = await ended(second, child)
            assert (state.status, state.ended) == (
                "rejected",
                RunEnded(state="rejected", error="ids_gone", message=IDS_GONE),
            )
            kept = await result(second, child)
            assert kept.error is not None and (kept.state, kept.error.code) == ("rejected", "ids_gone")
            for run_id in blocking:
                await ended(second, run_id)
        assert not [turn for turn in engine.turns if turn.submit.run_id == child]


async def test_a_command_recorded_at_a_gateway_that_dies_is_obeyed_by_the_next(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed = 4
            run_id = await first.runs.create(spec())
            await generated(first, run_id, 4)
            await first.runs.steer(run_id, "then this", "next_turn")
        engine.allowed = None
        async with chatting(valkey.url, "g2") as second:
            state = await ended(second, run_id)
            assert (state.turn, state.status) == (2, "completed")
            assert (await result(second, run_id)).text == SECOND


async def test_a_sleeping_gateway_that_returns_makes_no_second_end(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, answers) as engine,
        chatting(valkey.url, "g1") as first,
        chatting(valkey.url, "g2") as second,
    ):
        engine.allowed = 4
        run_id = await first.runs.create(spec())
        await generated(first, run_id, 4)
        with valkey.client() as client:
            client.delete(gateway_lease_key("g1"))
            await second.caretaker.sweep()
        await asyncio.sleep(0.7)
        engine.allowed = None
        state = await ended(second, run_id)
        await ended(first, run_id)
        assert_adds_up(valkey, run_id, state)
        assert len(engine.turns) == 1
