"""A plain call obeys the budget of the tree that its names belong to, and counts in it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from gateway.bus import Bus
from gateway.store.store import store_in
from gateway.store.tree_usage import Used
from tests.conftest import ValkeyServer
from workers.messages import RUNS_LIVE_KEY

from .bus_fixture import connected
from .fake_engine import until
from .native_client import NativeClient
from .samples import TOOLS
from .talking_engine import TalkingEngine
from .test_native_real import answers, get, reaches, serving

HI = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"model": "default", "input": "Hi"},
    "/v1/messages": {"model": "default", "max_tokens": 50, "messages": HI},
}


async def root(client: NativeClient, **tree_budget: int) -> str:
    """A run that has ended, at the root of a tree with this budget."""
    run_id = await client.create(session="s", agent="boss", tree_budget=tree_budget)
    await reaches(client, run_id, lambda told: told["status"] == "completed")
    return run_id


async def used(bus: Bus, tree: str) -> Used:
    return await store_in(bus).tree_usage.total(tree)


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(
    "names",
    [
        {"X_Tetrarch_Session": "s", "X_Tetrarch_Agent": "helper", "X_Tetrarch_Parent": "boss"},
        {"X_Tetrarch_Agent": "helper", "X_Tetrarch_Parent": "boss"},
        {"X_Tetrarch_Session": "s", "X_Tetrarch_Agent": "boss"},
        {"X_Tetrarch_Session": "s"},
    ],
    ids=["parent", "parent alone", "agent", "session"],
)
async def test_a_call_counts_in_the_tree_of_its_names(
    valkey: ValkeyServer, tmp_path: Path, path: str, names: dict[str, str]
) -> None:
    async with (
        TalkingEngine(valkey.url, answers),
        serving(valkey.url, tmp_path) as client,
        connected(valkey.url) as bus,
    ):
        tree = await root(client, output_tokens=1000)
        before = await used(bus, tree)
        status, told = await client.call("POST", path, CALLS[path], **names)
        assert status == 200, told
        usage = told["usage"]
        after = await used(bus, tree)
        assert after.output_tokens - before.output_tokens == (
            usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
        )
        assert after.prompt_tokens > before.prompt_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", CALLS)
async def test_a_call_under_a_spent_tree_is_refused_in_its_own_protocols_shape(
    valkey: ValkeyServer, tmp_path: Path, path: str, is_streamed: bool
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        tree = await client.create(session="s", agent="boss", tree_budget={"output_tokens": 5})
        await reaches(client, tree, lambda told: told["status"] == "failed")
        num_turns = len(engine.turns)
        headers = {"X-Tetrarch-Agent": "helper", "X-Tetrarch-Parent": "boss"}
        body = {**CALLS[path], "stream": is_streamed}
        async with client.http.post(client.url + path, json=body, headers=headers) as response:
            told = await response.json()
            assert response.status == 429
            assert response.headers["x-should-retry"] == "false"
            assert "Retry-After" not in response.headers
        error = told["error"]
        assert tree in error["message"] and "tree_budget.output_tokens is 5" in error["message"]
        if path == "/v1/messages":
            assert (told["type"], error["type"]) == ("error", "rate_limit_error")
        else:
            assert (error["type"], error["code"]) == ("insufficient_quota", "budget_exceeded")
        assert len(engine.turns) == num_turns


async def test_a_call_gets_what_its_tree_has_left_and_its_part_is_kept(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with (
        TalkingEngine(valkey.url, answers) as engine,
        serving(valkey.url, tmp_path) as client,
        connected(valkey.url) as bus,
    ):
        alone = await reaches(client, await client.create(), lambda told: told["status"] == "completed")
        limit = alone["usage"]["completion_tokens"] + 3
        tree = await root(client, output_tokens=limit)
        names = {"X-Tetrarch-Agent": "helper", "X-Tetrarch-Parent": "boss"}
        body = CALLS["/v1/chat/completions"]
        url = client.url + "/v1/chat/completions"
        async with client.http.post(url, json=body, headers=names) as response:
            told, run_id = await response.json(), response.headers["x-tetrarch-run"]
            assert (response.status, told["error"]["code"]) == (429, "budget_exceeded")
        assert engine.turns[-1].submit.max_tokens == 3
        kept = await get(client, run_id)
        assert (kept["status"], kept["result"]["partial"]) == ("failed", True)
        assert kept["result"]["text"]
        assert (await used(bus, tree)).output_tokens == limit


async def test_calls_of_calls_are_in_the_tree_at_every_gateway(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with (
        TalkingEngine(valkey.url, answers),
        serving(valkey.url, tmp_path) as client,
        serving(valkey.url, tmp_path, "g2") as second,
        connected(valkey.url) as bus,
    ):
        tree = await root(client, output_tokens=1000)
        chat = CALLS["/v1/chat/completions"]
        names = {"X_Tetrarch_Session": "other", "X_Tetrarch_Agent": "b", "X_Tetrarch_Parent": "a"}
        await second.call("POST", "/v1/chat/completions", chat, **names)
        before = await used(bus, tree)
        for parent, agent in (("boss", "a"), ("a", "b"), ("b", "c")):
            names = {"X_Tetrarch_Session": "s", "X_Tetrarch_Agent": agent, "X_Tetrarch_Parent": parent}
            status, _ = await second.call("POST", "/v1/chat/completions", chat, **names)
            assert status == 200
        below = await client.create(session="s", agent="d", parent="c", max_tokens=4)
        await reaches(client, below, lambda told: told["status"] == "completed")
        after = await used(bus, tree)
        assert after.prompt_tokens > before.prompt_tokens
        _, told = await client.call("GET", "/v1/sessions/s/tree")
        assert told["usage"]["completion_tokens"] == after.output_tokens
        assert told["usage"]["prompt_tokens"] == after.prompt_tokens


async def test_the_calls_of_others_are_not_held_to_a_spent_trees_budget(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers), serving(valkey.url, tmp_path) as client:
        await root(client, tool_calls=0, prompt_tokens=100)
        chat = {"messages": [{"role": "user", "content": "word " * 100}]}
        url = client.url + "/v1/chat/completions"
        assert await _status(client.http, url, chat, {"X-Tetrarch-Session": "s"}) == 429
        assert await _status(client.http, url, chat, {"X-Tetrarch-Session": "t"}) == 200
        assert await _status(client.http, url, chat, {}) == 200


async def test_the_newest_tree_of_a_session_counts(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with TalkingEngine(valkey.url, answers), serving(valkey.url, tmp_path) as client:
        old = await client.create(session="s", agent="old", tree_budget={"output_tokens": 5})
        await reaches(client, old, lambda told: told["status"] == "failed")
        await client.create(session="s", agent="new", tree_budget={"output_tokens": 500})
        chat = CALLS["/v1/chat/completions"]
        url = client.url + "/v1/chat/completions"
        assert await _status(client.http, url, chat, {"X-Tetrarch-Session": "s"}) == 200
        under_old = {"X-Tetrarch-Session": "s", "X-Tetrarch-Parent": "old", "X-Tetrarch-Agent": "x"}
        assert await _status(client.http, url, chat, under_old) == 429


async def test_an_agent_of_an_older_tree_is_in_the_newest_once_the_older_root_has_ended(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers), serving(valkey.url, tmp_path) as client:
        limits = {"tool_calls": 1}
        old = await client.create(session="s", agent="old", on_end="await_input", tree_budget=limits)
        await reaches(client, old, lambda told: told["status"] == "input_required")
        url, chat = client.url + "/v1/chat/completions", CALLS["/v1/chat/completions"]
        names = {"X-Tetrarch-Session": "s", "X-Tetrarch-Agent": "helper"}
        calls = {**chat, "tools": TOOLS}
        assert [await _status(client.http, url, calls, names) for _ in range(2)] == [200, 429]
        new = await client.create(session="s", agent="new", on_end="await_input", tree_budget=limits)
        await reaches(client, new, lambda told: told["status"] == "input_required")
        assert await _status(client.http, url, chat, names) == 429
        await client.call("POST", f"/v1/runs/{old}/cancel")
        with valkey.client() as keys:
            await until(lambda: not keys.sismember(RUNS_LIVE_KEY, old))
        assert await _status(client.http, url, chat, names) == 200
        under_old = {**names, "X-Tetrarch-Parent": "old"}
        assert await _status(client.http, url, chat, under_old) == 429


async def test_the_calls_of_a_newer_tree_without_a_budget_are_free(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers), serving(valkey.url, tmp_path) as client:
        old = await client.create(session="s", agent="boss", tree_budget={"output_tokens": 5})
        await reaches(client, old, lambda told: told["status"] == "failed")
        url, chat = client.url + "/v1/chat/completions", CALLS["/v1/chat/completions"]
        names = [
            {"X-Tetrarch-Session": "s"},
            {"X-Tetrarch-Session": "s", "X-Tetrarch-Agent": "boss"},
            {"X-Tetrarch-Session": "s", "X-Tetrarch-Agent": "helper", "X-Tetrarch-Parent": "boss"},
        ]
        assert {await _status(client.http, url, chat, headers) for headers in names} == {429}
        await client.create(session="s", agent="boss")
        assert {await _status(client.http, url, chat, headers) for headers in names} == {200}


async def test_no_call_is_held_to_the_tree_of_a_deleted_root(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with TalkingEngine(valkey.url, answers), serving(valkey.url, tmp_path) as client:
        url, chat = client.url + "/v1/chat/completions", CALLS["/v1/chat/completions"]
        trees = []
        for session in ("s", "t"):
            trees.append(await client.create(session=session, agent="boss", tree_budget={"tool_calls": 1}))
            await reaches(client, trees[-1], lambda told: told["status"] == "completed")
        helper = {"X-Tetrarch-Agent": "helper", "X-Tetrarch-Parent": "boss"}
        for session in ("s", "t"):
            body, names = {**chat, "tools": TOOLS}, {**helper, "X-Tetrarch-Session": session}
            assert [await _status(client.http, url, body, names) for _ in range(2)] == [200, 429]
        status, _ = await client.call("DELETE", f"/v1/runs/{trees[0]}")
        assert status == 200
        for session, expected in (("s", 200), ("t", 429)):
            for names in ({}, {"X-Tetrarch-Agent": "boss"}, {"X-Tetrarch-Agent": "helper"}, helper):
                names = {**names, "X-Tetrarch-Session": session}
                assert await _status(client.http, url, chat, names) == expected, names


async def test_a_calls_tool_calls_beyond_its_trees_budget_are_no_answer(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers), serving(valkey.url, tmp_path) as client:
        await root(client, tool_calls=1)
        url, names = client.url + "/v1/chat/completions", {"X-Tetrarch-Session": "s"}
        body = {**CALLS["/v1/chat/completions"], "tools": TOOLS}
        assert await _status(client.http, url, body, names) == 200
        async with client.http.post(url, json=body, headers=names) as response:
            assert response.status == 429
            assert "tree_budget.tool_calls is 1" in (await response.json())["error"]["message"]


async def test_a_child_of_a_tree_that_has_read_all_it_may_reaches_no_engine(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        tree = await root(client, prompt_tokens=20)
        child = await client.create(parent_run=tree, input="word " * 50)
        told = await reaches(client, child, lambda told: told["status"] == "failed")
        assert told["error"]["code"] == "budget_exceeded"
        assert len(engine.turns) == 1


async def test_a_trees_time_is_over_for_its_children_and_its_calls(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        tree = await client.create(
            session="s", agent="boss", on_end="await_input", tree_budget={"wall_ms": 5000}
        )
        await reaches(client, tree, lambda told: told["status"] == "input_required")
        chat, url = CALLS["/v1/chat/completions"], client.url + "/v1/chat/completions"
        assert await _status(client.http, url, chat, {"X-Tetrarch-Session": "s"}) == 200
        engine.allowed = 3
        child = await client.create(parent_run=tree)
        grandchild = await client.create(parent_run=child)
        reading = asyncio.create_task(_status(client.http, url, chat, {"X-Tetrarch-Session": "s"}))
        for run_id in (child, grandchild):
            told = await reaches(client, run_id, lambda told: told["status"] == "failed")
            assert "tree_budget.wall_ms is 5000" in told["error"]["message"]
        assert await reading == 429
        num_turns = len(engine.turns)
        late = await client.create(parent_run=tree)
        told = await reaches(client, late, lambda told: told["status"] == "failed")
        assert told["error"]["code"] == "budget_exceeded"
        assert len(engine.turns) == num_turns


async def test_calls_after_the_roots_end_have_their_own_time_and_its_other_limits(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with (
        TalkingEngine(valkey.url, answers),
        serving(valkey.url, tmp_path) as client,
        connected(valkey.url) as bus,
    ):
        tree = await root(client, wall_ms=5000, tool_calls=1)
        ends = time.monotonic() + 5
        with valkey.client() as keys:
            await until(lambda: not keys.sismember(RUNS_LIVE_KEY, tree))
        chat, url = CALLS["/v1/chat/completions"], client.url + "/v1/chat/completions"
        under = [{"X-Tetrarch-Session": "s"}, {"X-Tetrarch-Session": "s", "X-Tetrarch-Agent": "boss"}]
        await asyncio.sleep(max(ends - time.monotonic(), 0))
        before = await used(bus, tree)
        for names in under:
            assert await _status(client.http, url, chat, names) == 200
        assert (await used(bus, tree)).output_tokens > before.output_tokens
        calls = {**chat, "tools": TOOLS}
        assert [await _status(client.http, url, calls, names) for names in under] == [200, 429]


async def _status(http: ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]) -> int:
    async with http.post(url, json=body, headers=headers) as response:
        return response.status
