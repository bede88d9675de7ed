"""A gateway on a real socket, for every test of the HTTP side."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.bus import Bus
from gateway.callers.tokens import TokenStore
from gateway.http.app import Parts, build_app
from gateway.settings import GatewaySettings
from gateway.store.store import Store, store_in
from metrics.instruments import Instruments

from .fake_runs import FakeDirectory, FakeRuns, engine_view, words
from .http_gateway import Gateway, Start
from .samples import chatml_bundle


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a gateway with given settings; engines and runs are fakes, sockets are real."""
    async with contextlib.AsyncExitStack() as stack:

        async def run(*, host: str = "127.0.0.1", store: Store | None = None, **settings: Any) -> Gateway:
            tokens = TokenStore(tmp_path / "tokens.json")
            runs, directory = FakeRuns(words("Hel", "lo")), FakeDirectory(engine_view(chatml_bundle()))
            bus = {"up": True}
            app = build_app(
                GatewaySettings(**{"keepalive_seconds": 5.0, **settings}),
                Parts(
                    runs,
                    directory,
                    tokens,
                    instruments=Instruments(),
                    store=store or store_in(Bus("unix:///nowhere/bus.sock", "g")),
                    is_bus_up=lambda: bus["up"],
                ),
            )
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            stack.push_async_callback(runs.close)
            await web.TCPSite(runner, host, 0).start()
            address = runner.addresses[0]
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return Gateway(runs, directory, tokens, http, f"http://{address[0]}:{address[1]}", bus)

        yield run


@pytest.fixture
async def gateway(start: Start) -> Gateway:
    return await start()
