"""Calls that succeed, changed field by field, at live things in every state: nothing breaks, hangs or leaks.

Real runs on a real Valkey; only the engine is a fake. What is answered is held to the API's description.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from gateway.http.openapi import document
from gateway.http.routes import ROUTES
from tests.conftest import Logged, ValkeyServer

from .described import Described
from .fuzz_cases import Call, calls, quoted
from .fuzz_seeds import SEEDS
from .fuzz_world import FAULTS, SECONDS, Answered, HoldingEngine, Record, World
from .test_native_real import serving

DESCRIBED = Described(document(ROUTES))
NUM_EXAMPLES, NUM_EXAMPLES_SLOW = 8, 300
MAY_WAIT = (
    "GET /v1/runs/wait",
    "POST /v1/runs/wait",
    "GET /v1/chat/completions/{id}",
    "GET /v1/completions/{id}",
)
"""What is answered only when a run is done: the client leaves soon."""


@pytest.fixture
async def world(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[World]:
    async with HoldingEngine(valkey.url), serving(valkey.url, tmp_path) as client:
        started = World(client.url)
        yield started
        started.close()


def filled(value: Any, world: World) -> Any:
    """The value with the ids of live things where it has their kinds."""
    match value:
        case "@call":
            return world.call_id()
        case str() if {*value.split(",")} <= {f"@{kind}" for kind in world.kinds}:
            return ",".join(world.of(kind[1:]) for kind in value.split(","))
        case list():
            return [filled(item, world) for item in value]
        case dict():
            return {name: filled(item, world) for name, item in value.items()}
    return value


def ask(world: World, label: str, call: Call, *, patience: float) -> Answered:
    """Makes one call and holds the answer to the description."""
    method, _, path = label.partition(" ")
    if call.aim:
        aim = world.of(call.aim) if call.is_live else call.aim
        path = path.partition("{")[0] + quoted(aim) + path.partition("}")[2]
    query = filled(call.query, world)
    if query:
        path += "?" + "&".join(f"{name}={quoted(value)}" for name, value in query.items())
    body = None if call.body is None else json.dumps(filled(call.body, world)).encode()
    silence = SECONDS if method == "POST" else 0.1  # what is only looked at may go on for ever
    answered = world.caller.call(method, path, body, call.headers, patience=patience, silence=silence)
    if answered.status == 0:
        assert label in MAY_WAIT, "no answer"
        return answered
    assert answered.status != 500, answered
    assert b'"internal_error"' not in answered.body, answered
    DESCRIBED.check(label, answered.status, answered.headers, answered.body, is_whole=answered.is_whole)
    return answered


def ask_seeds(world: World, label: str, answers: Counter[str]) -> None:
    """All that succeeds, as it is."""
    for seed in SEEDS[label]:
        aim = seed.aims[0] if seed.aims else ""
        answered = ask(world, label, Call(aim, bool(aim), seed.body, seed.query), patience=SECONDS)
        assert 200 <= answered.status < 300, (label, seed, answered)
        answers[str(answered.status)] += 1


def ask_changed(world: World, label: str, answers: Counter[str], num_examples: int) -> None:
    """What begins with those."""

    @settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=num_examples == NUM_EXAMPLES,  # only a soak looks for news
        phases=[Phase.generate, Phase.shrink],
    )
    @given(call=calls(label, DESCRIBED, world.kinds))
    def ask_one(call: Call) -> None:
        answered = ask(world, label, call, patience=0.2 if label in MAY_WAIT else SECONDS)
        answers[str(answered.status or "left")] += 1

    ask_one()


def ask_all(world: World, labels: list[str], num_examples: int, record: Record) -> None:
    for label in labels:
        answers = Counter[str]()
        ask_seeds(world, label, answers)
        ask_changed(world, label, answers, num_examples)
        record(label, dict(sorted(answers.items())))
    world.clear()


def test_every_operation_has_a_call_that_succeeds() -> None:
    assert SEEDS.keys() == DESCRIBED.operations.keys()
    for label, seeds in SEEDS.items():
        assert all(bool(seed.aims) == ("{" in label) for seed in seeds), label


async def test_no_change_of_a_good_call_breaks_the_server(
    world: World, logged: Logged, record_testsuite_property: Record
) -> None:
    await asyncio.to_thread(ask_all, world, [*SEEDS], NUM_EXAMPLES, record_testsuite_property)
    assert not logged.lines(*FAULTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("label", SEEDS)
async def test_no_change_that_is_sought_for_long_breaks_the_server(
    world: World, logged: Logged, label: str, record_testsuite_property: Record
) -> None:
    await asyncio.to_thread(ask_all, world, [label], NUM_EXAMPLES_SLOW, record_testsuite_property)
    assert not logged.lines(*FAULTS)
