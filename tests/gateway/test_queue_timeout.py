"""A call that waits in line longer than its class lets it ends in an error, and nobody else does."""

from __future__ import annotations

import asyncio

from gateway.bus import Bus
from gateway.flow.classes import Classes, DefaultRules, FlowHints
from gateway.flow.directory import Directory
from gateway.flow.places import Order, Places
from gateway.runs.caretaker import Caretaker
from gateway.runs.runs import Runs
from metrics.exposition import render
from metrics.instruments import Instruments
from tests.conftest import ValkeyServer
from workers.messages import Failed, Finished, Sampling

from .fake_engine import FakeEngine, only_start, until
from .test_runs import Gateway, assert_one_end, settled

PATIENCE = 0.3


async def test_who_waits_too_long_is_told_and_those_at_the_engine_and_of_other_classes_go_on(
    valkey: ValkeyServer,
) -> None:
    bus = Bus(valkey.url, "g1")
    await bus.start()
    directory, instruments = Directory(bus), Instruments()
    classes = Classes(default=DefaultRules(timeout_seconds=PATIENCE))
    runs = Runs(bus, directory, places=Places(directory, 64, classes=classes, watch=instruments.flow))
    caretaker = Caretaker(bus, directory, runs)
    gate = Gateway(bus, directory, runs, caretaker)
    async with FakeEngine(valkey.url, only_start, workers=1) as engine:
        await directory.start()
        await caretaker.start()
        try:
            at_engine = [await gate.order("a") for _ in range(2)]
            late = await gate.order("a")
            bulk = await runs.start(
                Order(
                    engine=directory.find("model"),
                    token_ids=b"\1\0\0\0",
                    max_tokens=10,
                    sampling=Sampling(),
                    flow=FlowHints(flow_class="bulk"),
                )
            )
            async with asyncio.timeout(5):
                events = await gate.collect(late)
                await settled(gate, late)
            failed = assert_one_end(valkey, late)
            assert isinstance(failed, Failed)
            assert (failed.error, failed.retryable) == ("queue_timeout", True)
            assert failed.retry_after is not None and failed.retry_after >= 1
            assert failed.message.endswith(f"Try again in {failed.retry_after:.0f} s.")
            assert events[-2].event == failed
            assert gate.is_live(bulk) and all(gate.is_live(run_id) for run_id in at_engine)
            for number in range(3):
                await engine.turn(number)
                await engine.finish(engine.turns[number])
            for run_id in (*at_engine, bulk):
                await settled(gate, run_id)
                assert isinstance(assert_one_end(valkey, run_id), Finished)
            await until(lambda: not runs.num_waiting)
            page = render(instruments.registry).decode()
            assert 'tetrarch_class_refusals_total{class="default",reason="queue_timeout"} 1.0' in page
            assert 'tetrarch_class_queue_seconds_count{class="bulk"} 1.0' in page
            assert 'tetrarch_class_runs_waiting{class="default"} 0.0' in page
        finally:
            await caretaker.stop()
            await directory.stop()
            await runs.stop(0)
            await bus.stop()
