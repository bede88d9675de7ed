"""A gateway on a real socket for tests: fake runs and engines behind it, a real HTTP client before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.callers.tokens import TokenStore

from .fake_runs import FakeDirectory, FakeRuns

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Gateway:
    """A gateway on a real socket, and a client of it."""

    runs: FakeRuns
    directory: FakeDirectory
    tokens: TokenStore
    http: aiohttp.ClientSession
    url: str = ""
    bus: dict[str, bool] = field(default_factory=lambda: {"up": True})

    async def post(self, body: Any, path: str = CHAT, **kwargs: Any) -> tuple[int, Any]:
        kwargs = {"json": body} if isinstance(body, dict) else {"data": body, "headers": JSON} | kwargs
        async with self.http.post(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def stream(self, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return events_of(await response.text())


JSON = {"Content-Type": "application/json"}


def events_of(text: str) -> list[dict[str, Any]]:
    """Parsed SSE: id (or None), data (JSON or '[DONE]'), comments as {'comment': ...}."""
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.split("\n")]
        fields = {name: value for name, _, value in lines if name}
        if block.startswith(":"):
            events.append({"comment": block.split("\n")[0]})
        if "data" in fields:
            data = fields["data"]
            events.append({"id": fields.get("id"), "data": data if data == "[DONE]" else json.loads(data)})
    return events


def chunks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["data"] for event in events if isinstance(event.get("data"), dict)]


Start = Callable[..., Awaitable[Gateway]]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)
