"""Calls of the Responses API in tests, and what its streams add up to."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.http.responses.shapes import Response

from .fake_runs import words
from .http_gateway import Gateway
from .samples import byte_level_tokenizer

RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "name": "read_file", "description": "Reads a file.", "parameters": SCHEMA}
ASKED: dict[str, Any] = {"input": "Read /tmp/a.txt", "tools": [TOOL]}
ARGUMENTS = '{"path": "ü </tool_call>", "n": 1.50}'
CALL = f'<tool_call>\n{{"name": "read_file", "arguments": {ARGUMENTS}}}\n</tool_call>'


@dataclass
class SseEvent:
    """One server-sent event. `raw`: its data as it came."""

    name: str
    data: dict[str, Any]
    raw: str


def sse_events(text: str) -> list[SseEvent]:
    """All of a stream, each with an `event:` line that equals its type."""
    assert text.endswith("\n\n")
    events = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        event = SseEvent(fields["event"], json.loads(fields["data"]), fields["data"])
        assert event.name == event.data["type"]
        if "response" in event.data:
            msgspec.convert(event.data["response"], Response, strict=True)
        events.append(event)
    return events


async def ask(gateway: Gateway, *texts: str, reason: str = "stop", **more: Any) -> dict[str, Any]:
    """A whole response."""
    gateway.runs.script = words(*texts, reason=reason)
    status, body = await gateway.post({**ASKED, **more}, RESPONSES)
    assert status == 200, body
    msgspec.convert(body, Response, strict=True)
    return dict(body)


async def stream(gateway: Gateway, *texts: str, reason: str = "stop", **more: Any) -> list[SseEvent]:
    """The events of a stream."""
    if texts:
        gateway.runs.script = words(*texts, reason=reason)
    asked = {**ASKED, **more, "stream": True}
    async with gateway.http.post(gateway.url + RESPONSES, json=asked) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return sse_events(await response.text())


async def refused(gateway: Gateway, **body: Any) -> dict[str, Any]:
    """The error of a body that is not taken."""
    status, answer = await gateway.post({**ASKED, **body}, RESPONSES)
    assert status == 400, answer
    error: dict[str, Any] = answer["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    return error


def assembled(events: list[SseEvent]) -> list[dict[str, Any]]:
    """The output that deltas add up to, checked step by step against the done events."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for event in events:
        data, index = event.data, event.data.get("output_index", -1)
        match event.name.removeprefix("response."):
            case "output_item.added":
                assert index == len(items) and data["item"]["status"] == "in_progress"
                items[index], texts[index] = data["item"], ""
            case "output_item.done":
                assert index not in done and data["item"]["id"] == items[index]["id"]
                done[index] = data["item"]
            case (
                "output_text.delta"
                | "reasoning_text.delta"
                | "reasoning_summary_text.delta"
                | "function_call_arguments.delta"
                | "custom_tool_call_input.delta"
            ):
                assert data["item_id"] == items[index]["id"] and index not in done
                texts[index] += data["delta"]
            case "output_text.done" | "reasoning_text.done" | "reasoning_summary_text.done":
                assert data["text"] == texts[index]
            case "function_call_arguments.done":
                assert data["arguments"] == texts[index]
            case "custom_tool_call_input.done":
                assert data["input"] == texts[index]
    assert [*done] == sorted(done)
    return [*done.values()]


def prompt_text(gateway: Gateway) -> str:
    """The last call's prompt, of the byte-level tokenizer."""
    token_ids = [*array("I", gateway.runs.last.order.token_ids)]
    return byte_level_tokenizer().decode(token_ids, skip_special_tokens=False)
