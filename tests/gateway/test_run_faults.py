"""A run whose step failed half-way, whose stream has a hole or whose engine dies again still ends, once."""

from __future__ import annotations

import asyncio

import pytest

from gateway.runs.run import Run
from tests.conftest import ValkeyServer
from tests.cutting_proxy import cutting_proxy
from workers.messages import (
    RUNS_LIVE_KEY,
    EngineStats,
    Failed,
    Finished,
    RunEnded,
    Tokens,
    encode,
    engine_key,
    run_events_key,
)

from .fake_engine import FakeEngine, answer_at_once, one_token, only_start, until
from .test_runs import assert_one_end, gateway, settled

TOKEN = Tokens(token_ids=b"\1\0\0\0", text="x")


@pytest.mark.parametrize("word", [b"XRANGE", b"MULTI", b":inbox"])
async def test_a_connection_that_fails_in_the_middle_of_a_dispatch_leaves_no_run_waiting(
    own_valkey: ValkeyServer, word: bytes
) -> None:
    with cutting_proxy(own_valkey.socket) as proxy:
        async with FakeEngine(own_valkey.url), gateway(proxy.url) as gate:
            proxy.cut_at(word)
            run_id = await gate.order()
            await settled(gate, run_id)
            assert proxy.num_cuts == 1
            assert isinstance(assert_one_end(own_valkey, run_id), Finished)


async def test_a_run_that_was_released_but_never_sent_is_sent(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
            stats = EngineStats(incarnation=1, ready=False)
            client.hset(engine_key("e1"), "stats", encode(stats))
            await gate.directory.refresh()
            run_id = await gate.order()
            client.hset(engine_key("e1"), "stats", encode(EngineStats(incarnation=1, ready=True)))
            await gate.directory.refresh()
            assert list(gate.runs._places.releases())  # and the dispatch is lost
            await settled(gate, run_id)
            assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_a_turn_that_kills_its_engine_twice_is_not_sent_a_third_time(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, only_start) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        for number in range(2):
            await engine.turn(number)
            await engine.die()
            await asyncio.sleep(0.6)
            await engine.restart()
        await settled(gate, run_id)
        failed = assert_one_end(valkey, run_id)
        assert isinstance(failed, Failed) and failed.error == "engine_lost"
        assert len(engine.turns) == 2


async def test_a_failed_connection_does_not_use_up_the_second_try(own_valkey: ValkeyServer) -> None:
    with cutting_proxy(own_valkey.socket) as proxy:
        async with FakeEngine(own_valkey.url, only_start) as engine, gateway(proxy.url) as gate:
            proxy.cut_at(b":inbox")
            run_id = await gate.order()
            assert (await engine.turn(0)).submit.attempt == 2
            await engine.die()
            proxy.cut_at(b":inbox")
            engine.script = answer_at_once
            await engine.restart()
            await settled(gate, run_id)
            assert proxy.num_cuts == 2
            assert isinstance(assert_one_end(own_valkey, run_id), Finished)


async def test_an_ended_run_whose_clean_up_was_missed_is_cleared(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
        run_id = await gate.order()
        await settled(gate, run_id)
        with valkey.client() as client:
            client.sadd(RUNS_LIVE_KEY, run_id)
            client.persist(run_events_key(run_id))
            await until(lambda: not client.sismember(RUNS_LIVE_KEY, run_id), 6)
        assert_one_end(valkey, run_id)


async def test_a_hole_in_a_live_stream_ends_the_run_and_its_reader_in_an_error(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        reading = asyncio.create_task(gate.collect(run_id))
        turn = await engine.turn(0)
        await until(lambda: turn.sequence == 3)
        turn.sequence += 1
        await engine.write(turn, TOKEN)
        *_, failed, ended = [event.event for event in await reading]
        assert isinstance(failed, Failed) and failed.error == "gap" and failed.retryable
        assert "between 1-3 and 1-5" in failed.message
        assert ended == RunEnded(state="failed")
        await settled(gate, run_id)
        end = assert_one_end(valkey, run_id)
        assert isinstance(end, Failed) and end.error == "gap"
        assert not await engine.write(turn, TOKEN)


async def test_a_hole_in_an_ended_stream_is_told_to_who_reads_it_again(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
        run_id = await gate.order()
        await settled(gate, run_id)
        with valkey.client() as client:
            client.xdel(run_events_key(run_id), "1-4")
        failed = (await gate.collect(run_id))[-2].event
        assert isinstance(failed, Failed) and failed.error == "gap"
        assert "between 1-3 and 1-5" in failed.message


async def test_a_fault_in_a_listener_keeps_no_run_from_its_end(valkey: ValkeyServer) -> None:
    def broken(run: Run) -> None:
        raise RuntimeError

    async with FakeEngine(valkey.url), gateway(valkey.url) as gate:
        gate.runs.on_turn_end.append(broken)
        run_id = await gate.order()
        await settled(gate, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_the_wait_in_the_gateways_line_is_measured(valkey: ValkeyServer) -> None:
    ended: list[Run] = []
    async with FakeEngine(valkey.url, only_start, workers=1) as engine, gateway(valkey.url) as gate:
        gate.runs.on_turn_end.append(ended.append)
        ids = [await gate.order() for _ in range(3)]
        await engine.turn(1)
        await asyncio.sleep(0.3)
        await engine.finish(engine.turns[0])
        turn = await engine.turn(2)
        await asyncio.sleep(0.1)
        await engine.write(turn, TOKEN)
        for turn in engine.turns[1:]:
            await engine.finish(turn)
        for run_id in ids:
            await settled(gate, run_id)
    first, last = ended[0], next(run for run in ended if run.run_id == ids[2])
    assert first.queue_seconds is not None and last.queue_seconds is not None
    assert first.first_token_seconds is None
    assert last.queue_seconds >= max(0.3, first.queue_seconds)
    assert last.first_token_seconds is not None and last.first_token_seconds >= last.queue_seconds + 0.05
