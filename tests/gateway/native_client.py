"""A client of the native API, for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

Told = dict[str, Any]


@dataclass
class NativeClient:
    """Speaks to one gateway."""

    http: aiohttp.ClientSession
    url: str

    async def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON. `headers`: with _ for -."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if method == "POST":
            sent["Content-Type"] = "application/json"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.request(method, self.url + path, data=data, headers=sent) as response:
            return response.status, await response.json()

    async def create(self, **fields: Any) -> str:
        """A run's id."""
        status, told = await self.call("POST", "/v1/runs", {"input": "Hi"} | fields)
        assert status == 202, told
        return str(told["id"])

    async def stream(self, path: str, count: int | None = None, **headers: str) -> list[Told]:
        """Server-sent events, all of them or the first so many: their data with `id` and `event`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        events: list[Told] = []
        async with self.http.get(self.url + path, headers=sent) as response:
            assert response.status == 200, await response.text()
            told: Told = {}
            async for raw in response.content:
                name, _, value = raw.decode().rstrip("\n").partition(": ")
                if name in ("id", "event"):
                    told[f"sse_{name}"] = value
                elif name == "data":
                    told |= json.loads(value)
                elif not name and told:
                    events.append(told)
                    told = {}
                if len(events) == count:
                    break
        return events
