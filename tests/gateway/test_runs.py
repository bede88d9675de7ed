"""Runs over a real Valkey and an engine that does what the test says: exactly one end each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.bus import QUEUE_ENTRIES, Bus, BusLost
from gateway.callers.hints import Hints, Names
from gateway.errors import NoEngine, Overloaded, RunNotFound, UnknownModel
from gateway.flow.directory import Directory
from gateway.runs.caretaker import Caretaker
from gateway.runs.events import AnyEvent, decode
from gateway.runs.runs import Order, RunEvent, Runs
from tests.conftest import ValkeyServer
from workers.messages import (
    EVENT_FIELD,
    RUN_END_ID,
    RUNS_LIVE_KEY,
    Accepted,
    Cancelled,
    Dispatched,
    Failed,
    Finished,
    RunEnded,
    Sampling,
    Tokens,
    TurnEnd,
    gateway_lease_key,
    run_events_key,
)

from .fake_engine import FakeEngine, answer_at_once, one_token, only_start, until, wait_in_line


@dataclass
class Gateway:
    """One gateway's parts without HTTP."""

    bus: Bus
    directory: Directory
    runs: Runs
    caretaker: Caretaker

    async def order(self, agent: str = "") -> str:
        """Starts a run of three tokens."""
        return await self.runs.start(
            Order(
                engine=self.directory.find("model"),
                token_ids=b"\1\0\0\0\2\0\0\0\3\0\0\0",
                max_tokens=10,
                sampling=Sampling(),
                hints=Hints(Names(agent, agent)),
            )
        )

    async def collect(self, run_id: str) -> list[RunEvent]:
        """All events to the end."""
        async with asyncio.timeout(15):
            return [event async for event in self.runs.events(run_id)]

    def is_live(self, run_id: str) -> bool:
        """Whether this gateway follows the run and has not seen its end."""
        return run_id in {run.run_id for run in self.runs.local()}


@asynccontextmanager
async def gateway(
    url: str, name: str = "g1", *, max_waiting: int = 64, orphan_seconds: float = 30, kill: bool = False
) -> AsyncIterator[Gateway]:
    bus = Bus(url, name)
    await bus.start()
    directory = Directory(bus)
    runs = Runs(bus, directory, max_waiting=max_waiting)
    caretaker = Caretaker(bus, directory, runs, orphan_seconds=orphan_seconds)
    await directory.start()
    directory._trusted_from = 0.0  # the bus has been there all along
    await caretaker.start()
    try:
        yield Gateway(bus, directory, runs, caretaker)
    finally:
        await caretaker.stop()
        await directory.stop()
        if kill:
            runs._driver.is_closed = True
            await runs._tasks.end()
        await runs.stop(0)
        await bus.stop()


def stored(valkey: ValkeyServer, run_id: str) -> list[AnyEvent]:
    """What the stream itself holds."""
    with valkey.client() as client:
        entries: Any = client.xrange(run_events_key(run_id))
    found = [decode(fields[EVENT_FIELD]) for _, fields in entries]
    return [event for event in found if event is not None]


def assert_one_end(valkey: ValkeyServer, run_id: str) -> AnyEvent:
    """Exactly one terminal event and one run's end; returns the former."""
    events = stored(valkey, run_id)
    ends = [event for event in events if isinstance(event, TurnEnd)]
    assert len(ends) == 1, events
    assert [type(event) for event in events[-2:]] == [type(ends[0]), RunEnded]
    with valkey.client() as client:
        assert not client.sismember(RUNS_LIVE_KEY, run_id)
        assert 0 < int(client.ttl(run_events_key(run_id))) <= 3600
    return ends[0]


async def settled(gate: Gateway, run_id: str) -> None:
    await until(lambda: not gate.is_live(run_id), 15)


async def test_a_run_goes_from_accepted_to_one_end(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
        run_id = await gate.order()
        events = await gate.collect(run_id)
        await settled(gate, run_id)
        kinds = [type(event.event).__name__ for event in events]
        assert kinds == ["Accepted", "Dispatched", "Started", *["Tokens"] * 3, "Finished", "RunEnded"]
        assert events[0].id == "0-1"
        assert events[1].id == "1-1"
        assert events[-1].id == RUN_END_ID
        assert run_id.startswith("run-")
        assert len(run_id) == 36
        assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_a_run_ends_though_nobody_reads_it(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
        run_id = await gate.order()
        await settled(gate, run_id)
        assert_one_end(valkey, run_id)


async def test_a_listener_hears_each_turn_end_once(valkey: ValkeyServer) -> None:
    heard: list[str] = []
    async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
        gate.runs.on_turn_end.append(lambda run: heard.append(run.run_id))
        ids = [await gate.order() for _ in range(3)]
        for run_id in ids:
            await settled(gate, run_id)
    assert sorted(heard) == sorted(ids)


async def test_an_unknown_run_is_refused(valkey: ValkeyServer) -> None:
    async with gateway(valkey.url) as gate:
        with pytest.raises(RunNotFound):
            await gate.collect("run-none")
        with pytest.raises(NoEngine):
            gate.directory.find("model")


async def test_an_unknown_model_is_told_from_a_dead_engine(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url) as engine, gateway(valkey.url) as gate:
        with pytest.raises(UnknownModel, match="Available: model"):
            gate.directory.find("other")
        await engine.die()
        await gate.directory.refresh()
        with pytest.raises(NoEngine):
            gate.directory.find("model")


async def test_cancel_reaches_the_engine_and_may_be_repeated(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        turn = await engine.turn(0)
        await gate.runs.cancel(run_id)
        await gate.runs.cancel(run_id)
        await engine.cancel_of(turn)
        await engine.obey_cancel(turn)
        await settled(gate, run_id)
        await gate.runs.cancel(run_id)
        assert isinstance(assert_one_end(valkey, run_id), Cancelled)
        assert len(engine.cancels) == 1


async def test_completion_wins_over_a_later_cancel(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        turn = await engine.turn(0)
        await until(lambda: any(isinstance(event, Tokens) for event in stored(valkey, run_id)))
        await asyncio.gather(engine.finish(turn), gate.runs.cancel(run_id))
        await settled(gate, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_cancel_in_line_needs_no_engine(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, only_start, workers=1) as engine, gateway(valkey.url) as gate:
        ids = [await gate.order() for _ in range(3)]
        await engine.turn(1)
        assert gate.runs.num_waiting == 1
        await gate.runs.cancel(ids[2])
        await settled(gate, ids[2])
        assert isinstance(assert_one_end(valkey, ids[2]), Cancelled)
        assert len(engine.turns) == 2
        assert not engine.cancels


async def test_two_turns_a_worker_are_released_and_the_rest_one_by_one(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, only_start, workers=1) as engine, gateway(valkey.url) as gate:
        for agent in ("a", "a", "a", "a", "b"):
            await gate.order(agent)
        await engine.turn(1)
        await asyncio.sleep(0.05)
        assert len(engine.turns) == 2
        for number in range(3):
            await engine.finish(engine.turns[number])
            await engine.turn(number + 2)
        assert sorted(turn.submit.agent for turn in engine.turns) == ["a", "a", "a", "a", "b"]


async def test_too_many_waiting_are_refused_with_a_time(valkey: ValkeyServer) -> None:
    async with (
        FakeEngine(valkey.url, only_start, workers=1),
        gateway(valkey.url, max_waiting=2) as gate,
    ):
        results = await asyncio.gather(*(gate.order() for _ in range(6)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, Overloaded)]
        assert len(refused) == 2
        assert refused[0].retry_after is not None
        assert 1 <= refused[0].retry_after <= 120


async def test_a_reserved_place_counts_once_and_is_given_back(valkey: ValkeyServer) -> None:
    async with (
        FakeEngine(valkey.url, only_start, workers=1),
        gateway(valkey.url, max_waiting=1) as gate,
    ):
        engine = gate.directory.find("model")
        places = [gate.runs.reserve(engine) for _ in range(3)]  # two turns at the engine, one in line
        with pytest.raises(Overloaded):
            gate.runs.reserve(engine)
        order = Order(engine=engine, token_ids=b"\1\0\0\0", max_tokens=10, sampling=Sampling())
        for place in places[:2]:
            with place:
                await gate.runs.start(order, place)
        with pytest.raises(Overloaded):
            await gate.order()
        places[2].close()
        places[2].close()
        await gate.order()
        with pytest.raises(Overloaded):
            gate.runs.reserve(engine)


async def test_engine_lost_after_a_token_ends_in_a_clear_error(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        await engine.turn(0)
        await asyncio.sleep(0.05)
        await engine.die()
        async with asyncio.timeout(2):
            events = await gate.collect(run_id)
        await settled(gate, run_id)
        failed = assert_one_end(valkey, run_id)
        assert isinstance(failed, Failed)
        assert failed.error == "engine_lost"
        assert failed.retryable
        assert failed.usage.completion_tokens == 1
        assert events[-2].id == "2-1"


async def test_an_expired_lease_alone_is_noticed_within_five_seconds(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        await engine.turn(0)
        await asyncio.sleep(0.05)
        await engine.die(lease_stays=True)
        async with asyncio.timeout(5):
            await gate.collect(run_id)


async def test_engine_lost_before_a_token_is_sent_again_and_the_old_one_is_fenced(
    valkey: ValkeyServer,
) -> None:
    async with FakeEngine(valkey.url, only_start) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        old = await engine.turn(0)
        await engine.die()
        await asyncio.sleep(0.7)
        engine.script = answer_at_once
        await engine.restart()
        new = await engine.turn(1)
        assert (new.submit.attempt, new.submit.incarnation) == (2, 2)
        assert not await engine.write(old, Tokens(token_ids=b"", text="ghost"))
        events = await gate.collect(run_id)
        await settled(gate, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Finished)
        assert [e.event.text for e in events if isinstance(e.event, Tokens)] == ["a", "b", "c"]


async def test_an_end_that_the_engine_wrote_just_before_its_death_stands(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        turn = await engine.turn(0)
        await until(lambda: turn.sequence == 3)
        await asyncio.gather(engine.finish(turn), engine.die())
        await settled(gate, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_a_slow_follower_falls_back_and_misses_nothing(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, wait_in_line) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        turn = await engine.turn(0)
        other_id = await gate.order()
        other = await engine.turn(1)
        reading = gate.runs.events(run_id)
        first = await anext(reading)
        for number in range(3 * QUEUE_ENTRIES):
            await engine.write(turn, Tokens(token_ids=b"\1\0\0\0", text=str(number)))
        await engine.finish(turn)
        await engine.finish(other)
        await settled(gate, other_id)  # nobody else was held up
        await settled(gate, run_id)
        rest = [event async for event in reading]
        texts = [event.event.text for event in rest if isinstance(event.event, Tokens)]
        assert isinstance(first.event, Accepted)
        assert texts == [str(number) for number in range(3 * QUEUE_ENTRIES)]


async def test_many_runs_at_once_all_end(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
        ids = await asyncio.gather(*(gate.order(f"agent-{n % 5}") for n in range(40)))
        results = await asyncio.gather(*(gate.collect(run_id) for run_id in ids))
        for run_id in ids:
            await settled(gate, run_id)
            assert_one_end(valkey, run_id)
        assert all(isinstance(events[-1].event, RunEnded) for events in results)


async def test_a_new_gateway_follows_what_a_dead_one_left_and_a_client_resumes(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine:
        async with gateway(valkey.url, "g1", kill=True) as first:
            run_id = await first.order()
            turn = await engine.turn(0)
            await asyncio.sleep(0.05)
        async with gateway(valkey.url, "g2", orphan_seconds=1) as second:
            assert second.is_live(run_id)
            resumed = asyncio.create_task(second.collect(run_id))
            await asyncio.sleep(1.6)  # longer than an orphan may live
            await engine.finish(turn)
            events = await resumed
            assert [type(event.event).__name__ for event in events][-2:] == ["Finished", "RunEnded"]
            await settled(second, run_id)
            assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_an_orphan_that_nobody_resumes_is_cancelled(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine:
        async with gateway(valkey.url, "g1", kill=True) as first:
            run_id = await first.order()
            turn = await engine.turn(0)
            await asyncio.sleep(0.05)
        async with gateway(valkey.url, "g2", orphan_seconds=0.2) as second:
            await engine.cancel_of(turn)
            await engine.obey_cancel(turn)
            await settled(second, run_id)
            assert isinstance(assert_one_end(valkey, run_id), Cancelled)


async def test_a_run_that_a_dead_gateway_never_sent_is_ended(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, only_start, workers=1) as engine:
        async with gateway(valkey.url, "g1", kill=True) as first:
            ids = [await first.order() for _ in range(3)]
            await engine.turn(1)
        async with gateway(valkey.url, "g2") as second:
            await settled(second, ids[2])
            failed = assert_one_end(valkey, ids[2])
            assert isinstance(failed, Failed)
            assert failed.error == "gateway_lost"


async def test_a_living_gateway_keeps_its_runs(valkey: ValkeyServer) -> None:
    async with (
        FakeEngine(valkey.url, one_token) as engine,
        gateway(valkey.url, "g1") as first,
        gateway(valkey.url, "g2", orphan_seconds=0) as second,
    ):
        run_id = await first.order()
        turn = await engine.turn(0)
        await second.caretaker.sweep()
        await second.caretaker.sweep()
        assert not second.is_live(run_id)
        await second.runs.cancel(run_id)  # but anybody may cancel
        await engine.cancel_of(turn)
        await engine.obey_cancel(turn)
        await settled(first, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Cancelled)


async def test_stopping_ends_open_runs_with_a_clear_error(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        turn = await engine.turn(0)
        reading = asyncio.create_task(gate.collect(run_id))
        await asyncio.sleep(0.05)
        await gate.runs.stop(0.1)
        events = await reading
        failed = events[-2].event
        assert isinstance(failed, Failed)
        assert failed.error == "server_stopping"
        await engine.cancel_of(turn)
        assert not await engine.finish(turn)
        await settled(gate, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Failed)
        with pytest.raises(NoEngine):
            await gate.order()


async def test_a_bus_that_restarts_loses_nothing(own_valkey: ValkeyServer) -> None:
    async with FakeEngine(own_valkey.url, one_token) as engine, gateway(own_valkey.url) as gate:
        run_id = await gate.order()
        turn = await engine.turn(0)
        reading = asyncio.create_task(gate.collect(run_id))
        await asyncio.sleep(0.1)
        own_valkey.kill()
        await until(lambda: not gate.bus.available, 3)
        with pytest.raises(BusLost):
            await gate.order()
        await asyncio.sleep(3.2)  # every lease has expired meanwhile
        await asyncio.to_thread(own_valkey.start)
        async with asyncio.timeout(5):
            await gate.bus.wait_available()
        await asyncio.sleep(1.2)
        assert not reading.done()
        await engine.write(turn, Tokens(token_ids=b"\1\0\0\0", text="b"))
        await engine.finish(turn)
        events = await reading
        await settled(gate, run_id)
        assert [e.event.text for e in events if isinstance(e.event, Tokens)] == ["a", "b"]
        assert isinstance(assert_one_end(own_valkey, run_id), Finished)
        again = await gate.order()
        await engine.finish(await engine.turn(1))
        await settled(gate, again)


async def test_a_bus_that_returns_empty_ends_open_streams_with_a_clear_error(
    own_valkey: ValkeyServer,
) -> None:
    async with FakeEngine(own_valkey.url, one_token) as engine, gateway(own_valkey.url) as gate:
        run_id = await gate.order()
        await engine.turn(0)
        reading = asyncio.create_task(gate.collect(run_id))
        await asyncio.sleep(0.1)
        own_valkey.kill()
        own_valkey.forget()
        await asyncio.to_thread(own_valkey.start)
        events = await reading
        failed = events[-2].event
        assert isinstance(failed, Failed)
        assert failed.error == "run_lost"
        assert isinstance(events[-1].event, RunEnded)
        await settled(gate, run_id)


async def test_a_cancel_while_the_bus_is_away_is_sent_later(own_valkey: ValkeyServer) -> None:
    async with FakeEngine(own_valkey.url, one_token) as engine, gateway(own_valkey.url) as gate:
        run_id = await gate.order()
        turn = await engine.turn(0)
        await asyncio.sleep(0.05)
        own_valkey.kill()
        async with asyncio.timeout(4):
            await gate.runs.cancel(run_id)
        await asyncio.to_thread(own_valkey.start)
        await engine.cancel_of(turn)
        await engine.obey_cancel(turn)
        await settled(gate, run_id)
        assert isinstance(assert_one_end(own_valkey, run_id), Cancelled)


async def test_the_gateway_holds_a_lease_and_gives_it_back(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        async with gateway(valkey.url, "g7"):
            await asyncio.sleep(1.2)
            assert 0 < int(client.pttl(gateway_lease_key("g7"))) <= 3000
        assert client.exists(gateway_lease_key("g7")) == 0


async def test_dispatch_names_engine_and_incarnation(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url) as engine, gateway(valkey.url) as gate:
        events = await gate.collect(await gate.order())
        assert events[1].event == Dispatched(engine_id="e1", incarnation=1, reason="cold")
        with contextlib.suppress(IndexError):
            assert engine.turns[0].submit.incarnation == 1
