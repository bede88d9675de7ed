"""The native API over real runs and a real Valkey; only the engine is a fake: what an orchestrator does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.callers.tokens import TokenStore
from gateway.http.app import Parts, build_app
from gateway.settings import GatewaySettings
from metrics.instruments import Instruments
from tests.conftest import ValkeyServer
from workers.messages import RUNS_LIVE_KEY

from .chatting import CALL
from .fake_engine import until
from .native_client import NativeClient, Told
from .samples import TOOLS
from .talking_engine import TalkingEngine
from .test_runs import gateway

FIRST, SECOND = "The quick brown fox jumps over the lazy dog", "Fine"


def answers(prompt: str) -> str:
    """Calls a tool where there are some, else two answers, one after the other."""
    if "read_file" in prompt:
        return "done" if "contents" in prompt else CALL
    return FIRST if prompt.count("<|im_start|>assistant") == 1 else SECOND


@asynccontextmanager
async def serving(
    url: str, folder: Path, name: str = "g1", *, kill: bool = False
) -> AsyncIterator[NativeClient]:
    """One gateway with all its parts."""
    async with gateway(url, name, kill=kill) as gate, aiohttp.ClientSession() as http:
        app = build_app(
            GatewaySettings(keepalive_seconds=5.0),
            Parts(
                gate.runs,
                gate.directory,
                TokenStore(folder / "tokens.json"),
                instruments=Instruments(),
                store=gate.runs.keeper.store,
            ),
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield NativeClient(http, f"http://{host}:{port}")
        finally:
            await runner.cleanup()


@pytest.fixture
async def engine(valkey: ValkeyServer) -> AsyncIterator[TalkingEngine]:
    async with TalkingEngine(valkey.url, answers) as talking:
        yield talking


@pytest.fixture
async def client(engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[NativeClient]:
    async with serving(valkey.url, tmp_path) as started:
        yield started


async def get(client: NativeClient, run_id: str) -> Told:
    status, told = await client.call("GET", f"/v1/runs/{run_id}")
    assert status == 200, told
    return told


async def reaches(client: NativeClient, run_id: str, holds: Callable[[Told], bool]) -> Told:
    async with asyncio.timeout(10):
        while not holds(told := await get(client, run_id)):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    return told


async def test_a_run_is_created_followed_and_read_again(client: NativeClient) -> None:
    run_id = await client.create(session="s", agent="a")
    events = await client.stream(f"/v1/runs/{run_id}/events")
    assert "".join(told["text"] for told in events if told["type"] == "token") == FIRST
    assert events[-1]["type"] == "run.completed"
    told = await get(client, run_id)
    assert (told["status"], told["result"]["text"], told["turn"]) == ("completed", FIRST, 1)
    assert told["usage"]["total_tokens"] == events[-1]["usage"]["total_tokens"] > 0
    logged = await client.stream("/v1/sessions/s/events?follow=false")
    assert [event["type"] for event in logged] == [
        event["type"] for event in events if event["type"] not in ("token", "run.progress")
    ]
    _, tree = await client.call("GET", "/v1/sessions/s/tree")
    assert tree["agents"][0]["runs"][0]["status"] == "completed"
    assert tree["usage"]["total_tokens"] == told["usage"]["total_tokens"]
    assert (await client.call("DELETE", f"/v1/runs/{run_id}"))[0] == 200
    assert (await client.call("GET", f"/v1/runs/{run_id}"))[0] == 404


async def test_a_deleted_run_is_not_run_again_by_its_key(client: NativeClient, engine: TalkingEngine) -> None:
    ask = ("POST", "/v1/runs", {"input": "Hi"})
    _, first = await client.call(*ask, Idempotency_Key="k")
    assert {first["session"], first["agent"]} == {first["id"]}
    await reaches(client, first["id"], lambda told: told["status"] == "completed")
    num_asked = len(engine.turns)
    assert (await client.call("DELETE", f"/v1/runs/{first['id']}"))[0] == 200
    status, told = await client.call(*ask, Idempotency_Key="k")
    assert (status, told["error"]["code"]) == (409, "run_gone")
    assert (await client.call("GET", "/v1/runs"))[1]["data"] == []
    assert len(engine.turns) == num_asked == 1


async def ask(client: NativeClient, **fields: Any) -> tuple[str, str]:
    """A response of OpenAI's API, and the run behind it."""
    status, told = await client.call("POST", "/v1/responses", {"input": "Hi", **fields})
    assert status == 200, told
    return told["id"], f"run-{told['id'].removeprefix('resp_')}"


async def is_gone(client: NativeClient, response: str, run_id: str) -> bool:
    """From everywhere."""
    paths = (
        f"/v1/runs/{run_id}",
        f"/v1/runs/{run_id}/events",
        f"/v1/responses/{response}",
        f"/v1/responses/{response}?stream=true",
        f"/v1/responses/{response}/input_items",
    )
    statuses = []
    for path in paths:
        async with client.http.get(client.url + path) as answer:
            statuses.append(answer.status)
    listed = (await client.call("GET", "/v1/runs"))[1]["data"]
    return statuses == [404] * len(paths) and run_id not in [run["id"] for run in listed]


@pytest.mark.parametrize("by", ["response", "run"])
async def test_a_response_and_its_run_are_deleted_together(
    client: NativeClient, valkey: ValkeyServer, by: str
) -> None:
    response, run_id = await ask(client)
    await reaches(client, run_id, lambda told: told["result"] is not None)
    assert (await client.call("GET", f"/v1/responses/{response}"))[0] == 200
    with valkey.client() as connection:  # kept a moment behind the end
        await until(lambda: bool(connection.exists(f"tetrarch:1:run:{run_id}:ids")))
    _, child = await client.call("POST", f"/v1/runs/{run_id}/fork", {"input": "And you?"})
    before = await reaches(client, child["id"], lambda told: told["status"] == "completed")
    path = f"/v1/responses/{response}" if by == "response" else f"/v1/runs/{run_id}"
    assert (await client.call("DELETE", path))[0] == 200
    assert await is_gone(client, response, run_id)
    with valkey.client() as connection:
        left = connection.scan_iter(f"*{run_id.removeprefix('run-')}*")
        assert {key.decode().rsplit(":", 1)[-1] for key in left if b":ids:" not in key} <= {
            "deleted",
            "response",  # that it is deleted
            "ids-removed",
        }
    assert (await client.call("DELETE", path))[0] == 404
    status, told = await client.call(
        "POST", "/v1/responses", {"input": "?", "previous_response_id": response}
    )
    assert (status, told["error"]["code"]) == (400, "previous_response_not_found")
    assert await get(client, child["id"]) == before
    status, told = await client.call("POST", f"/v1/runs/{child['id']}/fork", {"input": "And now?"})
    assert status == 202 and told["parent_tokens"] > before["fork"]["tokens"]


async def test_a_running_response_that_is_deleted_leaves_no_run(
    client: NativeClient, engine: TalkingEngine
) -> None:
    engine.allowed = 3
    response, run_id = await ask(client, background=True)
    await reaches(client, run_id, lambda told: told["usage"]["completion_tokens"] == 3)
    assert (await client.call("DELETE", f"/v1/responses/{response}"))[0] == 200
    async with asyncio.timeout(10):
        while not await is_gone(client, response, run_id):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)  # what its owner still keeps behind the end
    assert await is_gone(client, response, run_id)


async def test_a_run_that_was_deleted_while_it_lived_is_forgotten_at_its_end(
    client: NativeClient, engine: TalkingEngine, valkey: ValkeyServer
) -> None:
    engine.allowed = 3
    run_id = await client.create()
    await reaches(client, run_id, lambda told: told["usage"]["completion_tokens"] == 3)
    with valkey.client() as connection:  # by a gateway that did not see its end
        connection.set(f"tetrarch:1:run:{run_id}:deleted", b"")
    engine.allowed = None
    async with asyncio.timeout(10):
        while (await client.call("GET", f"/v1/runs/{run_id}"))[0] != 404:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await client.call("GET", "/v1/runs"))[1]["data"] == []


async def test_a_run_is_steered_paused_and_resumed(client: NativeClient, engine: TalkingEngine) -> None:
    engine.allowed = 3
    run_id = await client.create()
    await reaches(client, run_id, lambda told: told["usage"]["completion_tokens"] == 3)
    status, told = await client.call("POST", f"/v1/runs/{run_id}/pause", {"hold_ms": 5000})
    assert (status, told["status"], told["hold_ms"]) == (200, "paused", 5000)
    assert (await get(client, run_id))["status"] == "paused"
    status, told = await client.call("POST", f"/v1/runs/{run_id}/resume")
    assert (status, told["recomputed_tokens"]) == (200, 0)
    steer = ("POST", f"/v1/runs/{run_id}/steer", {"text": "Brief."})
    status, told = await client.call(*steer, Idempotency_Key="k")
    assert (status, told["applied"], told["turn"]) == (200, "now", 2)
    engine.allowed = None
    _, waited = await client.call("POST", "/v1/runs/wait", {"ids": [run_id], "timeout_ms": 10_000})
    (told,) = waited["done"]
    assert (told["status"], told["result"]["text"], told["turn"]) == ("completed", SECOND, 2)
    _, again = await client.call(*steer, Idempotency_Key="k")
    assert (again["applied"], again["turn"]) == ("now", 2)
    types = [event["type"] for event in await client.stream(f"/v1/runs/{run_id}/events")]
    assert [name for name in types if name in ("run.paused", "run.resumed", "run.steered")] == [
        "run.paused",
        "run.resumed",
        "run.paused",  # a steer stops the turn in the same way
        "run.steered",
    ]


async def test_a_run_tells_why_its_engine_was_chosen(client: NativeClient, engine: TalkingEngine) -> None:
    async def routed(run_id: str) -> list[tuple[str, int]]:
        events = await client.stream(f"/v1/runs/{run_id}/events")
        assert events[-1]["type"] == "run.completed"
        return [(told["reason"], told["cached_tokens"]) for told in events if told["type"] == "run.routed"]

    engine.allowed = 4
    run_id = await client.create(session="s", agent="a")
    await reaches(client, run_id, lambda told: told["usage"]["completion_tokens"] == 4)
    await client.call("POST", f"/v1/runs/{run_id}/pause", {})
    engine.allowed = None
    assert (await client.call("POST", f"/v1/runs/{run_id}/resume"))[0] == 200
    first, second = await routed(run_id)
    num_prompt = (await get(client, run_id))["usage"]["prompt_tokens"]
    assert first == ("cold", 0)
    assert second == ("held", num_prompt), "it has been sent the prompt"
    again = await client.create(session="s", agent="a")
    ((reason, cached),) = await routed(again)
    assert reason == "kin" and 0 < cached < num_prompt
    _, fork = await client.call("POST", f"/v1/runs/{again}/fork", {"input": "And you?", "agent": "b"})
    ((reason, cached),) = await routed(fork["id"])
    assert reason == "held" and cached > 0


async def test_calls_asked_for_are_the_calls_that_were_told(client: NativeClient) -> None:
    run_id = await client.create(tools=TOOLS)
    _, waited = await client.call("POST", "/v1/runs/wait", {"ids": [run_id], "timeout_ms": 10_000})
    (asked,) = waited["done"][0]["input_required"]["calls"]
    told = await client.stream(f"/v1/runs/{run_id}/events?follow=false")
    (made,) = [event for event in told if event["type"] == "tool_call"]
    assert (made["id"], made["name"], made["arguments"]) == (asked["id"], asked["name"], asked["arguments"])
    body = {"outputs": [{"call_id": asked["id"], "output": "contents"}]}
    status, answered = await client.call("POST", f"/v1/runs/{run_id}/respond", body)
    assert (status, answered["turn"]) == (200, 2)
    ended = await reaches(client, run_id, lambda told: told["status"] == "completed")
    assert ended["result"]["text"] == "done"


async def test_a_custom_tool_reaches_the_model_of_a_run(client: NativeClient, engine: TalkingEngine) -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Patches files."}}
    run_id = await client.create(tools=[tool])
    await reaches(client, run_id, lambda told: told["status"] == "completed")
    assert "Patches files." in engine.prompt_of(0)


async def test_a_fork_of_a_live_run_costs_nothing_of_its_parents(
    client: NativeClient, engine: TalkingEngine
) -> None:
    engine.allowed = 5
    parent = await client.create(session="s", agent="p")
    await reaches(client, parent, lambda told: told["usage"]["completion_tokens"] == 5)
    fork = ("POST", f"/v1/runs/{parent}/fork", {"input": "And you?"})
    status, told = await client.call(*fork, Idempotency_Key="f")
    assert status == 202, told
    again = await client.call(*fork, Idempotency_Key="f")
    assert again[1]["id"] == told["id"] and again[1]["replayed"]
    engine.allowed = None
    child = await reaches(client, told["id"], lambda told: told["status"] == "completed")
    assert (child["parent_run"], child["parent"], child["session"]) == (parent, "p", "s")
    assert child["fork"]["tokens"] == told["parent_tokens"] > 5
    await reaches(client, parent, lambda told: told["status"] == "completed")
    _, tree = await client.call("GET", "/v1/sessions/s/tree")
    assert [agent["agent"] for agent in tree["agents"][0]["children"]] == [told["id"]]


async def test_a_subtree_is_cancelled_through_another_gateway(
    client: NativeClient, engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path
) -> None:
    engine.allowed = 2
    root = await client.create(session="s", agent="root")
    child = await client.create(parent_run=root, agent="child")
    leaf = await client.create(parent_run=child, agent="leaf")
    async with serving(valkey.url, tmp_path, "g2") as other:
        reading = asyncio.create_task(other.stream(f"/v1/runs/{leaf}/events"))
        status, told = await other.call("POST", f"/v1/runs/{child}/cancel", {"tree": True})
        assert (status, told["num_runs"], told["status"]) == (200, 2, "cancelled")
        assert (await asyncio.wait_for(reading, 10))[-1]["type"] == "run.cancelled"
        assert (await get(other, root))["status"] != "cancelled"
        with valkey.client() as connection:
            await until(lambda: connection.scard(RUNS_LIVE_KEY) == 1)
        _, told = await other.call("POST", "/v1/sessions/s/cancel")
        assert told["num_cancelled"] == 1
        await reaches(client, root, lambda told: told["status"] == "cancelled")


async def test_budgets_and_deadlines_end_runs_with_what_they_had(
    client: NativeClient, engine: TalkingEngine
) -> None:
    spent = await client.create(budget={"output_tokens": 3})
    engine_told = await reaches(client, spent, lambda told: told["ended"] is not None)
    assert (engine_told["status"], engine_told["error"]["code"]) == ("failed", "budget_exceeded")
    assert engine_told["result"]["partial"] and engine_told["usage"]["completion_tokens"] == 3
    engine.allowed = 2
    late = await client.create(deadline_ms=300)
    told = await reaches(client, late, lambda told: told["ended"] is not None)
    assert told["status"] == "expired" and told["result"]["partial"]


async def test_a_chat_call_shows_in_the_lists_and_the_tree(client: NativeClient) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tetrarch": {"session": "s", "agent": "a"},
    }
    status, _ = await client.call("POST", "/v1/chat/completions", body)
    assert status == 200
    _, listed = await client.call("GET", "/v1/runs?session=s")
    (line,) = listed["data"]
    assert (line["kind"], line["agent"]) == ("call", "a")
    told = await get(client, line["id"])
    assert (told["status"], told["result"]["text"]) == ("completed", FIRST)


async def test_a_large_body_does_not_cost_its_result(client: NativeClient, valkey: ValkeyServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 1500}}]
    run_id = await client.create(input=None, messages=messages, tools=tools, tool_choice="none")
    await reaches(client, run_id, lambda told: told["status"] == "completed")
    with valkey.client() as connection:
        assert int(connection.strlen(f"tetrarch:1:run:{run_id}:result")) < 1000


async def test_a_result_that_does_not_fit_its_schema_is_told_as_derailed(client: NativeClient) -> None:
    run_id = await client.create(result_schema={"type": "object"})
    told = await reaches(client, run_id, lambda told: told["status"] == "completed")
    assert (told["result"]["json"], told["derail"]["kind"]) == (None, "schema")


async def test_what_a_runs_state_does_not_allow_is_a_conflict(
    client: NativeClient, engine: TalkingEngine, valkey: ValkeyServer
) -> None:
    engine.allowed = 3
    run_id = await client.create()
    status, told = await client.call("POST", f"/v1/runs/{run_id}/respond", {"text": "more"})
    assert (status, told["error"]["code"]) == (409, "no_input_required")
    engine.allowed = None
    await reaches(client, run_id, lambda told: told["status"] == "completed")
    with valkey.client() as connection:
        connection.delete(f"tetrarch:1:run:{run_id}:ids")
    status, told = await client.call("POST", f"/v1/runs/{run_id}/fork", {"input": "x"})
    assert (status, told["error"]["code"]) == (409, "ids_gone")


async def test_forks_of_a_batch_do_not_wait_for_one_another(
    client: NativeClient, engine: TalkingEngine
) -> None:
    engine.allowed = 5
    parent = await client.create()
    await reaches(client, parent, lambda told: told["usage"]["completion_tokens"] == 5)
    engine.is_starting = False  # no child gets a worker
    batch = {"runs": [{"input": f"{number}", "fork": {"run": parent}} for number in range(8)]}
    begun = time.monotonic()
    status, told = await client.call("POST", "/v1/runs/batch", batch)
    assert (status, told["num_accepted"]) == (202, 8), told
    assert time.monotonic() - begun < 4
    engine.is_starting, engine.allowed = True, None
    run_ids = [item["run"]["id"] for item in told["data"]]
    _, waited = await client.call("POST", "/v1/runs/wait", {"ids": run_ids, "timeout_ms": 20_000})
    assert [run["status"] for run in waited["done"]] == ["completed"] * 8


async def test_a_call_of_one_turn_is_not_steered_to_a_next_one(
    client: NativeClient, engine: TalkingEngine
) -> None:
    engine.allowed = 3
    body = {"prompt": "Once"}
    call = asyncio.create_task(client.call("POST", "/v1/completions", body))
    async with asyncio.timeout(10):
        while not (listed := (await client.call("GET", "/v1/runs?kind=call"))[1]["data"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    steer = {"text": "more", "when": "next_turn"}
    status, told = await client.call("POST", f"/v1/runs/{listed[0]['id']}/steer", steer)
    assert (status, told["error"]["code"]) == (409, "cannot_continue")
    engine.allowed = None
    answered, _ = await call
    assert answered == 200


async def test_many_runs_of_a_batch_are_waited_for_together(client: NativeClient) -> None:
    batch = {"runs": [{"input": f"Hello {number}", "session": "s"} for number in range(12)]}
    status, told = await client.call("POST", "/v1/runs/batch", batch)
    assert (status, told["num_accepted"]) == (202, 12)
    run_ids = [item["run"]["id"] for item in told["data"]]
    _, waited = await client.call("POST", "/v1/runs/wait", {"ids": run_ids, "timeout_ms": 20_000})
    assert [run["id"] for run in waited["done"]] == run_ids
    events = await client.stream("/v1/sessions/s/events?follow=false")
    ends = [event["run"] for event in events if event["type"] == "run.completed"]
    assert sorted(ends) == sorted(run_ids), "each end once"


async def test_what_only_a_turns_end_makes_certain_is_told_before_the_run_waits_for_input(
    client: NativeClient, engine: TalkingEngine
) -> None:
    engine.answers = lambda prompt: "Hi <tool_"
    run_id = await client.create(tools=TOOLS, on_end="await_input")
    await reaches(client, run_id, lambda run: run["status"] == "input_required")
    status, _ = await client.call("POST", f"/v1/runs/{run_id}/cancel", {})
    assert status == 200
    events = await client.stream(f"/v1/runs/{run_id}/events")
    names = [event["type"] for event in events]
    told = events[: names.index("turn.ended")]
    assert "".join(event["text"] for event in told if event["type"] == "token") == "Hi <tool_"
