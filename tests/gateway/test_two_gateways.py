"""Two gateways on one bus: only a run's own gateway judges it, or the one that stands in for a dead one."""

from __future__ import annotations

import asyncio

from tests.conftest import ValkeyServer
from workers.messages import Cancelled, Finished, run_attendant_key

from .fake_engine import FakeEngine, answer_at_once, one_token, only_start
from .test_runs import assert_one_end, gateway, settled

LOOKS_SECONDS = 1.3
"""At least two looks of a caretaker."""


async def test_a_reader_elsewhere_does_not_end_a_run_that_waits_in_line(valkey: ValkeyServer) -> None:
    async with (
        FakeEngine(valkey.url, only_start, workers=1) as engine,
        gateway(valkey.url, "g1") as first,
        gateway(valkey.url, "g2") as second,
    ):
        ids = [await first.order() for _ in range(3)]
        reading = asyncio.create_task(second.collect(ids[2]))
        await asyncio.sleep(LOOKS_SECONDS)
        assert not reading.done()
        for number in range(3):
            await engine.finish(await engine.turn(number))
        await reading
        await settled(first, ids[2])
        assert isinstance(assert_one_end(valkey, ids[2]), Finished)


async def test_a_reader_elsewhere_does_not_forestall_the_second_try_of_a_lost_turn(
    valkey: ValkeyServer,
) -> None:
    async with (
        FakeEngine(valkey.url, only_start) as engine,
        gateway(valkey.url, "g1") as first,
        gateway(valkey.url, "g2") as second,
    ):
        run_id = await first.order()
        reading = asyncio.create_task(second.collect(run_id))
        await engine.turn(0)
        await engine.die()
        await asyncio.sleep(LOOKS_SECONDS)
        engine.script = answer_at_once
        await engine.restart()
        await reading
        await settled(first, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_a_reader_that_leaves_elsewhere_makes_no_orphan_of_a_living_gateways_run(
    valkey: ValkeyServer,
) -> None:
    async with (
        FakeEngine(valkey.url, one_token) as engine,
        gateway(valkey.url, "g1") as first,
        gateway(valkey.url, "g2", orphan_seconds=0.1) as second,
    ):
        run_id = await first.order()
        turn = await engine.turn(0)
        reading = second.runs.events(run_id)
        await anext(reading)
        await reading.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(LOOKS_SECONDS)
        assert second.is_live(run_id)
        assert not turn.is_cancelled
        await engine.finish(turn)
        await settled(first, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_a_run_resumed_at_one_gateway_is_no_orphan_to_another(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine:
        async with gateway(valkey.url, "g1", kill=True) as first:
            run_id = await first.order()
            turn = await engine.turn(0)
            await asyncio.sleep(0.05)
        async with gateway(valkey.url, "g2") as second:
            reading = asyncio.create_task(second.collect(run_id))
            await asyncio.sleep(0.1)
            await second.caretaker.sweep()
            async with gateway(valkey.url, "g3", orphan_seconds=0.1) as third:
                await third.runs.adopt(run_id)
                await asyncio.sleep(LOOKS_SECONDS)
                assert not turn.is_cancelled
                await engine.finish(turn)
                await reading
        assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_a_third_gateway_stands_in_when_the_second_dies_too(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine:
        async with gateway(valkey.url, "g1", kill=True) as first:
            run_id = await first.order()
            turn = await engine.turn(0)
            await asyncio.sleep(0.05)
        async with gateway(valkey.url, "g2", kill=True) as second:
            reading = asyncio.create_task(second.collect(run_id))
            await asyncio.sleep(0.1)
            await second.caretaker.sweep()
            reading.cancel()
        async with gateway(valkey.url, "g3", orphan_seconds=0.1) as third:
            await asyncio.sleep(LOOKS_SECONDS)
            assert not turn.is_cancelled
            with valkey.client() as client:
                assert client.pexpire(run_attendant_key(run_id), 1)  # it would be 6 s
            await engine.cancel_of(turn)
            await engine.obey_cancel(turn)
            await settled(third, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Cancelled)
