"""Calls of the Messages API in tests, and its streams put together as Anthropic's SDK does it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.http.messages.shapes import Message, MessageEvent, MessagesErrorBody

from .fake_runs import words
from .http_gateway import Gateway

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Read /tmp/a.txt"}
HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 99, "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"name": "read_file", "description": "Reads a file.", "input_schema": SCHEMA}
ASKED: dict[str, Any] = {**HELLO, "tools": [TOOL], "thinking": {"type": "adaptive"}}
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "ü </tool_call>", "n": 1.50}}\n</tool_call>'
INPUT = {"path": "ü </tool_call>", "n": 1.5}


@dataclass
class SseEvent:
    """One server-sent event."""

    name: str
    data: dict[str, Any]
    id: str | None


async def ask(
    gateway: Gateway, text: str | list[str], *, reason: str = "stop", **more: Any
) -> dict[str, Any]:
    """A whole message that is what its description says."""
    gateway.runs.script = words(*([text] if isinstance(text, str) else text), reason=reason)
    status, body = await gateway.post({**ASKED, **more}, MESSAGES)
    assert status == 200, body
    msgspec.convert(body, Message, strict=True)
    return dict(body)


async def stream(gateway: Gateway, body: dict[str, Any], **kwargs: Any) -> list[SseEvent]:
    """The events of a stream, each of which is what its description says."""
    asked = {**body, "stream": True}
    async with gateway.http.post(gateway.url + MESSAGES, json=asked, **kwargs) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return sse_events(await response.text())


def sse_events(text: str) -> list[SseEvent]:
    events = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = json.loads(fields["data"])
        assert fields["event"] == data["type"] and fields.keys() <= {"id", "event", "data"}
        msgspec.convert(data, MessagesErrorBody if data["type"] == "error" else MessageEvent, strict=True)
        events.append(SseEvent(fields["event"], data, fields.get("id")))
    return events


def assembled(events: list[SseEvent]) -> dict[str, Any]:
    """The message that a stream adds up to. Blocks open, grow and close in turn, or this fails."""
    assert [event.name for event in events[:2]] == ["message_start", "ping"]
    assert [event.name for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = copy.deepcopy(events[0].data["message"])
    texts: list[str] = []
    is_open = False
    for event in events[1:-2]:
        data = event.data
        match event.name:
            case "content_block_start":
                assert not is_open and data["index"] == len(message["content"])
                message["content"].append(copy.deepcopy(data["content_block"]))
                texts.append("")
                is_open = True
            case "content_block_delta":
                assert is_open and data["index"] == len(texts) - 1
                _grow(message["content"][-1], data["delta"], texts)
            case "content_block_stop":
                assert is_open and data["index"] == len(texts) - 1
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = texts[-1]
            case other:
                assert other == "ping"
    assert not is_open
    return {**message, **events[-2].data["delta"], "usage": events[-2].data["usage"]}


def _grow(block: dict[str, Any], delta: dict[str, Any], texts: list[str]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case "input_json_delta":
            texts[-1] += delta["partial_json"]


def with_inputs(message: dict[str, Any]) -> dict[str, Any]:
    """A put together message with its calls' inputs as objects."""
    blocks = [
        {**block, "input": json.loads(block["input"])} if block["type"] == "tool_use" else block
        for block in message["content"]
    ]
    return {**message, "content": blocks}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same script have in common."""
    blocks = [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in message["content"]
    ]
    return {**message, "id": "", "content": blocks, "usage": None}
