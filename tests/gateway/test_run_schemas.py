"""Runs whose results have a schema: held to it by a grammar, and checked at the end, over a real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ValkeyServer
from workers.messages import run_events_key

from .grammar_walk import allows
from .native_client import NativeClient
from .samples import TOOLS
from .talking_engine import TalkingEngine
from .test_native_real import get, reaches, serving

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"if": 1}}}
GOOD = '{"a": 12345}'


@pytest.fixture
async def engine(valkey: ValkeyServer) -> AsyncIterator[TalkingEngine]:
    async with TalkingEngine(valkey.url, lambda prompt: GOOD) as talking:
        yield talking


@pytest.fixture
async def client(engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[NativeClient]:
    async with serving(valkey.url, tmp_path) as started:
        yield started


async def over(client: NativeClient, run_id: str) -> dict[str, Any]:
    return await reaches(client, run_id, lambda told: told["ended"] is not None)


@pytest.mark.parametrize(
    "asked",
    [{"result_schema": SCHEMA}, {"response_format": FORMAT}, {"response_format": {"type": "json_object"}}],
    ids=["result_schema", "json_schema", "json_object"],
)
async def test_a_schema_is_enforced_and_its_value_told(
    client: NativeClient, engine: TalkingEngine, asked: dict[str, Any]
) -> None:
    run_id = await client.create(**asked)
    told = await over(client, run_id)
    assert (told["result"]["json"], told["result"]["text"]) == ({"a": 12345}, GOOD)
    assert (told["result"]["problem"], told["derail"], told["error"]) == (None, None, None)
    grammar = engine.turns[0].submit.grammar
    assert grammar is not None and allows(grammar.source, GOOD) and not allows(grammar.source, "[1]")


async def test_a_value_is_the_same_bytes_when_the_events_are_gone(
    client: NativeClient, valkey: ValkeyServer
) -> None:
    run_ids = [await client.create(result_schema=SCHEMA), await client.create(result_schema={"type": "null"})]
    for run_id in run_ids:
        await over(client, run_id)
    read = [await body_of(client, run_id) for run_id in run_ids]
    assert read == [await body_of(client, run_id) for run_id in run_ids]
    with valkey.client() as connection:
        for run_id in run_ids:
            assert connection.delete(run_events_key(run_id)) == 1
    assert read == [await body_of(client, run_id) for run_id in run_ids]
    assert b'"json":{"a":12345}' in read[0] and b'"json":null' in read[1]
    assert b"the schema's 'type'" in read[1]


async def body_of(client: NativeClient, run_id: str) -> bytes:
    async with client.http.get(f"{client.url}/v1/runs/{run_id}") as response:
        return await response.read()


@pytest.mark.parametrize(
    ("asked", "status", "blamed"),
    [
        ({"max_tokens": 3}, "completed", True),  # finish_reason length
        ({"budget": {"output_tokens": 3}}, "failed", False),
    ],
)
async def test_a_value_that_was_cut_is_none_and_its_text_is_kept(
    client: NativeClient, asked: dict[str, Any], status: str, blamed: bool
) -> None:
    told = await over(client, await client.create(result_schema=SCHEMA, **asked))
    assert told["status"] == status
    assert GOOD.startswith(told["result"]["text"]) and told["result"]["text"]
    assert (told["result"]["json"], told["result"]["problem"]) == (None, "the result is no JSON")
    assert (told["derail"] is not None and told["derail"]["kind"] == "schema") == blamed


async def test_a_steered_answer_is_checked_as_its_last_turn_has_it(
    client: NativeClient, engine: TalkingEngine
) -> None:
    engine.allowed = 4
    run_id = await client.create(result_schema=SCHEMA)
    await reaches(client, run_id, lambda told: told["usage"]["completion_tokens"] == 4)
    _, steered = await client.call("POST", f"/v1/runs/{run_id}/steer", {"text": "Larger"})
    assert steered["applied"] == "now"
    engine.allowed = None
    told = await over(client, run_id)
    assert (told["result"]["json"], told["turn"], told["derail"]) == ({"a": 12345}, 2, None)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"result_schema": {"not": {}}}, "result_schema.not"),
        ({"result_schema": {"properties": {"x": {"uniqueItems": True}}}}, "result_schema.properties.x."),
        ({"result_schema": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, "result_schema"),
        ({"result_schema": False}, "result_schema"),
        ({"result_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "result_schema"),
        ({"response_format": BAD_FORMAT}, "response_format.json_schema.schema.if"),
        ({"result_schema": SCHEMA, "response_format": FORMAT}, "result_schema"),
    ],
)  # fmt: skip
async def test_a_schema_that_cannot_be_enforced_makes_no_run(
    client: NativeClient, engine: TalkingEngine, asked: dict[str, Any], param: str
) -> None:
    status, told = await client.call("POST", "/v1/runs", {"input": "Hi", **asked})
    assert status == 400, told
    assert told["error"]["param"].startswith(param), told
    assert not engine.turns


async def test_a_run_that_calls_tools_first_is_held_to_its_schema_in_the_end(
    client: NativeClient, engine: TalkingEngine
) -> None:
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "/a"}}\n</tool_call>'
    engine.answers = lambda prompt: GOOD if "contents" in prompt else call
    run_id = await client.create(result_schema=SCHEMA, tools=TOOLS, tool_choice="required")
    told = await reaches(client, run_id, lambda told: told["status"] == "input_required")
    (asked,) = told["input_required"]["calls"]
    body = {"outputs": [{"call_id": asked["id"], "output": "contents"}]}
    assert (await client.call("POST", f"/v1/runs/{run_id}/respond", body))[0] == 200
    told = await over(client, run_id)
    assert told["result"]["json"] == {"a": 12345}
    forced, free = (turn.submit.grammar for turn in engine.turns)
    assert forced is not None and allows(forced.source, call) and not allows(forced.source, GOOD)
    assert free is not None and allows(free.source, call) and allows(free.source, GOOD)
    assert not allows(free.source, "words")


async def test_a_forks_first_answer_is_held_to_what_its_caller_demands(
    client: NativeClient, engine: TalkingEngine
) -> None:
    parent = await client.create(result_schema=SCHEMA)
    await over(client, parent)
    fork = {"input": "Again", "tools": TOOLS, "tool_choice": "required", "result_schema": {"type": "null"}}
    status, told = await client.call("POST", f"/v1/runs/{parent}/fork", fork)
    assert status == 202
    assert (await over(client, told["id"]))["result"]["problem"] == "result breaks the schema's 'type'"
    grammar = engine.turns[1].submit.grammar
    assert grammar is not None and not allows(grammar.source, "null")


async def test_a_chat_calls_value_is_told_of_its_run(client: NativeClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": FORMAT}
    status, told = await client.call("POST", "/v1/chat/completions", body)
    assert status == 200
    run_id = "run-" + told["id"].partition("-")[2]
    assert (await get(client, run_id))["result"]["json"] == {"a": 12345}
