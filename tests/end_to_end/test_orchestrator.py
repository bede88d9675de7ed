"""An orchestrator's session over real processes: forty runs in a tree three deep, and what befalls them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp
import pytest
from redis import Redis

from gateway.client import (
    ENDINGS,
    Budget,
    Client,
    NotFound,
    RunBody,
    RunHandle,
    TokenText,
    TreeBody,
    Unreachable,
)
from gateway.runs.told import RunAccepted
from gateway.serving.paths import home_at

from .books import Counters, counters, events_of, prompts_of, work_of
from .books import num_ends as num_ends_of
from .hybrid_folder import NO_MARKERS, make_chatting_hybrid, words
from .served import Served

pytestmark = [pytest.mark.end_to_end, pytest.mark.gate, pytest.mark.timeout(240)]

FLAGS = ("--kv-bits", "native", "--pool-tokens", "65536", "--states", "32")
SESSION = "audit"
NUM_LEAVES = 33
LONG, SHORT = 500, 12


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_chatting_hybrid(tmp_path_factory.mktemp("models") / "a hybrid")
    serving = Served(tmp_path_factory.mktemp("orchestrator") / "home", model, *FLAGS)
    try:
        serving.wait_ready()
        yield serving
    finally:
        serving.close()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    async with Client(served.url) as client:
        yield client


def asked(seed: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A run of exactly so many tokens, if nothing ends it."""
    body = {"input": words(seed, 60), "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
    return body | {"logit_bias": NO_MARKERS, "session": SESSION} | fields


class Listener:
    """Reads a run's events from its start to its end, leaving in between as a bad connection would."""

    def __init__(self, run: RunHandle, every: int) -> None:
        self.text = ""
        self.kinds: Counter[str] = Counter()
        self._run = run
        self._every = every

    async def listen(self) -> None:
        after = "0-0"
        while not any(self.kinds[kind.__name__] for kind in ENDINGS):
            async with self._run.stream(after) as events:
                num_seen = 0
                async for event in events:
                    self.kinds[type(event).__name__] += 1
                    self.text += event.text if isinstance(event, TokenText) else ""
                    num_seen += 1
                    if num_seen >= self._every and events.last_id != after:
                        break
                after = events.last_id


async def test_forty_runs_in_a_tree_three_deep_each_end_once_and_add_up(
    served: Served, client: Client
) -> None:
    async with aiohttp.ClientSession() as http:
        before = await counters(http, served.url)
    root = await client.spawn(**asked(1, LONG, agent="lead", messages=None, label="root"))
    await decoding(root)
    middle = [await root.fork(**asked(10 + n, SHORT, agent=f"m{n}")) for n in range(3)]
    told = [child.created.recomputed_tokens for child in middle if child.created]
    assert set(told) <= {0, None}  # None: still in line when it was answered
    steered, paused, doomed = [
        await client.spawn(**asked(20 + n, LONG, agent=f"m{3 + n}", parent_run=root.id)) for n in range(3)
    ]
    middle += [steered, paused, doomed]
    listener = Listener(root, every=7)
    listening = asyncio.create_task(listener.listen())

    leaves = await spawn_leaves(client, middle)
    assert (await steered.steer("Look at the tests first.")).applied in ("now", "next_turn")
    await decoding(paused)
    assert (await paused.pause()).status == "paused"
    below = [run for run, parent in leaves if parent is doomed]
    assert ((await doomed.cancel(tree=True)).num_runs or 0) >= 1

    served.kill_child("gateway gateway")
    resumed = await patiently(paused.resume)
    assert resumed.recomputed_tokens in (0, None)
    runs = [root, *middle, *(run for run, _ in leaves)]
    assert len(runs) == 40
    ended = {run.id: run for run in (await client.wait(runs, until="ended", seconds=150)).done}
    await asyncio.wait_for(listening, 30)

    assert len(ended) == 40
    assert listener.text == result_of(ended[root.id])
    assert sum(listener.kinds[kind.__name__] for kind in ENDINGS) == 1
    assert ended[steered.id].status == "completed" and ended[steered.id].turn == 2
    assert ended[paused.id].usage.completion_tokens == LONG
    assert {ended[run.id].status for run in [doomed, *below]} <= {"cancelled", "completed"}
    assert ended[doomed.id].status == "cancelled"
    check_specials([ended[run.id] for run, _ in leaves])
    for run in runs:
        assert await num_ends(run) == 1
    async with aiohttp.ClientSession() as http:
        done = await counters(http, served.url) - before
    check_books(served, ended, done)
    await check_log(client, set(ended))
    used = sum(run.usage.completion_tokens for run in ended.values())
    tree = await quiet_tree(client)
    assert (tree.num_runs, tree.num_live, tree.usage.completion_tokens) == (40, 0, used)
    assert [agent.agent for agent in tree.agents] == ["lead"]


async def spawn_leaves(client: Client, middle: list[RunHandle]) -> list[tuple[RunHandle, RunHandle]]:
    """33 runs below the six, among them one that a budget ends and one that a deadline ends; with parents."""
    parents = [middle[n % len(middle)] for n in range(NUM_LEAVES)]
    bodies = [asked(100 + n, SHORT, agent=f"leaf{n}", parent_run=parents[n].id) for n in range(NUM_LEAVES)]
    bodies[0] |= {"max_tokens": LONG, "budget": Budget(output_tokens=20), "label": "budget"}
    bodies[1] |= {"max_tokens": 4000, "deadline_ms": 1500, "label": "deadline"}
    bodies[5] |= {"max_tokens": LONG}  # below the one whose subtree is cancelled
    leaves = []
    for body, parent in zip(bodies, parents, strict=True):
        leaves.append((await client.spawn(**body), parent))
    return leaves


def check_specials(leaves: list[RunBody]) -> None:
    by_label = {run.label: run for run in leaves if run.label}
    limited, late = by_label["budget"], by_label["deadline"]
    assert limited.status == "failed" and limited.error and limited.error.code == "budget_exceeded"
    assert limited.usage.completion_tokens == 20 and limited.result and limited.result.partial
    assert late.status == "expired"
    others = [run for run in leaves if not run.label and run.status != "cancelled"]
    assert {run.status for run in others} == {"completed"}


def result_of(run: RunBody) -> str:
    assert run.result is not None, run
    return run.result.text


async def num_ends(run: RunHandle) -> int:
    async with run.stream(follow=False) as events:
        return len([event async for event in events if isinstance(event, ENDINGS)])


async def decoding(run: RunHandle) -> None:
    async with asyncio.timeout(60), run.stream() as events:
        async for event in events:
            if isinstance(event, TokenText):
                return


async def patiently(verb: Any) -> Any:
    """Tries a verb until the next gateway is there."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await verb()
            except (Unreachable, NotFound):
                await asyncio.sleep(0.2)


def check_books(served: Served, ended: Mapping[str, RunBody], done: Counters) -> None:
    """What the engine has counted is what the runs' events tell, and that is what their usage says."""
    work = Counters()
    with Redis.from_url(home_at(served.home, os.environ).bus_url) as bus:
        for run_id, run in ended.items():
            events = events_of(bus, run_id)
            assert num_ends_of(events) == 1
            usage = run.usage
            assert (usage.prompt_tokens, usage.cached_tokens) == prompts_of(events), run_id
            work += work_of(events)
    assert work == done
    assert done.generated == sum(run.usage.completion_tokens for run in ended.values())


async def check_log(client: Client, runs: set[str]) -> None:
    """The session's own stream tells each run's beginning and end, once each."""
    async with client.events(SESSION, follow=False) as events:
        told = [event async for event in events]
    for kinds in ((RunAccepted,), ENDINGS):
        assert Counter(event.run for event in told if isinstance(event, kinds)) == Counter(runs)


async def quiet_tree(client: Client) -> TreeBody:
    """What lists say of a run may be a moment old."""
    async with asyncio.timeout(10):
        while (tree := await client.tree(SESSION)).num_live:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    return tree
