"""A hybrid model over real processes and a real bus: agents go on from checkpoints of recurrent states.

One server keeps prefixes, a second computes every prompt anew: what they answer must be the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .hybrid_folder import (
    CALL_TEXT,
    Agent,
    Metrics,
    Said,
    call_message,
    call_token,
    make_chatting_hybrid,
    words,
)
from .served import Answer, Client, Served, until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

NUM_STATES = 8
POOL_TOKENS = 65_536
FLAGS = ("--kv-bits", "native", "--pool-tokens", str(POOL_TOKENS), "--keepalive-seconds", "0.02")
SYSTEM = {"role": "system", "content": words(0, 700)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatting_hybrid(tmp_path_factory.mktemp("models") / "a hybrid")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    """Keeps prefixes and their states."""
    yield from serving(tmp_path_factory.mktemp("warm") / "home", model, "--states", str(NUM_STATES))


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    """Keeps nothing after a turn."""
    yield from serving(tmp_path_factory.mktemp("cold") / "home", model, "--no-prefix-cache")


def serving(home: Path, model: Path, *flags: str) -> Iterator[Served]:
    served = Served(home, model, *FLAGS, *flags)
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        yield session


def user(seed: int, num_chars: int) -> dict[str, Any]:
    return {"role": "user", "content": words(seed, num_chars)}


def generated(num_tokens: float) -> Callable[[Metrics], bool]:
    """Whether the engine is at rest and has generated so many tokens."""

    def is_so(metrics: Metrics) -> bool:
        at_work = ("turns_running", "turns_waiting", "pages_live")
        is_idle = not any(metrics(f"engine_{name}") for name in at_work)
        return is_idle and metrics("engine_tokens_generated_total") >= num_tokens

    return is_so


async def work(agent: Agent, seed: int, tool: int) -> list[Said]:
    """Three turns: an answer in words, a call of the tool, an answer to its result."""
    said = [await agent.ask(24, SYSTEM, user(seed, 500))]
    said.append(await agent.ask(1, user(seed + 1, 100), logit_bias={str(tool): 100}))
    assert said[-1].text == CALL_TEXT
    agent.messages[-1] = call_message()
    said.append(await agent.ask(24, {"role": "tool", "content": words(seed + 2, 100)}))
    return said


async def work_of_two(
    http: aiohttp.ClientSession, served: Served, tool: int
) -> tuple[list[Said], list[Said]]:
    planner = Agent(http, served.url, "planner")
    reader = Agent(http, served.url, "reader", parent="planner")
    return await asyncio.gather(work(planner, 10, tool), work(reader, 20, tool))


async def test_agents_go_on_where_their_last_turns_ended_and_say_what_a_cold_server_says(
    http: aiohttp.ClientSession, warm: Served, cold: Served, model: Path
) -> None:
    tool = call_token(model)
    told = await work_of_two(http, warm, tool)
    assert await work_of_two(http, cold, tool) == told
    for agent in told:
        for before, said in pairwise(agent):
            assert said.cached_tokens == before.prompt_tokens + before.completion_tokens - 1
    num_generated = 2 * (24 + 1 + 24)
    await Metrics.until(http, warm.url, lambda metrics: metrics("engine_turns_restored_total") >= 4)
    metrics = await Metrics.until(http, cold.url, generated(num_generated))
    for name in ("turns_restored_total", "prompt_tokens_cached_total", "checkpoints", "pages_tree"):
        assert metrics(f"engine_{name}") == 0


async def test_health_and_metrics_show_the_states(http: aiohttp.ClientSession, warm: Served) -> None:
    await Agent(http, warm.url, "shown").ask(2, user(30, 300))
    metrics = await Metrics.until(http, warm.url, lambda metrics: metrics("engine_checkpoints") >= 1)
    async with Client(warm.url) as client:
        (engine,) = (await client.health())["engines"]
    states = engine["states"]
    assert (states["dtype"], states["num_states"]) == ("float32", NUM_STATES)
    assert states["total_bytes"] == (NUM_STATES + 4) * states["bytes_per_state"]
    assert engine["settings"]["kvcache"]["states"] == NUM_STATES
    assert metrics("engine_states") == NUM_STATES
    assert metrics("engine_state_bytes") == states["total_bytes"]
    assert metrics("engine_states_free") + metrics("engine_checkpoints") == NUM_STATES


async def test_four_streams_at_once_say_what_each_says_alone(warm: Served, cold: Served) -> None:
    prompts = [list(words(40 + number, 130 * (number + 1)).encode()) for number in range(4)]
    async with Client(warm.url) as client, Client(cold.url) as neighbour:
        at_once = await asyncio.gather(*(client.stream(prompt, 40) for prompt in prompts))
        alone = [await neighbour.stream(prompt, 40) for prompt in prompts]
        again = await asyncio.gather(*(client.stream(prompt, 40) for prompt in prompts))
    assert [answer.text for answer in at_once] == [answer.text for answer in alone]
    assert [answer.text for answer in again] == [answer.text for answer in alone]
    for answer, prompt in zip(again, prompts, strict=True):  # nothing was left to compute but the head
        assert answer.usages[0]["prompt_tokens_details"]["cached_tokens"] == len(prompt)


async def test_what_a_client_that_left_had_computed_is_gone_on_from(warm: Served, cold: Served) -> None:
    prompt = list(words(50, 5000).encode())
    async with Client(warm.url) as client, Client(cold.url) as neighbour:
        await client.until_idle()
        answer = Answer()
        call = asyncio.create_task(client.stream(prompt, 8, answer))
        await until(lambda: answer.num_processed > 0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not answer.text
        await client.until_idle()
        _, again = await client.plain(prompt, 8)
        _, expected = await neighbour.plain(prompt, 8)
    assert 0 < again["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt)
    assert again["choices"][0]["text"] == expected["choices"][0]["text"]


async def test_a_cancelled_session_ends_its_agents_and_gives_pages_and_states_back(
    http: aiohttp.ClientSession, warm: Served
) -> None:
    await Agent(http, warm.url, "outsider", session="elsewhere").ask(4, user(59, 100))
    await asyncio.sleep(2)  # what engines say of themselves is older than that nowhere
    before = await Metrics.scrape(http, warm.url)
    parent = Agent(http, warm.url, "boss", session="tree")
    await parent.ask(4, user(60, 1200))
    children = [
        Agent(http, warm.url, f"child {n}", "tree", "boss", [*parent.messages, user(61 + n, 50)])
        for n in range(6)  # two of them wait
    ]
    answers = [Answer() for _ in children]
    pairs = zip(children, answers, strict=True)
    streams = [asyncio.create_task(child.stream(1500, answer)) for child, answer in pairs]
    await until(lambda: sum(bool(answer.text) for answer in answers) == 4, 60)
    async with http.post(f"{warm.url}/v1/sessions/tree/cancel", json={}) as response:
        assert await response.json() == {"session": "tree", "num_cancelled": 6}
    await asyncio.wait_for(asyncio.gather(*streams), 10)
    for answer in answers:
        assert [error["code"] for error in answer.errors] == ["cancelled"]
        assert not answer.finish_reasons
    num_generated = before("engine_tokens_generated_total") + 4 + 4
    after = await Metrics.until(http, warm.url, generated(num_generated))
    assert after("engine_pages_free") >= before("engine_pages_free")
    assert after("engine_pages_pinned") == before("engine_pages_pinned")
    assert after("engine_pages_free") + after("engine_pages_tree") == POOL_TOKENS // 64
    assert after("engine_states_free") + after("engine_checkpoints") == NUM_STATES


async def test_a_prefix_whose_state_made_room_is_a_miss_with_a_cause(
    http: aiohttp.ClientSession, warm: Served
) -> None:
    before = await Metrics.scrape(http, warm.url)
    early = Agent(http, warm.url, "early", session="missing")
    await early.ask(4, user(70, 1500))
    for number in range(NUM_STATES):
        await Agent(http, warm.url, "late", session=f"other {number}").ask(4, user(71 + number, 100))
    said = await early.ask(4, user(80, 50))
    assert said.cached_tokens < 256  # of the tools, which all have in common

    def is_missed(metrics: Metrics) -> bool:
        name, cause = "missed_tokens_total", 'cause="evicted"'
        return metrics(name, cause) - before(name, cause) > 1500

    after = await Metrics.until(http, warm.url, is_missed)
    assert after("engine_states_evicted_total") > before("engine_states_evicted_total")


async def test_a_killed_engine_ends_hybrid_streams_clearly_and_its_next_one_begins_empty(
    http: aiohttp.ClientSession, warm: Served
) -> None:
    first = await Agent(http, warm.url, "survivor").ask(4, user(90, 600))
    before = await Metrics.until(http, warm.url, generated(4))
    agents = [Agent(http, warm.url, f"lost {n}", messages=[user(91 + n, 600)]) for n in range(4)]
    answers = [Answer() for _ in agents]
    pairs = zip(agents, answers, strict=True)
    streams = [asyncio.create_task(agent.stream(1500, answer)) for agent, answer in pairs]
    await until(lambda: all(answer.text for answer in answers), 60)
    warm.kill_child("workers engine")
    await asyncio.wait_for(asyncio.gather(*streams), 10)
    for answer in answers:
        assert [error["code"] for error in answer.errors] == ["engine_lost"]
        assert not answer.finish_reasons
    async with Client(warm.url) as client:
        await client.until_served()
    agent = Agent(http, warm.url, "survivor")
    again = await agent.ask(4, user(90, 600))
    assert (again, again.cached_tokens) == (first, 0)
    said = await agent.ask(4, user(99, 100))
    assert said.cached_tokens == again.prompt_tokens + again.completion_tokens - 1
    num_restored = before("engine_turns_restored_total") + 1  # goes on over the engine's lives
    await Metrics.until(
        http, warm.url, lambda metrics: metrics("engine_turns_restored_total") >= num_restored
    )
