"""POST /v1/runs, batches and forks: what is asked becomes a spec, once for each key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.bus import BusLost
from gateway.errors import NoEngine, Overloaded, StillWaiting
from gateway.http.api import parse_chat
from gateway.runs.spec import Budget, ForkPoint
from tests.conftest import ValkeyServer
from workers.messages import run_events_key

from .native_gateway import Native, native_gateway

HELLO = {"input": "Hi"}
NOBODY = "run-" + "0" * 32


@pytest.fixture
async def native(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[Native]:
    async with native_gateway(valkey.url, tmp_path) as gateway:
        yield gateway


async def test_a_run_is_taken_with_all_that_it_was_asked_for(native: Native) -> None:
    fields = {
        "messages": [{"role": "user", "content": "Hi"}],
        "model": "tiny",
        "temperature": 0.5,
        "session": "s",
        "agent": "a",
        "parent": "p",
        "class": "bulk",
        "priority": 3,
        "budget": {"output_tokens": 10, "tool_calls": 0},
        "tree_budget": {"prompt_tokens": 1000},
        "deadline_ms": 5000,
        "queue_ttl_ms": 100,
        "expected_output_tokens": 7,
        "heartbeat_ms": 500,
        "hold_ms": 1500,
        "orphan": "pause",
        "on_end": "await_input",
        "retain": "pin",
        "final": True,
        "label": "l",
        "metadata": {"k": "v"},
        "result_schema": {"type": "object"},
    }
    status, told = await native.call("POST", "/v1/runs", fields)
    assert (status, told["status"], told["session"], told["agent"]) == (202, "queued", "s", "a")
    assert told["links"]["events"] == f"/v1/runs/{told['id']}/events"
    spec = native.verbs.specs[told["id"]]
    assert (spec.kind, spec.session, spec.agent, spec.parent) == ("run", "s", "a", "p")
    assert (spec.flow_class, spec.priority, spec.model) == ("bulk", 3, "tiny")
    assert spec.budget == Budget(output_tokens=10, tool_calls=0)
    assert spec.tree_budget == Budget(prompt_tokens=1000)
    assert spec.deadline is not None and 0 < spec.deadline - time.time() <= 5
    assert (spec.queue_ttl_ms, spec.heartbeat_ms, spec.hold_seconds) == (100, 500, 1.5)
    assert (spec.orphan, spec.on_end, spec.retain, spec.is_final) == ("pause", "await_input", "pin", True)
    assert (spec.label, spec.metadata, spec.result_schema) == ("l", {"k": "v"}, b'{"type":"object"}')
    body = msgspec.json.decode(spec.body)
    assert body["messages"] == fields["messages"] and body["temperature"] == 0.5
    assert body["tetrarch"]["agent"] == "a"
    assert "budget" not in body and "metadata" not in body


PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Patches files."}}
LOOK = {"type": "function", "function": {"name": "look"}}
CHOSEN = {"type": "custom", "custom": {"name": "patch"}}


@pytest.mark.parametrize(
    "choice", [CHOSEN, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOSEN]}}]
)
async def test_a_run_has_the_tools_that_a_chat_may_have(native: Native, choice: Any) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    asked = {"messages": messages, "tools": [LOOK, PATCH], "tool_choice": choice}
    status, told = await native.call("POST", "/v1/runs", asked)
    assert status == 202, told
    chat = parse_chat(native.verbs.specs[told["id"]].body)
    assert [tool["function"]["name"] for tool in chat.raw_tools or ()] == ["look", "patch"]
    assert chat.raw_messages[1]["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": '{"input":"x"}',
    }
    _, batch = await native.call("POST", "/v1/runs/batch", {"runs": [asked]})
    fork = await native.call("POST", f"/v1/runs/{told['id']}/fork", asked)
    assert (batch["data"][0]["status"], fork[0]) == (202, 202), (batch, fork)


async def test_a_run_without_names_is_an_agent_of_its_own(native: Native) -> None:
    run_id = await native.create()
    spec = native.verbs.specs[run_id]
    assert (spec.agent, spec.session, spec.parent_run, spec.tree) == (run_id, run_id, "", "")
    assert msgspec.json.decode(spec.body)["messages"] == [{"role": "user", "content": "Hi"}]


async def test_a_child_belongs_where_its_parent_run_does(native: Native) -> None:
    root = await native.create(session="s", agent="root")
    child = await native.create(parent_run=root, agent="child")
    grandchild = await native.create(parent_run=child)
    by_name = await native.create(session="s", agent="other", parent="child")
    specs = native.verbs.specs
    assert (specs[child].session, specs[child].parent, specs[child].tree) == ("s", "root", root)
    assert (specs[grandchild].parent, specs[grandchild].parent_run) == ("child", child)
    assert specs[grandchild].tree == root
    assert (specs[by_name].parent_run, specs[by_name].tree) == (child, root)
    status, told = await native.call(
        "POST", "/v1/runs", {**HELLO, "parent_run": root, "tree_budget": {"output_tokens": 1}}
    )
    assert (status, told["error"]["param"]) == (400, "tree_budget")


async def test_an_agent_may_call_though_only_a_line_is_kept_of_its_parents_newest_run(native: Native) -> None:
    parent = await native.create(session="s", agent="boss")
    assert await native.bus.commands.delete(run_events_key(parent))  # as an hour after its end, without room
    status, told = await native.call(
        "POST", "/v1/runs", {**HELLO, "session": "s", "agent": "helper", "parent": "boss"}
    )
    assert status == 202, told
    spec = native.verbs.specs[told["id"]]
    assert (spec.parent, spec.parent_run, spec.tree) == ("boss", "", "")


async def test_a_fork_leaves_its_parent_where_it_is_told(native: Native) -> None:
    parent = await native.create(session="s", agent="p")
    for at, point in (
        ("now", ForkPoint(run=parent)),
        ({"turn": 2}, ForkPoint(run=parent, turn=2)),
        ({"token": 5}, ForkPoint(run=parent, token=5)),
    ):
        status, told = await native.call("POST", f"/v1/runs/{parent}/fork", {**HELLO, "at": at})
        assert (status, told["parent_tokens"], told["cached_tokens"]) == (202, 7, 7), told
        assert native.verbs.asked[-1][1][0] == point
        assert native.verbs.specs[told["id"]].parent == "p"
    status, told = await native.call("POST", "/v1/runs", {**HELLO, "fork": {"run": parent}})
    assert status == 202
    assert native.verbs.specs[told["id"]].parent_run == parent
    status, told = await native.call("POST", f"/v1/runs/{NOBODY}/fork", HELLO)
    assert (status, told["error"]["code"]) == (404, "run_not_found")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"input": "x", "messages": []}, "messages"),
        ({"messages": []}, "messages"),
        ({"input": ""}, "input"),
        ({"input": 3}, "input"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "budjet": {}}, "budjet"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "tetrarch": {}}, "tetrarch"),
        ({"input": "x", "raw_messages": []}, "raw_messages"),
        ({"input": "x", "tools": [{"type": "custom", "custom": {"name": 5}}]}, "tools[0].custom.name"),
        ({"input": "x", "tool_choice": CHOSEN}, "tool_choice.custom.name"),
        ({"input": "x", "budget": {"output": 3}}, "budget"),
        ({"input": "x", "budget": {"output_tokens": 0}}, "budget.output_tokens"),
        ({"input": "x", "budget": {"wall_ms": -1}}, "budget.wall_ms"),
        ({"input": "x", "deadline_ms": 0}, "deadline_ms"),
        ({"input": "x", "hold_ms": 86_400_001}, "hold_ms"),
        ({"input": "x", "deadline_ms": 10**30}, "deadline_ms"),
        ({"input": "x", "deadline_ms": 1.5}, "deadline_ms"),
        ({"input": "x", "class": "best"}, "class"),
        ({"input": "x", "orphan": "kill"}, "orphan"),
        ({"input": "x", "label": "x" * 201}, "label"),
        ({"input": "x", "metadata": {"k": 3}}, "metadata"),
        ({"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input": "x", "parent_run": "run-1"}, "parent_run"),
        ({"input": "x", "fork": {"run": "x"}}, "fork.run"),
        ({"input": "x", "fork": {"run": NOBODY, "at": "then"}}, "fork.at"),
        ({"input": "x", "fork": {"run": NOBODY, "at": {}}}, "at"),
        ({"input": "x", "fork": {"run": NOBODY, "at": {"turn": 1, "token": 1}}}, "at"),
        ({"input": "x", "result_schema": []}, "result_schema"),
        ({"input": "x", "result_schema": {"properties": {"a": {"if": {}}}}}, "result_schema.properties.a"),
        ({"input": "x", "result_schema": {"type": "string", "pattern": "("}}, "result_schema.pattern"),
        ({"input": "x", "agent": "a\nb"}, "tetrarch.agent"),
    ],
)
async def test_a_bad_field_is_named(native: Native, fields: dict[str, Any], param: str) -> None:
    status, told = await native.call("POST", "/v1/runs", fields)
    assert status == 400, told
    assert told["error"]["param"].startswith(param), told
    assert len(told["error"]["message"]) < 900
    assert native.verbs.num_created == 0


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"input":"\xff"}', b'{"a":' * 100])
async def test_a_body_that_is_no_object_is_refused(native: Native, body: bytes) -> None:
    for path in ("/v1/runs", "/v1/runs/batch", "/v1/runs/wait"):
        status, told = await native.call("POST", path, body)
        assert status == 400 and told["error"]["message"], told


async def test_the_same_key_and_body_make_one_run(native: Native) -> None:
    first = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k")
    again = await native.call("POST", "/v1/runs", b'{ "input": "Hi" }', Idempotency_Key="k")
    assert first[1]["id"] == again[1]["id"]
    assert (first[1]["replayed"], again[1]["replayed"]) == (False, True)
    assert native.verbs.num_created == 1
    status, told = await native.call("POST", "/v1/runs", {"input": "Ho"}, Idempotency_Key="k")
    assert (status, told["error"]["code"]) == (409, "idempotency_conflict")
    status, told = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="x" * 300)
    assert (status, told["error"]["param"]) == (400, "Idempotency-Key")


async def test_of_the_same_call_sent_twice_at_once_one_run_comes(native: Native) -> None:
    answers = await asyncio.gather(
        *(native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k") for _ in range(6))
    )
    assert len({told["id"] for _, told in answers}) == 1
    assert native.verbs.num_created == 1


async def test_a_key_whose_run_is_deleted_makes_no_other_one(native: Native) -> None:
    _, first = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k")
    await native.verbs.end(first["id"])
    assert (await native.call("DELETE", f"/v1/runs/{first['id']}"))[0] == 200
    for _ in range(2):
        status, told = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k")
        assert (status, told["error"]["code"]) == (409, "run_gone")
        assert first["id"] in told["error"]["message"]
    status, told = await native.call("POST", "/v1/runs", {"input": "Ho"}, Idempotency_Key="k")
    assert (status, told["error"]["code"]) == (409, "idempotency_conflict")
    assert native.verbs.num_created == 1


async def test_a_key_is_good_for_a_day_though_nothing_is_kept_of_its_run(native: Native) -> None:
    _, first = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k")
    await native.verbs.end(first["id"])
    kept = [key async for key in native.bus.commands.scan_iter(f"*{first['id']}*")]
    assert len(kept) >= 3
    await native.bus.commands.delete(*kept)
    status, told = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k")
    assert (status, told["error"]["code"]) == (409, "run_gone")
    assert native.verbs.num_created == 1


async def test_a_run_made_in_place_of_a_gateway_that_died_bears_its_own_names(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with native_gateway(valkey.url, tmp_path, claim_seconds=0.1) as native:
        native.verbs.refusals = [BusLost()]  # claimed, and not created
        assert (await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k"))[0] == 503
        status, told = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k")
        assert (status, told["replayed"]) == (202, False)
        spec = native.verbs.specs[told["id"]]
        assert {told["agent"], told["session"], spec.agent, spec.session} == {told["id"]}
        assert told["links"]["tree"] == f"/v1/sessions/{told['id']}/tree"
        assert msgspec.json.decode(spec.body)["tetrarch"]["agent"] == told["id"]


async def test_a_key_tells_its_run_though_the_parent_is_gone(native: Native) -> None:
    parent = await native.create()
    body = {**HELLO, "parent_run": parent}
    _, first = await native.call("POST", "/v1/runs", body, Idempotency_Key="k")
    await native.verbs.end(parent)
    assert (await native.call("DELETE", f"/v1/runs/{parent}"))[0] == 200
    status, again = await native.call("POST", "/v1/runs", body, Idempotency_Key="k")
    assert (status, again["id"], again["replayed"]) == (202, first["id"], True)
    for _ in range(2):  # what is refused gives its key back
        status, told = await native.call("POST", "/v1/runs", body, Idempotency_Key="other")
        assert (status, told["error"]["code"]) == (404, "run_not_found")


async def test_a_refused_call_may_be_sent_again_with_its_key(native: Native) -> None:
    native.verbs.refusals = [Overloaded(3), NoEngine("None.")]
    statuses = [(await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="k"))[0] for _ in range(3)]
    assert statuses == [429, 503, 202]


async def test_a_fork_that_is_still_under_way_is_waited_for_and_not_made_twice(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with native_gateway(valkey.url, tmp_path, claim_seconds=0.1) as native:
        parent = await native.create()
        native.verbs.refusals = [StillWaiting("Not yet.")]
        fork = ("POST", f"/v1/runs/{parent}/fork", HELLO)
        statuses = [(await native.call(*fork, Idempotency_Key="k"))[0] for _ in range(3)]
        assert statuses == [503, 202, 202]
        assert len(native.verbs.children) == 2
        assert len(set(native.verbs.children)) == 1


async def test_a_client_that_leaves_while_its_run_is_made_does_not_tear_it(native: Native) -> None:
    claims = native.store.idempotency
    await claims.claim("", "k", b"?", NOBODY)  # somebody else's: the call waits for it
    call = asyncio.create_task(native.call("POST", "/v1/runs", HELLO, Idempotency_Key="other"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    status, told = await native.call("POST", "/v1/runs", HELLO, Idempotency_Key="other")
    assert status == 202
    assert native.verbs.num_created == 1, told


async def test_of_a_batch_each_is_taken_or_refused_on_its_own(native: Native) -> None:
    runs = [HELLO, {"input": ""}, {"input": "x", "parent_run": NOBODY}, {"input": "Ho", "label": None}]
    status, told = await native.call("POST", "/v1/runs/batch", {"runs": runs}, Idempotency_Key="k")
    assert (status, told["num_accepted"]) == (202, 2)
    assert [item["status"] for item in told["data"]] == [202, 400, 404, 202]
    assert told["data"][1]["error"]["param"] == "runs[1].input"
    again = await native.call("POST", "/v1/runs/batch", {"runs": runs}, Idempotency_Key="k")
    assert [(item.get("run") or {}).get("id") for item in again[1]["data"]] == [
        (item.get("run") or {}).get("id") for item in told["data"]
    ]
    assert native.verbs.num_created == 2


async def test_an_item_without_a_place_tells_when_to_come_again(native: Native) -> None:
    native.verbs.refusals = [None, Overloaded(7), NoEngine("None.", retry_after=None)]
    status, told = await native.call("POST", "/v1/runs/batch", {"runs": [HELLO] * 3})
    assert (status, [item["status"] for item in told["data"]]) == (202, [202, 429, 503])
    assert [item["retry_after"] for item in told["data"]] == [None, 7, None]


async def test_a_batch_of_all_or_nothing_takes_none_where_one_is_refused(native: Native) -> None:
    batch = {"runs": [HELLO, HELLO, {"input": ""}], "all_or_nothing": True}
    status, told = await native.call("POST", "/v1/runs/batch", batch)
    assert (status, told["error"]["param"]) == (400, "runs[2].input")
    assert native.verbs.num_created == 0
    native.verbs.is_full = True
    status, told = await native.call("POST", "/v1/runs/batch", {"runs": [HELLO] * 2, "all_or_nothing": True})
    assert (status, told["error"]["code"], native.verbs.num_created) == (429, "overloaded", 0)
    native.verbs.is_full = False
    native.verbs.refusals = [None, Overloaded(3)]  # somebody was faster
    status, told = await native.call("POST", "/v1/runs/batch", {"runs": [HELLO] * 3, "all_or_nothing": True})
    assert (status, native.verbs.num_reserved) == (429, 0)
    listed = (await native.call("GET", "/v1/runs"))[1]["data"]
    assert [run["status"] for run in listed] == ["cancelled"]


async def test_a_batch_that_was_taken_back_starts_anew_under_its_key(native: Native) -> None:
    batch = {"runs": [HELLO] * 3, "all_or_nothing": True}
    native.verbs.refusals = [None, Overloaded(3)]
    assert (await native.call("POST", "/v1/runs/batch", batch, Idempotency_Key="k"))[0] == 429
    status, told = await native.call("POST", "/v1/runs/batch", batch, Idempotency_Key="k")
    assert (status, [item["run"]["replayed"] for item in told["data"]]) == (202, [False] * 3)
    native.verbs.is_full = True  # which it need not be for what is there
    status, again = await native.call("POST", "/v1/runs/batch", batch, Idempotency_Key="k")
    assert status == 202
    assert [item["run"]["id"] for item in again["data"]] == [item["run"]["id"] for item in told["data"]]


@pytest.mark.parametrize(
    ("batch", "param"),
    [
        ({"runs": []}, "runs"),
        ({"runs": [HELLO] * 65}, "runs"),
        ({"runs": ["x"]}, "runs"),
        ({}, "runs"),
        ({"runs": [HELLO], "all": True}, "all"),
    ],
)
async def test_a_batch_out_of_bounds_is_refused(native: Native, batch: dict[str, Any], param: str) -> None:
    status, told = await native.call("POST", "/v1/runs/batch", batch)
    assert status == 400 and told["error"]["param"].startswith(param), told
    assert native.verbs.num_created == 0
