"""A run waits for an engine as long as it, or its class, may; a call is told soon that none is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from gateway.aliases import Aliases
from gateway.bus import Bus
from gateway.flow.classes import Classes, DefaultRules
from gateway.flow.directory import Directory
from gateway.flow.places import Places
from gateway.http.continuing import ChatTalk
from gateway.runs.caretaker import Caretaker
from gateway.runs.runs import Runs
from gateway.text.prompts import PromptLibrary
from tests.conftest import ValkeyServer
from workers.messages import Failed

from .chatting import assert_adds_up, ended, result, spec
from .talking_engine import TalkingEngine
from .test_run_calls import call
from .test_run_verbs import FIRST, answers
from .test_runs import Gateway, assert_one_end

Where = Literal["line", "engine"]

SOON = 0.5
"""How long calls wait for an engine here, and detached runs of the class `default` that tell nothing."""


@asynccontextmanager
async def chatting(url: str, *, timeout_seconds: float = 60) -> AsyncIterator[Gateway]:
    """A gateway with little patience."""
    bus = Bus(url, "g1")
    await bus.start()
    directory = Directory(bus)
    classes = Classes(default=DefaultRules(timeout_seconds=timeout_seconds))
    runs = Runs(bus, directory, places=Places(directory, 64, classes=classes))
    runs.talk = ChatTalk(directory, PromptLibrary(), Aliases())
    caretaker = Caretaker(bus, directory, runs, resend_seconds=SOON)
    await directory.start()
    directory._trusted_from = 0.0
    await caretaker.start()
    try:
        yield Gateway(bus, directory, runs, caretaker)
    finally:
        await caretaker.stop()
        await directory.stop()
        await runs.stop(0)
        await bus.stop()


async def lose_engine(engine: TalkingEngine, gate: Gateway, where: Where, **fields: object) -> str:
    """A detached run whose engine has gone before it had a token: from its line, or from this gateway's."""
    engine.is_starting = False
    others = [await gate.runs.create(spec("other")) for _ in range(2 if where == "line" else 0)]
    run_id = await gate.runs.create(spec(**fields))  # type: ignore[arg-type]
    await engine.turn(len(others) - 1 if others else 0)
    await engine.die()
    for other in others:
        await gate.runs.cancel(other)
    return run_id


@pytest.mark.parametrize("where", ["line", "engine"])
async def test_a_run_waits_for_an_engine_that_comes_back_late_and_a_call_does_not(
    valkey: ValkeyServer, where: Where
) -> None:
    async with TalkingEngine(valkey.url, answers, workers=1) as engine, chatting(valkey.url) as gate:
        attached = await call(gate)
        run_id = await lose_engine(engine, gate, where)
        await ended(gate, attached)
        failed = assert_one_end(valkey, attached)
        assert isinstance(failed, Failed) and (failed.error, failed.retryable) == ("engine_lost", True)
        await asyncio.sleep(2 * SOON)
        assert (await gate.runs.state(run_id)).status == "queued"
        engine.is_starting = True
        await engine.restart()
        state = await ended(gate, run_id)
        assert state.status == "completed"
        assert_adds_up(valkey, run_id, state)
        assert (await result(gate, run_id)).text == FIRST


@pytest.mark.parametrize("where", ["line", "engine"])
@pytest.mark.parametrize("limit", ["queue_ttl_ms", "deadline"])
async def test_without_an_engine_a_run_ends_when_it_may_wait_no_longer(
    valkey: ValkeyServer, where: Where, limit: str
) -> None:
    async with (
        TalkingEngine(valkey.url, answers, workers=1) as engine,
        chatting(valkey.url, timeout_seconds=SOON) as gate,
    ):
        began = time.time()
        limits = {"queue_ttl_ms": 3000} if limit == "queue_ttl_ms" else {"deadline": began + 3}
        run_id = await lose_engine(engine, gate, where, **limits)
        state = await ended(gate, run_id)
        assert time.time() - began >= 3, "neither its class's timeout nor a call's patience counts"
        assert state.ended is not None
        error = "queue_ttl_exceeded" if limit == "queue_ttl_ms" else "deadline_exceeded"
        assert (state.status, state.ended.error) == ("expired", error)
        assert (await result(gate, run_id)).usage.completion_tokens == 0


@pytest.mark.parametrize(("where", "error"), [("line", "queue_timeout"), ("engine", "engine_lost")])
async def test_a_run_that_has_told_no_limit_waits_as_long_as_its_class_may(
    valkey: ValkeyServer, where: Where, error: str
) -> None:
    async with (
        TalkingEngine(valkey.url, answers, workers=1) as engine,
        chatting(valkey.url, timeout_seconds=2) as gate,
    ):
        began = time.time()
        run_id = await lose_engine(engine, gate, where)
        state = await ended(gate, run_id)
        assert time.time() - began >= 2
        assert isinstance(state.turn_end, Failed)
        assert (state.status, state.turn_end.error, state.turn_end.retryable) == ("failed", error, True)


async def test_a_run_with_a_limit_of_its_own_outlasts_its_class_in_a_busy_line(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, answers, workers=1) as engine,
        chatting(valkey.url, timeout_seconds=SOON) as gate,
    ):
        engine.is_starting = False
        others = [await gate.runs.create(spec("other")) for _ in range(2)]
        patient = await gate.runs.create(spec(queue_ttl_ms=60_000))
        plain = await gate.runs.create(spec("plain"))
        state = await ended(gate, plain)
        assert isinstance(state.turn_end, Failed) and state.turn_end.error == "queue_timeout"
        await asyncio.sleep(1)
        engine.is_starting = True
        for run_id in (*others, patient):
            assert (await ended(gate, run_id)).status == "completed"
