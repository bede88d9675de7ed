"""A gateway on a real socket with a real store, for tests of the native API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway.bus import Bus
from gateway.callers.tokens import TokenStore
from gateway.http.app import Parts, build_app
from gateway.settings import GatewaySettings
from gateway.store.idempotency import CLAIM_SECONDS, Idempotency
from gateway.store.store import Store, store_in
from metrics.instruments import Instruments

from .bus_fixture import connected
from .fake_runs import FakeDirectory, engine_view
from .fake_verbs import FakeVerbs
from .native_client import NativeClient, Told
from .samples import chatml_bundle


@dataclass
class Native(NativeClient):
    """The gateway, and a client of it."""

    verbs: FakeVerbs
    store: Store
    bus: Bus
    tokens: TokenStore


@contextlib.asynccontextmanager
async def native_gateway(
    url: str, folder: Path, *, claim_seconds: float = CLAIM_SECONDS, **settings: Any
) -> AsyncIterator[Native]:
    """Over this bus."""
    async with connected(url) as bus, aiohttp.ClientSession() as http:
        store = replace(store_in(bus), idempotency=Idempotency(bus, claim_seconds=claim_seconds))
        verbs = FakeVerbs(store)
        tokens = TokenStore(folder / "tokens.json")
        app = build_app(
            GatewaySettings(**{"keepalive_seconds": 5.0, **settings}),
            Parts(
                verbs,
                FakeDirectory(engine_view(chatml_bundle())),
                tokens,
                instruments=Instruments(),
                store=store,
            ),
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield Native(http, f"http://{host}:{port}", verbs, store, bus, tokens)
        finally:
            await runner.cleanup()


__all__ = ["Native", "Told", "native_gateway"]
