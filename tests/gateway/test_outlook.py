"""What a run in line is told: how many go before it, and when its answer may begin, at the measured rates."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from gateway.callers.hints import Names
from gateway.cli.screen import progress_of
from gateway.flow.classes import CLASSES, FlowHints
from gateway.flow.outlook import NO_OUTLOOK, Ahead, Outlook, at_engine, in_line
from gateway.flow.rates import Rates
from gateway.runs.told import RunProgress
from tests.conftest import ValkeyServer
from workers.messages import Progress

from .native_client import NativeClient, Told
from .responses_api import sse_events
from .talking_engine import TalkingEngine
from .test_native_real import answers, reaches, serving
from .test_places import Gate, an_engine

FAST = Rates(prefill=100, decode=10)


def test_who_waits_in_line_waits_for_those_at_work_and_those_before_it_and_reads_its_prompt() -> None:
    assert in_line([FAST], 0, 0, 200) == pytest.approx(2)
    assert in_line([FAST, FAST], 8, 3, 200) == pytest.approx(8 / 2 / 2 + 3 + 2)
    assert in_line([], 8, 3, 200) is None


def test_who_waits_at_an_engine_waits_for_prompts_and_for_answers_where_no_worker_is_free() -> None:
    ahead = [Ahead(100, 20), Ahead(0, 20)]
    assert at_engine(FAST, ahead, 3, 200) == pytest.approx(3)
    assert at_engine(FAST, ahead, 2, 200) == pytest.approx(3 + 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_place_in_line_is_how_many_go_first(seed: int) -> None:
    """Equal turns of several tenants, trees, classes and priorities, of which none comes later."""
    chance = random.Random(seed)
    gate = Gate(an_engine())
    names = []
    for number in range(40):
        flow = FlowHints(flow_class=chance.choice(CLASSES), priority=chance.choice([0, 0, 5]))
        session = chance.choice(["s", "t", "u"])
        names.append(str(number))
        gate.enter(str(number), names=Names(session, "a"), tenant=chance.choice("xy"), flow=flow)
    told = {name: gate.places.outlook(name).queue_pos for name in names}
    order = []
    admission = gate.places._admission
    while admission.num_waiting:  # without the floors, which an engine's room brings in
        line = admission.lines()[0]
        first = next(t for name in CLASSES if (t := admission.first(line, name)) is not None)
        gate.places._send(first, gate.places._orders[first.run_id], gate.engines[0], 64, lambda: None)
        order.append(first.run_id)
    assert [told[name] for name in order] == [*range(1, 41)]


def test_an_estimate_follows_a_turn_from_the_line_to_its_first_token() -> None:
    gate = Gate(an_engine())
    for number in range(8):
        gate.enter(str(number), 200, max_tokens=20)
    assert gate.places.outlook("7").queue_pos == 8
    gate.now = 1.0
    assert len(gate.released()) == 6
    line = [gate.places.outlook(name) for name in ("6", "7")]
    assert [outlook.queue_pos for outlook in line] == [1, 2]
    one = 200 / 100 + 20 / 10  # seconds of a turn
    assert line[0].seconds == pytest.approx(6 * one / 2 + 2)
    assert line[1].seconds == pytest.approx(6 * one / 2 + one + 2)
    assert gate.places.outlook("0") == Outlook(None, 2)
    assert gate.places.outlook("3").seconds == pytest.approx(4 * 2)
    assert gate.places.outlook("4").seconds == pytest.approx(5 * 2 + 4 * 20 / 10 / 2)
    assert gate.places.outlook("0", 50).seconds == pytest.approx(0.5)
    gate.places.note_prefilled("0")
    assert gate.places.outlook("0", 0) == NO_OUTLOOK
    assert gate.places.outlook("3").seconds == pytest.approx(3 * 2)
    assert gate.places.outlook("unknown") == NO_OUTLOOK


async def follow(client: NativeClient, run_id: str, told: list[Told]) -> None:
    """Reads a run's events as they come."""
    async with client.http.get(f"{client.url}/v1/runs/{run_id}/events") as response:
        name = ""
        async for raw in response.content:
            field, _, value = raw.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data" and name == "run.progress":
                told.append(json.loads(value))


async def test_a_stream_tells_its_runs_place_when_that_changes(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with (
        TalkingEngine(valkey.url, answers, workers=1) as engine,
        serving(valkey.url, tmp_path) as client,
    ):
        engine.allowed = 1
        runs = [await client.create() for _ in range(6)]  # two at the engine, four in line
        await engine.turn(1)
        told: list[Told] = []
        reading = asyncio.create_task(follow(client, runs[5], told))
        async with asyncio.timeout(10):
            while not told:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
        assert (told[0]["phase"], told[0]["queue_pos"]) == ("queued", 4)
        assert told[0]["eta_ms"] > 0
        await asyncio.sleep(1.3)
        assert len(told) == 1, "nothing is new"
        for gone in (runs[2], runs[3]):
            await client.call("POST", f"/v1/runs/{gone}/cancel")
        async with asyncio.timeout(10):
            while told[-1]["queue_pos"] != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        places = [one["queue_pos"] for one in told]
        assert places == sorted(places, reverse=True) and {*places} <= {4, 3, 2}
        engine.allowed = None
        await reaches(client, runs[5], lambda shown: shown["status"] == "completed")
        await asyncio.wait_for(reading, 10)


async def test_a_replay_tells_no_estimate_of_a_moment_that_has_passed(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with (
        TalkingEngine(valkey.url, answers, workers=1) as engine,
        serving(valkey.url, tmp_path) as client,
    ):
        engine.allowed = 0
        run_id = await client.create()
        turn = await engine.turn(0)
        await reaches(client, run_id, lambda shown: shown["status"] == "prefilling")
        for processed in (1, 2, 3):
            await engine.write(turn, Progress(processed_tokens=processed, prompt_tokens=10))
        async with asyncio.timeout(10):
            while True:  # until its gateway has read them
                async with client.http.get(f"{client.url}/v1/runs/{run_id}/events?follow=false") as response:
                    told = [event.data for event in sse_events(await response.text())]
                progress = [one for one in told if one["type"] == "run.progress"]
                etas = [one.get("eta_ms") for one in progress]
                if len(etas) == 3 and etas[:2] == [None, None]:
                    break
                await asyncio.sleep(0.02)
        assert [one["processed"] for one in progress] == [1, 2, 3] and (etas[2] or 0) > 0
        engine.allowed = None


def test_a_place_in_line_is_shown() -> None:
    told = RunProgress(run="r", phase="queued", processed=0, total=1200, eta_ms=61_400, queue_pos=3)
    assert progress_of(told) == "queued 0/1,200, number 3 in line, an answer in some 61 s"
