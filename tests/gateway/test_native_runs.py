"""Runs looked at, told to, waited for and forgotten over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.callers.tokens import Grant
from gateway.runs.events import CallAsked, InputRequired
from gateway.store.results import ResultCall, ResultError
from tests.conftest import ValkeyServer
from workers.messages import (
    RUN_END_ID,
    Derail,
    Finished,
    Timings,
    Usage,
    run_events_key,
)

from .native_gateway import Native, native_gateway

NOBODY = "run-" + "0" * 32
USAGE = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=2)


@pytest.fixture
async def native(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[Native]:
    async with native_gateway(valkey.url, tmp_path) as gateway:
        yield gateway


async def finished(native: Native, run_id: str) -> None:
    await native.verbs.play(run_id, "Hel", "lo")
    await native.verbs.write(run_id, Finished(reason="stop", usage=USAGE, timings=Timings(queue_seconds=0.5)))


async def test_a_run_is_shown_in_each_of_its_states_and_twice_the_same(native: Native) -> None:
    run_id = await native.create(session="s", agent="a", label="l", budget={"output_tokens": 9})

    async def look() -> dict[str, Any]:
        url = f"{native.url}/v1/runs/{run_id}"
        texts = [await (await native.http.get(url)).read() for _ in range(2)]
        assert texts[0] == texts[1]
        return (await native.call("GET", f"/v1/runs/{run_id}"))[1]

    told = await look()
    assert (told["id"], told["object"], told["status"], told["result"]) == (run_id, "run", "queued", None)
    assert (told["class"], told["label"], told["budget"]["output_tokens"]) == ("default", "l", 9)
    assert told["links"]["tree"] == "/v1/sessions/s/tree"
    await native.verbs.play(run_id)
    assert (await look())["status"] == "prefilling"
    await native.verbs.write(run_id, Finished(reason="stop", usage=USAGE, timings=Timings()))
    call = CallAsked(id="call_1", name="read", arguments="{}")
    await native.verbs.write(run_id, InputRequired(calls=(call,)))
    told = await look()
    assert told["status"] == "input_required"
    assert told["input_required"]["calls"] == [{"id": "call_1", "name": "read", "arguments": "{}"}]
    assert told["usage"]["total_tokens"] == 12


async def test_an_ended_run_looks_the_same_when_its_events_are_gone(native: Native) -> None:
    run_id = await native.create(session="s", agent="a", metadata={"k": "v"})
    await finished(native, run_id)
    await native.verbs.end(
        run_id,
        "failed",
        text="Hello",
        json='{"a":1}',
        calls=(ResultCall(id="call_1", name="read", arguments="{}"),),
        finish_reason="tool_calls",
        thinking_tokens=1,
        derail=Derail(derail="token_cycle", first_token=3, excerpt="la la"),
        error=ResultError(code="budget_exceeded", message="No output tokens are left."),
        is_partial=True,
        started=1.5,
        ended=2.5,
    )
    before = await native.call("GET", f"/v1/runs/{run_id}")
    await native.bus.commands.delete(run_events_key(run_id))
    assert await native.call("GET", f"/v1/runs/{run_id}") == before
    told = before[1]
    assert (told["status"], told["started"], told["ended"]) == ("failed", 1.5, 2.5)
    assert told["result"]["text"] == "Hello" and told["result"]["json"] == {"a": 1}
    assert told["result"]["partial"] and told["result"]["tool_calls"][0]["name"] == "read"
    assert told["error"]["code"] == "budget_exceeded"
    derail = {"kind": "token_cycle", "severity": "critical", "first_token": 3, "excerpt": "la la"}
    assert told["derail"] == {**derail, "action": "report"}
    assert told["usage"]["reasoning_tokens"] == 1 and told["usage"]["cached_tokens"] == 4
    assert told["metadata"] == {"k": "v"}


async def test_each_verb_is_passed_on_and_answered(native: Native) -> None:
    run_id = await native.create()
    path = f"/v1/runs/{run_id}"
    verbs: list[tuple[str, Any, dict[str, Any]]] = [
        ("pause", {"hold_ms": 1500}, {"status": "paused", "hold_ms": 1500}),
        ("pause", {"hold_ms": 86_400_000}, {"status": "paused", "hold_ms": 86_400_000}),
        ("pause", None, {"status": "paused", "hold_ms": 600_000}),
        ("resume", {}, {"cached_tokens": 8, "recomputed_tokens": 2}),
        ("steer", {"text": "Stop.", "when": "now"}, {"applied": "next_turn", "turn": 2}),
        ("respond", {"outputs": [{"call_id": "c", "output": "o"}]}, {"turn": 2}),
        ("respond", {"text": "yes"}, {"turn": 2}),
        ("heartbeat", None, {"due_ms": 1500}),
        ("cancel", {"mode": "graceful", "tree": True}, {"status": "cancelled", "num_runs": 1}),
        ("cancel", None, {"status": "cancelled", "mode": "now"}),
    ]
    for verb, body, expected in verbs:
        status, told = await native.call("POST", f"{path}/{verb}", body)
        assert status == 200, told
        assert told["id"] == run_id and told.items() >= expected.items(), (verb, told)
    asked = native.verbs.asked
    assert asked[0] == ("pause", (1.5, ""))
    assert ("respond", (["o"], "", "")) in asked and ("respond", ([], "yes", "")) in asked
    assert ("cancel", ("graceful", True, "")) in asked
    status, told = await native.call("POST", f"{path}/steer", {"text": "More."})
    assert (status, told["error"]["code"]) == (409, "run_ended")


async def test_a_verb_with_a_key_has_one_command(native: Native) -> None:
    run_id = await native.create()
    for key in ("k", "k", "l"):
        await native.call("POST", f"/v1/runs/{run_id}/steer", {"text": "x"}, Idempotency_Key=key)
    commands = [given[-1] for _, given in native.verbs.asked]
    assert commands[0] == commands[1] != commands[2]
    assert all(commands)


async def test_a_key_that_comes_with_another_text_loses_none(native: Native) -> None:
    run_id = await native.create()
    for body in (b'{"text": "x"}', b'{ "when": "now", "text":"x" }', b'{"text": "y"}'):
        await native.call("POST", f"/v1/runs/{run_id}/steer", body, Idempotency_Key="k")
    commands = [given[-1] for _, given in native.verbs.asked]
    assert commands[0] == commands[1] != commands[2]


@pytest.mark.parametrize(
    ("verb", "body", "param"),
    [
        ("cancel", {"mode": "later"}, "mode"),
        ("cancel", {"modus": "now"}, "modus"),
        ("cancel", {"tree": 1}, "tree"),
        ("pause", {"hold_ms": 0}, "hold_ms"),
        ("pause", {"hold_ms": 86_400_001}, "hold_ms"),  # an engine holds a day at most
        ("resume", {"x": 1}, "x"),
        ("steer", {}, "text"),
        ("steer", {"text": ""}, "text"),
        ("steer", {"text": "x", "when": "soon"}, "when"),
        ("respond", {}, "outputs"),
        ("respond", {"text": "x", "outputs": [{"call_id": "c", "output": ""}]}, "outputs"),
        ("respond", {"outputs": [{"output": "x"}]}, "outputs"),
        ("respond", {"outputs": [{"call_id": "", "output": "x"}]}, "outputs"),
        ("heartbeat", {"x": 1}, "x"),
    ],
)
async def test_a_bad_field_of_a_verb_is_named(native: Native, verb: str, body: Any, param: str) -> None:
    run_id = await native.create()
    status, told = await native.call("POST", f"/v1/runs/{run_id}/{verb}", body)
    assert status == 400 and told["error"]["param"].startswith(param), told
    assert not native.verbs.asked


@pytest.mark.parametrize("run_id", [NOBODY, "run-1", "x", "run-" + "A" * 32])
async def test_a_run_that_is_not_there_is_not_found(native: Native, run_id: str) -> None:
    calls = [("GET", ""), ("DELETE", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/heartbeat")]
    for method, path in calls:
        status, told = await native.call(method, f"/v1/runs/{run_id}{path}", None)
        assert (status, told["error"]["code"]) == (404, "run_not_found"), (method, path)


async def test_another_tenants_run_is_not_there(native: Native) -> None:
    secret = native.tokens.add("bob")
    mine = await native.create(session="s")
    bob = {"Authorization": f"Bearer {secret}"}
    status, told = await native.call("POST", "/v1/runs", {"input": "x", "session": "s"}, **bob)
    assert status == 202
    his = told["id"]
    reached = [("GET", ""), ("DELETE", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/fork")]
    for method, path in reached:
        body = {"input": "x"} if path == "/fork" else None
        assert (await native.call(method, f"/v1/runs/{his}{path}", body))[0] == 404, path
        assert (await native.call(method, f"/v1/runs/{mine}{path}", body, **bob))[0] == 404, path
    assert (await native.call("POST", "/v1/runs", {"input": "x", "parent_run": his}))[0] == 404
    assert (await native.call("POST", "/v1/runs/wait", {"ids": [his], "timeout_ms": 0}))[0] == 404
    listed = (await native.call("GET", "/v1/runs?session=s"))[1]["data"]
    assert [run["id"] for run in listed] == [mine]
    assert (await native.call("GET", "/v1/sessions/s/tree", **bob))[1]["num_runs"] == 1
    assert native.verbs.asked == []


async def test_runs_are_listed_by_page_and_filter(native: Native) -> None:
    runs = [await native.create(agent=f"a{number % 2}", session="s") for number in range(5)]
    await native.create(session="t")
    seen: list[str] = []
    path = "/v1/runs?session=s&limit=2"
    cursor = None
    while True:
        _, told = await native.call("GET", path + (f"&before={cursor}" if cursor else ""))
        seen += [run["id"] for run in told["data"]]
        cursor = told["next"]
        if cursor is None:
            break
    assert seen == runs[::-1]
    _, told = await native.call("GET", "/v1/runs?session=s&agent=a1&status=queued&class=default&kind=run")
    assert [run["id"] for run in told["data"]] == [runs[3], runs[1]]
    for query in ("limit=0", "limit=x", "limit=501", "status=dead", "before=x"):
        status, told = await native.call("GET", f"/v1/runs?{query}")
        assert (status, told["error"]["param"]) == (400, query.partition("=")[0])


async def test_only_an_ended_run_is_forgotten_and_then_wholly(native: Native, valkey: ValkeyServer) -> None:
    run_id = await native.create(session="s")
    status, told = await native.call("DELETE", f"/v1/runs/{run_id}")
    assert (status, told["error"]["code"]) == (409, "run_live")
    await native.verbs.play(run_id, "secret")
    await native.verbs.end(run_id, text="secret")
    await native.store.ids.put(run_id, b"\1\0\0\0")
    assert (await native.call("DELETE", f"/v1/runs/{run_id}"))[1] == {
        "id": run_id,
        "object": "run",
        "deleted": True,
    }
    assert (await native.call("GET", f"/v1/runs/{run_id}"))[0] == 404
    assert (await native.call("DELETE", f"/v1/runs/{run_id}"))[0] == 404
    assert not (await native.call("GET", "/v1/runs"))[1]["data"]
    assert await native.store.ids.get(run_id) is None
    with valkey.client() as client:
        left = list(client.scan_iter(f"*{run_id}*"))
    kept = (b":mirrored", b":deleted", b":ids-removed")  # that there was one, and no word of it
    assert all(key.endswith(kept) or b":ids:" in key for key in left), left


async def test_waiting_for_all_ends_with_the_last(native: Native) -> None:
    runs = [await native.create() for _ in range(3)]
    await native.verbs.end(runs[0])
    waiting = asyncio.create_task(native.call("POST", "/v1/runs/wait", {"ids": runs, "timeout_ms": 10_000}))
    await asyncio.sleep(0.1)
    await native.verbs.end(runs[1])
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await native.verbs.end(runs[2], text="last")
    status, told = await waiting
    assert (status, told["timed_out"], told["pending"]) == (200, False, [])
    assert [run["id"] for run in told["done"]] == runs
    assert told["done"][2]["result"]["text"] == "last"


async def test_waiting_for_any_ends_with_the_first(native: Native) -> None:
    runs = [await native.create() for _ in range(3)]
    path = f"/v1/runs/wait?ids={','.join(runs)}&mode=any&timeout_ms=10000"
    waiting = asyncio.create_task(native.call("GET", path))
    await asyncio.sleep(0.1)
    await native.verbs.end(runs[1])
    _, told = await waiting
    assert [run["id"] for run in told["done"]] == [runs[1]]
    assert told["pending"] == [runs[0], runs[2]] and not told["timed_out"]
    assert (await native.call("GET", path))[1] == told, "it is over at once"


async def test_waiting_stops_when_its_time_is_over(native: Native) -> None:
    runs = [await native.create() for _ in range(2)]
    await native.verbs.end(runs[0])
    begun = time.monotonic()
    _, told = await native.call("POST", "/v1/runs/wait", {"ids": runs, "timeout_ms": 200})
    assert 0.15 < time.monotonic() - begun < 3
    assert told["timed_out"] and told["pending"] == [runs[1]]
    assert [run["id"] for run in told["done"]] == [runs[0]]


async def test_a_run_that_waits_for_input_is_waited_for_no_more(native: Native) -> None:
    run_id = await native.create()
    waiting = asyncio.create_task(native.call("POST", "/v1/runs/wait", {"ids": [run_id]}))
    await asyncio.sleep(0.05)
    await finished(native, run_id)
    await native.verbs.write(run_id, InputRequired())
    assert (await waiting)[1]["done"][0]["status"] == "input_required"
    _, told = await native.call(
        "POST", "/v1/runs/wait", {"ids": [run_id], "until": "ended", "timeout_ms": 100}
    )
    assert told["timed_out"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"ids": []}, "ids"),
        ({"ids": ["x"]}, "ids"),
        ({"ids": [NOBODY] * 257}, "ids"),
        ({"ids": [NOBODY], "mode": "some"}, "mode"),
        ({"ids": [NOBODY], "timeout_ms": 10**9}, "timeout_ms"),
        ({"ids": [NOBODY], "timeout_ms": -1}, "timeout_ms"),
    ],
)
async def test_a_wait_out_of_bounds_is_refused(native: Native, asked: dict[str, Any], param: str) -> None:
    status, told = await native.call("POST", "/v1/runs/wait", asked)
    assert status == 400 and told["error"]["param"].startswith(param), told


async def test_a_sessions_tree_has_agents_below_their_callers_and_sums(native: Native) -> None:
    root = await native.create(session="s", agent="root")
    children = [await native.create(parent_run=root, agent=f"c{number}") for number in range(2)]
    leaf = await native.create(parent_run=children[1], agent="leaf")
    for run_id in (root, leaf):
        await finished(native, run_id)
    await native.verbs.end(leaf)
    status, told = await native.call("GET", "/v1/sessions/s/tree")
    assert (status, told["num_runs"], told["num_live"]) == (200, 4, 3)
    (top,) = told["agents"]
    assert top["agent"] == "root" and [child["agent"] for child in top["children"]] == ["c0", "c1"]
    assert top["children"][1]["children"][0]["runs"][0]["status"] == "completed"
    assert top["usage"]["total_tokens"] == told["usage"]["total_tokens"] == 2 * 12 + 2 * 10
    assert top["children"][1]["usage"]["total_tokens"] == 12 + 10
    assert (top["num_live"], top["children"][1]["num_live"]) == (3, 1)
    assert (await native.call("GET", "/v1/sessions/unknown/tree"))[0] == 404


async def test_agents_in_a_circle_and_in_a_long_chain_are_shown_once(native: Native) -> None:
    for agent, parent in (("a", "b"), ("b", "a"), ("self", "self")):
        await native.create(session="circle", agent=agent, parent=parent)
    _, told = await native.call("GET", "/v1/sessions/circle/tree")
    assert told["num_runs"] == 3 == len(str(told).split("'runs'")) - 1
    for number in range(150):
        await native.create(session="chain", agent=f"a{number}", parent=f"a{number - 1}")
    _, told = await native.call("GET", "/v1/sessions/chain/tree")
    assert told["num_runs"] == 150 == len(str(told).split("'runs'")) - 1


async def test_a_stream_that_was_seen_to_its_end_is_not_opened_again(native: Native) -> None:
    run_id = await native.create()
    await native.verbs.end(run_id)
    async with native.http.get(
        f"{native.url}/v1/runs/{run_id}/events", headers={"Last-Event-ID": RUN_END_ID}
    ) as response:
        assert response.status == 204


async def test_an_admin_names_whose_sessions_it_looks_at_and_ends(native: Native) -> None:
    bob, root = native.tokens.add("bob"), native.tokens.add("root", Grant(scopes=("admin",)))
    local = await native.create(session="s")
    body = {"input": "Hi", "session": "s", "agent": "of-bob"}
    status, told = await native.call("POST", "/v1/runs", body, Authorization=f"Bearer {bob}")
    assert status == 202
    for tenant, run_id in (("bob", told["id"]), ("local", local)):
        headers = {"Authorization": f"Bearer {root}"}
        _, listed = await native.call("GET", f"/v1/runs?tenant={tenant}", **headers)
        assert [run["id"] for run in listed["data"]] == [run_id]
        _, tree = await native.call("GET", f"/v1/sessions/s/tree?tenant={tenant}", **headers)
        assert [run["id"] for agent in tree["agents"] for run in agent["runs"]] == [run_id]
        path = f"/v1/sessions/s/events?follow=false&tenant={tenant}"
        assert {event["run"] for event in await native.stream(path, None, **headers)} == {run_id}
        status, _ = await native.call("POST", f"/v1/sessions/s/cancel?tenant={tenant}", **headers)
        assert status == 200
        assert native.verbs.cancelled_agents[-1][0].tenant == ("" if tenant == "local" else "bob")
        assert (await native.call("GET", "/v1/sessions/s/tree", **headers))[0] == 404, "its own"
    for path in ("/v1/runs", "/v1/sessions/s/tree", "/v1/sessions/s/events"):
        status, told = await native.call("GET", f"{path}?tenant=local", Authorization=f"Bearer {bob}")
        assert (status, told["error"]["param"]) == (403, "tenant")
    status, told = await native.call("POST", "/v1/sessions/s/cancel?tenant=bob")
    assert (status, told["error"]["code"]) == (403, "forbidden")
    assert (await native.call("GET", "/v1/runs?tenant=bob", Authorization=f"Bearer {bob}"))[0] == 200
