"""A call that waits in line longer than its class lets it ends in an error, and nobody else does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.aliases import Aliases
from gateway.bus import Bus
from gateway.flow.classes import Classes, DefaultRules, FlowHints
from gateway.flow.directory import Directory
from gateway.flow.places import Order, Places
from gateway.http.continuing import ChatTalk
from gateway.runs.caretaker import Caretaker
from gateway.runs.run import Run
from gateway.runs.runs import Runs
from gateway.runs.spec import Budget
from gateway.runs.state import RunState
from gateway.text.prompts import PromptLibrary
from metrics.exposition import render
from metrics.instruments import Instruments
from tests.conftest import ValkeyServer
from workers.messages import Failed, Finished, Sampling

from .chatting import ended, generated, spec
from .fake_engine import FakeEngine, only_start, until
from .talking_engine import TalkingEngine
from .test_runs import Gateway, assert_one_end, settled

PATIENCE = 0.3


@asynccontextmanager
async def impatient(url: str, seconds: float = PATIENCE) -> AsyncIterator[tuple[Gateway, Instruments]]:
    """A gateway where calls of the default class wait no longer than that."""
    bus = Bus(url, "g1")
    await bus.start()
    directory, instruments = Directory(bus), Instruments()
    classes = Classes(default=DefaultRules(timeout_seconds=seconds))
    runs = Runs(bus, directory, places=Places(directory, 64, classes=classes, watch=instruments.flow))
    runs.talk = ChatTalk(directory, PromptLibrary(), Aliases())
    caretaker = Caretaker(bus, directory, runs)
    await directory.start()
    await caretaker.start()
    try:
        yield Gateway(bus, directory, runs, caretaker), instruments
    finally:
        await caretaker.stop()
        await directory.stop()
        await runs.stop(0)
        await bus.stop()


async def test_who_waits_too_long_is_told_and_those_at_the_engine_and_of_other_classes_go_on(
    valkey: ValkeyServer,
) -> None:
    async with (
        FakeEngine(valkey.url, only_start, workers=1) as engine,
        impatient(valkey.url) as (gate, instruments),
    ):
        at_engine = [await gate.order("a") for _ in range(2)]
        late = await gate.order("a")
        bulk = await gate.runs.start(
            Order(
                engine=gate.directory.find("model"),
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
        await until(lambda: not gate.runs.num_waiting)
        page = render(instruments.registry).decode()
        assert 'tetrarch_class_refusals_total{class="default",reason="queue_timeout"} 1.0' in page
        assert 'tetrarch_class_queue_seconds_count{class="bulk"} 1.0' in page
        assert 'tetrarch_class_runs_waiting{class="default"} 0.0' in page


async def test_who_waits_too_long_for_its_tree_is_told_and_counts_as_never_sent(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, lambda prompt: "all of it is the root's") as engine,
        impatient(valkey.url, 2.0) as (gate, instruments),
    ):
        engine.allowed = 1
        budget = Budget(output_tokens=100)
        root = await gate.runs.create(spec(session="s", agent="boss", tree_budget=budget))
        await generated(gate, root, 1)
        asked_at = time.monotonic()
        late = await gate.order("s")
        child = await gate.runs.create(spec("child", parent_run=root, deadline=time.time() + 600))
        async with asyncio.timeout(15):
            await settled(gate, late)
        assert time.monotonic() - asked_at >= 2.0
        failed = assert_one_end(valkey, late)
        assert isinstance(failed, Failed)
        assert (failed.error, failed.retryable) == ("queue_timeout", True)
        assert failed.retry_after is not None and failed.retry_after >= 1
        assert gate.is_live(root)
        assert (await gate.runs.state(child)).status == "queued", "it has told how long it waits"
        assert len(engine.turns) == 1
        page = render(instruments.registry).decode()
        assert 'tetrarch_class_refusals_total{class="default",reason="queue_timeout"} 1.0' in page
        assert 'tetrarch_class_queue_seconds_count{class="default"} 1.0' in page
        engine.allowed = None
        for run_id in (root, child):
            assert (await ended(gate, run_id)).status == "completed"


@pytest.mark.parametrize(("since_ms", "least", "most"), [(-3_600_000, 0.0, 60.0), (3_600_000, 0.0, 0.0)])
def test_what_a_run_waited_while_no_gateway_was_up_does_not_count(
    since_ms: int, least: float, most: float
) -> None:
    run = Run("run-1", RunState(waiting_since=time.time() + since_ms / 1000), None)
    assert least <= run.waited_seconds <= most
