"""The long calls whose work on the event loop loop_stall.py measures: one text, or a long history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from .gateway_rig import Texts
from .scripted_engine import MODEL

NUM_MESSAGES = 401
NUM_TOOLS = 40

Said = Sequence[tuple[str, str]]
"""Roles and texts."""

TOOLS = [
    {
        "name": f"tool_{number}",
        "description": "Reads some lines of a file. " * 10,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for number in range(NUM_TOOLS)
]


def schema(num_properties: int) -> dict[str, Any]:
    """One that answers have to keep to, with nested objects."""
    inner = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    properties = {f"field_{number}": inner for number in range(num_properties)}
    return {"type": "object", "properties": properties, "required": [*properties]}


@dataclass(frozen=True, slots=True)
class Api:
    """One way to ask."""

    name: str
    path: str
    body: Callable[[Said], dict[str, Any]]


def _messages(said: Said) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in said]


def _chat(said: Said) -> dict[str, Any]:
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    return {"model": MODEL, "messages": _messages(said), "tools": tools, "stream": True}


def _with_schema(said: Said) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema(400), "strict": True}}
    return {"model": MODEL, "messages": _messages(said), "response_format": form, "stream": True}


def _responses(said: Said) -> dict[str, Any]:
    return {
        "model": MODEL,
        "input": _messages(said),
        "tools": [{"type": "function", **tool} for tool in TOOLS],
        "stream": True,
    }


def _anthropic(said: Said) -> dict[str, Any]:
    tools = [
        {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in TOOLS
    ]
    return {"model": MODEL, "messages": _messages(said), "tools": tools}


def _run(said: Said) -> dict[str, Any]:
    return {"model": MODEL, "messages": _messages(said), "session": "bench"}


CHAT = Api("chat", "/v1/chat/completions", _chat)
SCHEMA = Api("chat, schema", "/v1/chat/completions", _with_schema)
RESPONSES = Api("responses", "/v1/responses", _responses)
MESSAGES = Api(
    "messages", "/v1/messages", lambda said: _anthropic(said) | {"max_tokens": 65_536, "stream": True}
)
COUNT = Api("count_tokens", "/v1/messages/count_tokens", _anthropic)
RUNS = Api("runs", "/v1/runs", _run)
APIS = (CHAT, SCHEMA, RESPONSES, MESSAGES, COUNT, RUNS)


def one_text(texts: Texts, num_tokens: int) -> Said:
    """All in one message."""
    return [("user", texts.take(num_tokens))]


def history(texts: Texts, num_tokens: int) -> Said:
    """As long, in many messages of user and assistant."""
    roles = ("user", "assistant")
    text = texts.take(num_tokens)
    size = len(text) // NUM_MESSAGES
    parts = [text[number * size : (number + 1) * size] for number in range(NUM_MESSAGES)]
    return [(roles[number % 2], part) for number, part in enumerate(parts)]


async def ask(session: aiohttp.ClientSession, api: Api, said: Said) -> str:
    """The whole answer as it came; of a run, all its events. Raises RuntimeError for a refusal."""
    body = msgspec.json.encode(api.body(said))
    headers = {"Content-Type": "application/json"}
    async with session.post(api.path, data=body, headers=headers) as response:
        text = await response.text()
        if response.status not in (200, 202):
            raise RuntimeError(f"{api.path}: {response.status} {text[:500]}")
    if api.name != "runs":
        return text
    return await read(session, f"/v1/runs/{msgspec.json.decode(text)['id']}/events")


async def read(session: aiohttp.ClientSession, path: str) -> str:
    """What a path answers."""
    async with session.get(path) as response:
        text = await response.text()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {text[:500]}")
        return text
