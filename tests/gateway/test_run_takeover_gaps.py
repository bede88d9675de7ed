"""What a gateway that dies leaves half done between two writes, and what comes while the next takes over."""

from __future__ import annotations

import pytest

from gateway.runs.commands import ResumeRun
from gateway.runs.events import run_commands_key
from gateway.runs.run import Run
from tests.conftest import ValkeyServer
from workers.messages import (
    EVENT_FIELD,
    RUN_END_ID,
    Cancelled,
    Dispatched,
    RunEnded,
    Timings,
    Usage,
    encode,
    run_events_key,
)

from .chatting import assert_adds_up, chatting, ended, generated, spec
from .talking_engine import TalkingEngine
from .test_run_verbs import answers


async def test_a_turn_whose_gateway_died_between_its_dispatch_and_the_inbox_is_sent(
    valkey: ValkeyServer,
) -> None:
    async with TalkingEngine(valkey.url, answers, workers=1) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed = 1
            blocking = [await first.runs.create(spec("other")) for _ in range(2)]
            run_id = await first.runs.create(spec())
            assert (await first.runs.state(run_id)).attempt == 0
        with valkey.client() as client:
            dispatched = Dispatched(engine_id="e1", incarnation=engine.info.incarnation)
            client.xadd(run_events_key(run_id), {EVENT_FIELD: encode(dispatched)}, id="1-1")
        engine.allowed = None
        async with chatting(valkey.url, "g2") as second:
            for other in blocking:
                await ended(second, other)
            state = await ended(second, run_id)
            assert state.status == "completed"
            assert_adds_up(valkey, run_id, state)
        assert [turn.submit.attempt for turn in engine.turns if turn.submit.run_id == run_id] == [1]


async def test_a_turn_that_the_engine_has_in_its_line_is_not_computed_twice(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine:
        engine.is_starting = False
        async with chatting(valkey.url, "g1", kill=True) as first:
            run_id = await first.runs.create(spec())
            await engine.turn(0)
        async with chatting(valkey.url, "g2") as second:
            engine.is_starting = True
            assert (await ended(second, run_id)).status == "completed"
        assert len(engine.turns) == 1


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_run_whose_gateway_died_behind_its_end_is_not_listed_as_live(
    valkey: ValkeyServer, is_listed: bool
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed = 4
            run_id = await first.runs.create(spec(session="s"))
            await generated(first, run_id, 4)
            await first.runs.pause(run_id)
        with valkey.client() as client:
            cancelled = Cancelled(usage=Usage(), timings=Timings())
            for entry, event in (("9-1", cancelled), (RUN_END_ID, RunEnded(state="cancelled"))):
                client.xadd(run_events_key(run_id), {EVENT_FIELD: encode(event)}, id=entry)
            if not is_listed:
                client.delete(*client.keys("*note*"))
        async with chatting(valkey.url, "g2") as second:
            (note,) = await second.runs.keeper.store.index.get([run_id])
            assert note.status == "cancelled"


async def test_a_command_that_comes_while_a_run_is_taken_over_is_obeyed(
    valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed = 4
            run_id = await first.runs.create(spec())
            await generated(first, run_id, 4)
            await first.runs.pause(run_id)
        engine.allowed = None
        async with chatting(valkey.url, "g2") as second:
            take_over, key = second.runs.making.take_over, run_commands_key(run_id)

            async def late(run: Run) -> None:
                await second.bus.send(key, encode(ResumeRun(command="late")))
                await take_over(run)

            monkeypatch.setattr(second.runs.making, "take_over", late)
            assert (await ended(second, run_id)).status == "completed"
