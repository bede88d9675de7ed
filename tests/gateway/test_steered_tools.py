"""A steer within a tool call of a chat, Responses or Messages call: that tool call is no part of the answer,
nor of what a later response goes on with.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ValkeyServer
from workers.messages import Tokens

from .chatting import CALL
from .messages_api import assembled as assembled_message
from .messages_api import sse_events as message_events
from .messages_api import with_inputs
from .native_client import NativeClient
from .responses_api import assembled as assembled_output
from .responses_api import sse_events as response_events
from .samples import TOOLS
from .talking_engine import TalkingEngine, answer_ids
from .test_native_real import serving
from .test_runs import stored

WORDS, BETTER, STEER = "I look. ", "Better not.", "Do not"
TOLD = f"{WORDS}{CALL}"
NUM_TOKENS = len(answer_ids(TOLD)) - 1
FUNCTION = TOOLS[0]["function"]
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Read"}], "tools": TOOLS},
    "responses": {"input": "Read", "tools": [{"type": "function", **FUNCTION}]},
    "messages": {
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Read"}],
        "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    },
}
OPENED = len(answer_ids(f"{WORDS}<tool_call>")) - 1
BEGUN = [OPENED, OPENED + 3, OPENED + 8, OPENED + 13, *range(NUM_TOKENS - 4, NUM_TOKENS)]
"""Tokens after which a steer comes: within the call's name, its arguments, and up to its closing tag."""


def answers(prompt: str) -> str:
    """Words and a call; better ones after the steer."""
    return BETTER if STEER in prompt else TOLD


@pytest.fixture
async def engine(valkey: ValkeyServer) -> AsyncIterator[TalkingEngine]:
    async with TalkingEngine(valkey.url, answers) as talking:
        yield talking


@pytest.fixture
async def client(engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[NativeClient]:
    async with serving(valkey.url, tmp_path) as started:
        yield started


class Steered:
    """Calls of one gateway that are steered after so many tokens."""

    def __init__(self, client: NativeClient, engine: TalkingEngine, valkey: ValkeyServer) -> None:
        self.client, self.engine, self.valkey = client, engine, valkey
        self.run_id = ""

    async def text(self, api: str, num_tokens: int, *, stream: bool) -> str:
        """What the call answers."""
        num_turns = len(self.engine.turns)
        self.engine.allowed = num_tokens
        calling = asyncio.create_task(self._post(api, stream=stream))
        turn = await self.engine.turn(num_turns)
        self.run_id = turn.submit.run_id
        async with asyncio.timeout(10):
            while self._num_tokens() < num_tokens:  # noqa: ASYNC110 - others write them
                await asyncio.sleep(0.005)
        _, told = await self.client.call("POST", f"/v1/runs/{self.run_id}/steer", {"text": STEER})
        assert told["applied"] == "now", told
        self.engine.allowed = None
        async with asyncio.timeout(10):
            return await calling

    def _num_tokens(self) -> int:
        return sum(isinstance(event, Tokens) for event in stored(self.valkey, self.run_id))

    async def _post(self, api: str, *, stream: bool) -> str:
        body = {**ASKED[api], "stream": stream}
        async with self.client.http.post(self.client.url + PATHS[api], json=body) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    async def usage(self) -> dict[str, Any]:
        """As the run itself counts it."""
        _, told = await self.client.call("GET", f"/v1/runs/{self.run_id}")
        return dict(told["usage"])

    async def dropped(self) -> bool:
        """Whether the run tells of a dropped call."""
        events = await self.client.stream(f"/v1/runs/{self.run_id}/events?follow=false")
        return any(told["type"] == "tool_call.dropped" for told in events)


@pytest.fixture
def steered(client: NativeClient, engine: TalkingEngine, valkey: ValkeyServer) -> Steered:
    return Steered(client, engine, valkey)


@pytest.mark.parametrize("num_tokens", BEGUN)
async def test_a_chat_body_has_no_call_that_a_steer_dropped(steered: Steered, num_tokens: int) -> None:
    body = json.loads(await steered.text("chat", num_tokens, stream=False))
    assert await steered.dropped()
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": WORDS.rstrip() + BETTER}
    assert choice["finish_reason"] == "stop"
    counted = await steered.usage()
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == counted[name]


@pytest.mark.parametrize("num_tokens", BEGUN)
async def test_a_chat_stream_never_completes_a_call_that_a_steer_dropped(
    steered: Steered, num_tokens: int
) -> None:
    text = await steered.text("chat", num_tokens, stream=True)
    datas = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    choices = [choice for data in datas[:-1] for choice in json.loads(data)["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == WORDS.rstrip() + BETTER
    assert choices[-1]["finish_reason"] == "stop"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@pytest.mark.parametrize("num_tokens", BEGUN)
async def test_no_response_has_a_call_that_a_steer_dropped(steered: Steered, num_tokens: int) -> None:
    body = json.loads(await steered.text("responses", num_tokens, stream=False))
    events = response_events(await steered.text("responses", num_tokens, stream=True))
    final = events[-1].data["response"]
    assert assembled_output(events) == final["output"]
    for output in (body["output"], final["output"]):
        assert {item["type"] for item in output} == {"message"}
        assert "".join(item["content"][0]["text"] for item in output) == WORDS.rstrip() + BETTER
    assert all(event.name != "response.function_call_arguments.done" for event in events)
    indexes = [e.data["output_index"] for e in events if e.name == "response.output_item.added"]
    assert indexes == [*range(len(indexes))], "a dropped call keeps its index for itself"


async def test_a_later_response_goes_on_without_the_dropped_call(
    steered: Steered, client: NativeClient, engine: TalkingEngine
) -> None:
    first = json.loads(await steered.text("responses", NUM_TOKENS - 3, stream=False))
    going_on = {**ASKED["responses"], "input": "And?", "previous_response_id": first["id"]}
    status, _ = await client.call("POST", PATHS["responses"], going_on)
    assert status == 200
    prompt = engine.prompt_of(len(engine.turns) - 1)
    assert BETTER in prompt and "And?" in prompt
    assert "<tool_call>" not in prompt[prompt.index("<|im_start|>assistant") :]
    last = first["output"][-1]
    referring = {**ASKED["responses"], "input": [{"type": "item_reference", "id": last["id"]}]}
    status, told = await client.call("POST", PATHS["responses"], referring)
    assert status == 200, told
    assert BETTER in engine.prompt_of(len(engine.turns) - 1)


@pytest.mark.parametrize("num_tokens", BEGUN)
async def test_no_message_has_a_call_that_a_steer_dropped(steered: Steered, num_tokens: int) -> None:
    body = json.loads(await steered.text("messages", num_tokens, stream=False))
    events = message_events(await steered.text("messages", num_tokens, stream=True))
    whole = with_inputs(assembled_message(events))
    for content in (body["content"], whole["content"]):
        assert {block["type"] for block in content} == {"text"}
        assert "".join(block["text"] for block in content) == WORDS.rstrip() + BETTER
    assert len(body["content"]) == len(whole["content"])
    assert body["stop_reason"] == whole["stop_reason"] == "end_turn"
