"""Detached runs over real processes and a real hybrid: paused, steered, forked, and a gateway killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from .hybrid_folder import NO_MARKERS, make_chatting_hybrid, words
from .served import Served

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

FLAGS = ("--kv-bits", "native", "--pool-tokens", "65536", "--states", "24")
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_chatting_hybrid(tmp_path_factory.mktemp("models") / "a hybrid")
    serving = Served(tmp_path_factory.mktemp("runs") / "home", model, *FLAGS)
    try:
        serving.wait_ready()
        yield serving
    finally:
        serving.close()


class Caller:
    """The native API as an orchestrator calls it."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        async with self.http.post(f"{self.url}/v1/runs{path}", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status in (200, 202), answer
            return answer

    async def get(self, run_id: str) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/v1/runs/{run_id}") as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def create(self, text: str, num_tokens: int = NUM_TOKENS, **fields: Any) -> str:
        body = {"input": text, "temperature": 0, "logit_bias": NO_MARKERS, "max_tokens": num_tokens, **fields}
        return str((await self.post("", **body))["id"])

    async def reaches(self, run_id: str, *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while (run := await self.get(run_id))["status"] not in statuses:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return run


@pytest.fixture
async def caller(served: Served) -> AsyncIterator[Caller]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as http:
        yield Caller(http, served.url)


async def test_a_paused_run_says_what_it_would_have_said_and_computes_nothing_twice(caller: Caller) -> None:
    whole = await caller.reaches(await caller.create(words(1, 900)), "completed")
    run_id = await caller.create(words(1, 900))
    await caller.reaches(run_id, "decoding")
    assert (await caller.post(f"/{run_id}/pause"))["status"] == "paused"
    resumed = await caller.post(f"/{run_id}/resume")
    assert resumed["recomputed_tokens"] == 0
    run = await caller.reaches(run_id, "completed")
    assert run["result"]["text"] == whole["result"]["text"]
    assert run["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == NUM_TOKENS


async def test_forks_and_a_steer_go_on_from_what_the_parent_has_computed(caller: Caller) -> None:
    parent = await caller.create(words(2, 3000), session="s", agent="p")
    await caller.reaches(parent, "decoding")
    forks = [
        await caller.post(
            f"/{parent}/fork", input=f"child {n}", max_tokens=5, temperature=0, logit_bias=NO_MARKERS
        )
        for n in range(4)
    ]
    for fork in forks:
        assert fork["recomputed_tokens"] == 0, forks
        await caller.reaches(fork["id"], "completed")
    run = await caller.reaches(parent, "decoding", "completed")
    if run["status"] == "decoding":
        steered = await caller.post(f"/{parent}/steer", text="Stop")
        assert steered["applied"] == "now"
        await caller.post(f"/{parent}/cancel")
    assert (await caller.reaches(parent, "cancelled", "completed"))["usage"]["completion_tokens"] > 0


async def test_forks_at_checkpoints_compute_nothing_of_their_parents(caller: Caller) -> None:
    messages = [{"role": "system", "content": words(6, 1500)}, {"role": "user", "content": words(7, 900)}]
    parent = await caller.create("", input=None, messages=messages)
    await caller.reaches(parent, "decoding")
    await caller.post(f"/{parent}/pause")
    paused = await caller.get(parent)
    assert [point["name"] for point in paused["checkpoints"]] == ["system", "prompt", "pause"]
    await forks_at_all(caller, parent, paused)
    await caller.post(f"/{parent}/resume")
    whole = await caller.reaches(parent, "completed")
    await forks_at_all(caller, parent, whole)
    assert {point["name"] for point in whole["checkpoints"]} == {"system", "prompt", "pause", "turn"}
    token = whole["checkpoints"][1]["token"] - 300
    child = await fork(caller, parent, {"token": token})
    assert 0 < child["recomputed_tokens"] <= token - whole["checkpoints"][0]["token"]


async def forks_at_all(caller: Caller, parent: str, told: dict[str, Any]) -> None:
    """Each child finds all of its parent's, by what the engine says of it."""
    for point in told["checkpoints"]:
        forked = await fork(caller, parent, {"checkpoint": point["name"]})
        assert (forked["parent_tokens"], forked["recomputed_tokens"]) == (point["token"], 0), point
        child = await caller.reaches(forked["id"], "completed")
        usage = child["usage"]
        assert usage["cached_tokens"] >= point["token"] - 1


async def fork(caller: Caller, parent: str, at: dict[str, Any]) -> dict[str, Any]:
    body = {"input": words(8, 20), "max_tokens": 5, "temperature": 0, "logit_bias": NO_MARKERS}
    return await caller.post(f"/{parent}/fork", at=at, **body)


async def test_a_killed_gateways_runs_go_on_at_the_next(served: Served, caller: Caller) -> None:
    ids = [await caller.create(words(seed, 600), 400) for seed in (3, 4)]
    paused = await caller.create(words(5, 600), 400)
    await caller.reaches(paused, "decoding")
    await caller.post(f"/{paused}/pause")
    served.kill_child("gateway gateway")
    await asyncio.sleep(1)
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await caller.get(paused))["status"] == "paused"
                break
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    assert (await caller.post(f"/{paused}/resume"))["recomputed_tokens"] == 0
    for run_id in [*ids, paused]:
        run = await caller.reaches(run_id, "completed")
        assert run["usage"]["completion_tokens"] == 400
