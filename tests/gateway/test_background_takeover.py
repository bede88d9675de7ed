"""A background response outlives its gateway: another one goes on with it, and stores it at its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest

from gateway.runs.outcomes import FINAL
from tests.conftest import ValkeyServer
from workers.messages import run_events_key

from .chatting import CALL
from .native_client import NativeClient, Told
from .responses_api import TOOL, sse_events
from .talking_engine import TalkingEngine
from .test_native_real import FIRST, reaches, serving

ASKED: dict[str, Any] = {"model": "default", "input": "Hi", "background": True, "temperature": 0}
Where = Literal["line", "engine", "decoding"]


def answers(prompt: str) -> str:
    return f"I look. {CALL}" if "read_file" in prompt else FIRST


async def ended(client: NativeClient, response: str) -> Told:
    async with asyncio.timeout(15):
        while True:
            status, told = await client.call("GET", f"/v1/responses/{response}")
            assert status == 200, told
            if told["status"] not in ("queued", "in_progress"):
                return told
            await asyncio.sleep(0.02)


def run_of(response: str) -> str:
    return response.replace("resp_", "run-")


async def begin(
    client: NativeClient, engine: TalkingEngine, where: Where, asked: dict[str, Any]
) -> tuple[str, list[str]]:
    """A response that has come so far, and those at the engine's workers before it."""
    engine.is_starting, engine.allowed = where == "decoding", 4
    num_others = 2 if where == "line" else 0
    others = [(await client.call("POST", "/v1/responses", ASKED))[1]["id"] for _ in range(num_others)]
    status, told = await client.call("POST", "/v1/responses", asked)
    assert (status, told["status"]) == (200, "queued")
    if where == "decoding":
        run_id = run_of(told["id"])
        await reaches(client, run_id, lambda shown: shown["usage"]["completion_tokens"] == 4)
    else:
        await engine.turn(len(others) - 1 if others else 0)
    return told["id"], others


@pytest.mark.parametrize("where", ["line", "engine", "decoding"])
@pytest.mark.parametrize("with_tools", [False, True])
async def test_another_gateway_goes_on_with_a_dead_ones_background_response(
    valkey: ValkeyServer, tmp_path: Path, where: Where, with_tools: bool
) -> None:
    asked = {**ASKED, "tools": [TOOL], "metadata": {"k": "v"}} if with_tools else ASKED
    async with TalkingEngine(valkey.url, answers, workers=1) as engine:
        async with serving(valkey.url, tmp_path, "g1", kill=True) as first:
            response, others = await begin(first, engine, where, asked)
        engine.is_starting, engine.allowed = True, None
        async with serving(valkey.url, tmp_path, "g2") as second:
            told = await ended(second, response)
            assert told["status"] == "completed", told
            message, *calls = told["output"]
            if with_tools:
                assert message["content"][0]["text"].strip() == "I look."
                assert [(call["type"], call["name"]) for call in calls] == [("function_call", "read_file")]
                assert told["metadata"] == {"k": "v"} and told["tools"][0]["name"] == "read_file"
            else:
                assert message["content"][0]["text"] == FIRST and not calls
            run = await reaches(second, run_of(response), lambda shown: shown["status"] == "completed")
            assert told["usage"]["output_tokens"] == run["usage"]["completion_tokens"]
            async with second.http.get(f"{second.url}/v1/responses/{response}?stream=true") as stream:
                events = sse_events(await stream.text())
            assert events[-1].data["response"] == told
            for other in others:
                assert (await ended(second, other))["status"] == "completed"


async def test_who_takes_a_response_over_stores_it_though_nobody_reads_it(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers, workers=1) as engine:
        async with serving(valkey.url, tmp_path, "g1", kill=True) as first:
            response, _ = await begin(first, engine, "decoding", ASKED)
        async with serving(valkey.url, tmp_path, "g2") as second:
            engine.allowed = None
            await reaches(second, run_of(response), lambda shown: shown["status"] == "completed")
            await asyncio.sleep(0.5)  # nothing tells of it but a read, which would store it too
        with valkey.client() as client:
            assert client.delete(run_events_key(run_of(response)))  # as it is an hour later
        async with serving(valkey.url, tmp_path, "g3") as third:
            assert (await ended(third, response))["output"][0]["content"][0]["text"] == FIRST
            asked = {**ASKED, "previous_response_id": response, "background": False}
            assert (await third.call("POST", "/v1/responses", asked))[0] == 200


async def test_who_takes_a_response_over_ends_it_at_its_one_call_though_nobody_reads_it(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    """`parallel_tool_calls: false`: what follows the first call is not wanted."""
    asked = {**ASKED, "tools": [TOOL], "parallel_tool_calls": False}
    async with TalkingEngine(valkey.url, lambda prompt: CALL + CALL * 20, workers=1) as engine:
        async with serving(valkey.url, tmp_path, "g1", kill=True) as first:
            response, _ = await begin(first, engine, "decoding", asked)
        async with serving(valkey.url, tmp_path, "g2") as second:
            engine.allowed = len(CALL * 2)  # tokens are bytes at most: two calls come, and then it waits
            await reaches(second, run_of(response), lambda shown: shown["status"] in FINAL)
            told = await ended(second, response)
            assert told["status"] == "completed", told
            assert [item["type"] for item in told["output"]] == ["function_call"]


async def test_a_cancel_at_the_gateway_that_took_it_over_ends_it(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with TalkingEngine(valkey.url, answers, workers=1) as engine:
        async with serving(valkey.url, tmp_path, "g1", kill=True) as first:
            response, _ = await begin(first, engine, "decoding", ASKED)
        async with serving(valkey.url, tmp_path, "g2") as second:
            status, _ = await second.call("POST", f"/v1/responses/{response}/cancel", {})
            assert status == 200
            assert (await ended(second, response))["status"] == "cancelled"
