"""What the store looks through comes in pages: tens of thousands of names stop neither gateway nor bus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from gateway.store.index import AT_ONCE, RunIndex, RunNote
from gateway.store.shelf import Bound, Shelf
from tests.conftest import ValkeyServer
from workers.messages import KEY_PREFIX

from .bus_fixture import connected

NUM_NAMES = 40_000


@contextlib.asynccontextmanager
async def longest_stall() -> AsyncIterator[list[float]]:
    """How long, in seconds, the event loop stood still inside."""
    stalls = [0.0]

    async def look() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            stalls[0] = max(stalls[0], time.perf_counter() - begun)

    looking = asyncio.create_task(look())
    await asyncio.sleep(0.01)
    stalls[0] = 0.0
    yield stalls
    looking.cancel()


async def test_a_shelf_of_many_names_is_swept(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        with valkey.client() as client:
            names = {f"run-{number:032x}": number for number in range(NUM_NAMES)}
            client.zadd(f"{KEY_PREFIX}x:order", {name: time.time() + n for name, n in names.items()})
            client.zadd(f"{KEY_PREFIX}x:sizes", dict.fromkeys(names, 1000))
        shelf = Shelf(bus, "x", Bound(1000 * (NUM_NAMES - 1000), 86_400))
        async with longest_stall() as stalls:
            await shelf.sweep_if_due()
        assert bus.available
        assert stalls[0] < 0.1
        with valkey.client() as client:
            assert client.zcard(f"{KEY_PREFIX}x:sizes") == NUM_NAMES - 1000
            assert client.zrange(f"{KEY_PREFIX}x:order", 0, 0) == [f"run-{1000:032x}".encode()]


async def test_a_session_of_many_runs_is_listed_in_order(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        index, begun = RunIndex(bus), time.time()
        notes = [
            RunNote(run_id=f"run-{n:032x}", created=begun + n, session="s") for n in range(3 * AT_ONCE + 1)
        ]
        for note in notes:
            await index.add(note)
        found = await index.of_session("", "s")
        assert [note.run_id for note in found] == [note.run_id for note in notes]
