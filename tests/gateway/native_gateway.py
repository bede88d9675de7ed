"""A gateway on a real socket with a real store, for tests of the native API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway.bus import Bus
from gateway.callers.tokens import TokenStore
from gateway.http.app import build_app
from gateway.settings import GatewaySettings
from gateway.store.store import Store, store_in
from metrics.instruments import Instruments

from .bus_fixture import connected
from .fake_runs import FakeDirectory, engine_view
from .fake_verbs import FakeVerbs
from .samples import chatml_bundle

Told = dict[str, Any]


@dataclass
class Native:
    """The gateway, and a client of it."""

    verbs: FakeVerbs
    store: Store
    bus: Bus
    tokens: TokenStore
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
        status, told = await self.call("POST", "/v1/runs", {"input": "Hi", **fields})
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


@contextlib.asynccontextmanager
async def native_gateway(url: str, folder: Path, **settings: Any) -> AsyncIterator[Native]:
    """Over this bus."""
    async with connected(url) as bus, aiohttp.ClientSession() as http:
        store = store_in(bus)
        verbs = FakeVerbs(store)
        tokens = TokenStore(folder / "tokens.json")
        app = build_app(
            GatewaySettings(**{"keepalive_seconds": 5.0, **settings}),
            verbs,
            FakeDirectory(engine_view(chatml_bundle())),
            tokens,
            instruments=Instruments(),
            store=store,
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield Native(verbs, store, bus, tokens, http, f"http://{host}:{port}")
        finally:
            await runner.cleanup()
