"""What a gateway sends again by itself: a turn without a token, once. It may be what killed the engine."""

from __future__ import annotations

import asyncio

from tests.conftest import ValkeyServer
from workers.messages import Failed

from .fake_engine import FakeEngine, one_token, only_start
from .test_runs import assert_one_end, gateway, settled

POLLS_SECONDS = 0.7  # longer than a look at the engines takes to come


async def test_a_turn_that_loses_its_second_engine_too_is_not_sent_a_third_time(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, only_start) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        for number in range(2):
            turn = await engine.turn(number)
            assert turn.submit.attempt == number + 1
            await engine.die()
            await asyncio.sleep(POLLS_SECONDS)
            await engine.restart()
        await settled(gate, run_id)
        failed = assert_one_end(valkey, run_id)
        assert isinstance(failed, Failed)
        assert (failed.error, failed.retryable) == ("engine_lost", True)
        assert len(engine.turns) == 2


async def test_a_turn_that_has_told_a_token_is_never_sent_again(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, one_token) as engine, gateway(valkey.url) as gate:
        run_id = await gate.order()
        await engine.turn(0)
        await asyncio.sleep(0.1)
        await engine.die()
        await engine.restart()
        await settled(gate, run_id)
        assert isinstance(assert_one_end(valkey, run_id), Failed)
        await asyncio.sleep(POLLS_SECONDS)
        assert len(engine.turns) == 1
