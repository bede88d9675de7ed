"""What ended runs leave in the bus is gone some day: no key of theirs is without an end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from gateway.errors import RunNotFound
from gateway.runs.commands import CancelRun
from gateway.runs.forgetting import forget
from gateway.runs.run import Run, RunEvent
from gateway.runs.spec import Budget, ForkPoint
from tests.conftest import ValkeyServer
from workers.messages import KEY_PREFIX, RUNS_LIVE_KEY, Derail, Tokens, run_events_key

from .chatting import CALL, chatting, ended, generated, spec
from .fake_engine import until
from .talking_engine import TalkingEngine
from .test_runs import Gateway

FOR_EVER = ("engine:", "engines", "tokenizer:", "gateway:g1:wake")
"""Whose keys stay, and of shelves what they have in which order and how large."""


def answers(prompt: str) -> str:
    return CALL if "read_file" in prompt else "The quick brown fox jumps over the lazy dog"


async def test_no_key_of_a_run_is_without_an_end(valkey: ValkeyServer) -> None:
    found = Derail(derail="text_loop", excerpt="lazy")

    def watch(run: Run, entry: RunEvent) -> list[CancelRun | Derail]:
        is_due = isinstance(entry.event, Tokens) and run.state.spec.label == "stops"
        return [found, CancelRun(command=f"watch-{entry.id}", derail=found)] if is_due else []

    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        gate.runs.astray.watchers.append(watch)
        engine.allowed = 4
        root = await gate.runs.create(
            spec(session="s", agent="a", tree_budget=Budget(output_tokens=2000), heartbeat_ms=60_000)
        )
        await generated(gate, root, 4)
        await gate.runs.steer(root, "and then")
        await gate.runs.pause(root)
        child = (await gate.runs.fork(ForkPoint(run=root), spec("child"))).run_id
        engine.allowed = None
        await gate.runs.resume(root)
        asks = await gate.runs.create(spec(tools=True))
        stops = await gate.runs.create(spec(label="stops"))
        for run_id in (root, child, stops):
            await ended(gate, run_id)
        await gate.runs.cancel(asks, seconds=5)
        await ended(gate, asks)
        with valkey.client() as client:
            await until(lambda: not client.scard(RUNS_LIVE_KEY))
            names = [name.decode().removeprefix(KEY_PREFIX) for name in client.keys(f"{KEY_PREFIX}*")]
            endless = [name for name in names if client.ttl(f"{KEY_PREFIX}{name}") == -1]
        assert {name for name in endless if not name.startswith(FOR_EVER)} <= {
            f"{shelf}:{part}" for shelf in ("ids", "results", "logs") for part in ("order", "sizes")
        }
        assert sum(name.startswith("run:") for name in names) > 8


@contextlib.asynccontextmanager
async def ended_but_still_told(gate: Gateway, engine: TalkingEngine) -> AsyncIterator[str]:
    """A cancelled run; what is told of its end takes as long as the block."""
    engine.allowed = 4
    run_id = await gate.runs.create(spec())
    await generated(gate, run_id, 4)
    run = gate.runs._driver.runs[run_id]
    async with run.telling:
        await gate.runs.cancel(run_id, seconds=5)
        await until(lambda: run.state.ended is not None)
        yield run_id


async def test_a_run_that_is_deleted_while_its_end_is_still_told_is_gone(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        async with ended_but_still_told(gate, engine) as run_id:
            assert gate.is_live(run_id)
            with valkey.client() as client:
                client.delete(run_events_key(run_id))
            await gate.runs.keeper.store.results.remove(run_id)
            with pytest.raises(RunNotFound):
                await gate.runs.state(run_id)
            with pytest.raises(RunNotFound):
                await anext(aiter(gate.runs.events(run_id)))
        await until(lambda: not gate.is_live(run_id))


async def test_what_is_told_of_the_end_of_a_deleted_run_goes_with_it(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        async with ended_but_still_told(gate, engine) as run_id:
            await forget(gate.runs.keeper.store, run_id)
        await until(lambda: not gate.is_live(run_id))
        with valkey.client() as client:
            left = {name.decode().rpartition(":")[2] for name in client.keys(f"{KEY_PREFIX}run:{run_id}:*")}
        assert left == {"deleted", "ids-removed"}
