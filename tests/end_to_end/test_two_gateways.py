"""Two gateway processes on one bus: verbs at the one that does not own a run, and what races with its end."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis import Redis

from gateway.client import ENDINGS, Client, RunBody, RunHandle, TokenText, ToolCallBegun
from gateway.runs.told import CallDropped
from gateway.serving.paths import home_at

from .books import events_of, num_ends, prompts_of, work_of
from .hybrid_folder import NO_MARKERS, TOOL, make_chatting_hybrid, words
from .served import ROOT, Served

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

FLAGS = ("--kv-bits", "native", "--pool-tokens", "32768", "--states", "24")
NUM_RACES = 40


class Second:
    """A further gateway on the bus of a served home."""

    def __init__(self, served: Served, home: Path) -> None:
        self.bus_url = home_at(served.home, os.environ).bus_url
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "gateway", "gateway", "--port", str(port), "--home", str(home)]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("TETRARCH_")}
        home.mkdir()
        with (home / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables | {"TETRARCH_REDIS_URL": self.bus_url},
                stdout=output,
                stderr=output,
            )
        self.url = f"http://127.0.0.1:{port}"

    async def ready(self) -> None:
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                assert self.process.poll() is None
                try:
                    async with http.get(f"{self.url}/ready") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_chatting_hybrid(tmp_path_factory.mktemp("models") / "a hybrid")
    serving = Served(tmp_path_factory.mktemp("two") / "home", model, *FLAGS)
    try:
        serving.wait_ready()
        yield serving
    finally:
        serving.close()


@pytest.fixture(scope="module")
def shared(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    second = Second(served, tmp_path_factory.mktemp("two") / "second")
    try:
        yield second
    finally:
        second.close()


@pytest.fixture
async def clients(served: Served, shared: Second) -> AsyncIterator[tuple[Client, Client]]:
    await shared.ready()
    async with Client(served.url) as first, Client(shared.url) as second:
        yield first, second


def asked(seed: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A run of exactly so many tokens, if nothing ends it."""
    body = {"input": words(seed, 200), "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
    return body | {"logit_bias": NO_MARKERS, "derail": "report"} | fields


async def until_told(run: RunHandle, kind: type[Any]) -> None:
    async with asyncio.timeout(60), run.stream() as events:
        async for event in events:
            if isinstance(event, kind):
                return


async def told(run: RunHandle) -> list[Any]:
    async with asyncio.timeout(60), run.stream() as events:
        return [event async for event in events]


def check(bus_url: str, run: RunBody) -> None:
    """One end, and usage that is what the events tell."""
    with Redis.from_url(bus_url) as bus:
        events = events_of(bus, run.id)
    assert num_ends(events) == 1
    assert work_of(events).generated == run.usage.completion_tokens
    assert (run.usage.prompt_tokens, run.usage.cached_tokens) == prompts_of(events)


async def test_cancels_racing_completion_at_either_gateway_have_one_end_and_tell_which(
    clients: tuple[Client, Client], shared: Second
) -> None:
    choice = random.Random(3)
    gate = asyncio.Semaphore(6)

    async def race(number: int) -> str:
        async with gate:
            maker, other = choice.sample(clients, 2)
            run = await maker.spawn(**asked(number, choice.choice((1, 2, 8, 30))))
            await asyncio.sleep(choice.random() * 0.4)
            answers = await asyncio.gather(other.cancel(run), maker.cancel(run))
            body = await other.handle(run.id).result(30)
            assert {answer.status for answer in answers} == {body.status}
            check(shared.bus_url, body)
            return body.status

    ends = await asyncio.gather(*(race(number) for number in range(NUM_RACES)))
    assert set(ends) == {"completed", "cancelled"}


@pytest.mark.slow
async def test_verbs_at_the_gateway_that_does_not_own_a_run_reach_it(
    clients: tuple[Client, Client], shared: Second
) -> None:
    first, second = clients
    for here, there in (clients, clients[::-1]):
        run = await here.spawn(**asked(100, 400, on_end="await_input"))
        remote = there.handle(run.id)
        await until_told(remote, TokenText)
        assert (await remote.pause()).status == "paused"
        child = await remote.fork(**asked(101, 4))
        assert child.created and child.created.recomputed_tokens == 0
        assert (await remote.resume()).recomputed_tokens == 0
        assert (await remote.steer("Be brief.")).applied == "now"
        assert (await remote.steer("And then?", "queue")).applied == "queue"
        run_body = await remote.result(60)
        assert run_body.status == "input_required" and run_body.turn == 3
        assert (await remote.respond(text="Go on.")).turn == 4
        assert (await remote.cancel(tree=True)).status == "cancelled"
        assert await told(first.handle(run.id)) == await told(second.handle(run.id))
        check(shared.bus_url, await remote.read())
        check(shared.bus_url, await child.result(30))


async def test_a_steer_within_a_call_that_a_grammar_demands_drops_it_whole(
    clients: tuple[Client, Client], shared: Second
) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "temperature": 1.0}
    run = await clients[0].spawn(**asked(200, 300, **fields))
    await until_told(run, ToolCallBegun)
    steered = await clients[1].steer(run, "No: say it in words.")
    assert (steered.applied, steered.turn) == ("now", 2)
    body = await run.result(60)
    events = await told(run)
    dropped = [event for event in events if isinstance(event, CallDropped)]
    assert [(event.turn, event.name) for event in dropped] == [(1, "read")]
    assert body.status == "completed" and body.result is not None
    assert not body.result.tool_calls and body.result.text
    assert isinstance(events[-1], ENDINGS)
    check(shared.bus_url, body)


@pytest.mark.slow
async def test_a_killed_gateways_runs_go_on_at_the_other(served: Served, tmp_path: Path) -> None:
    doomed = Second(served, tmp_path / "doomed")
    try:
        await doomed.ready()
        async with Client(served.url) as first, Client(doomed.url) as second:
            running = await second.spawn(**asked(300, 600))
            paused = await second.spawn(**asked(301, 200))
            await until_told(running, TokenText)
            await until_told(paused, TokenText)
            await paused.pause()
            waiting = [await second.spawn(**asked(302 + n, 20)) for n in range(8)]
            doomed.process.kill()
            here = [first.handle(run.id) for run in (running, *waiting)]
            for run in here:
                body = await run.result(60)
                assert body.status == "completed", body
                check(doomed.bus_url, body)
            assert (await first.handle(paused.id).resume()).recomputed_tokens == 0
            check(doomed.bus_url, await first.handle(paused.id).result(60))
    finally:
        doomed.close()
