"""Watched writes over connections that break at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.bus import Bus, BusLost, Entry
from tests.conftest import ValkeyServer
from tests.cutting_proxy import cutting_proxy
from workers.messages import EVENT_FIELD


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Bus]:
    bus = Bus(url, "g1")
    await bus.start()
    try:
        yield bus
    finally:
        await bus.stop()


@pytest.mark.parametrize(
    ("word", "after"), [(b"WATCH", True), (b"XRANGE", False), (b"MULTI", False), (b"MULTI", True)]
)
async def test_a_connection_that_fails_while_watching_neither_loses_nor_doubles_the_write(
    own_valkey: ValkeyServer, word: bytes, after: bool
) -> None:
    with own_valkey.client() as client, cutting_proxy(own_valkey.socket) as proxy:
        client.xadd("stream", {EVENT_FIELD: b"first"}, id="0-1")
        async with connected(proxy.url) as bus:
            proxy.cut_at(word, after=after)

            def decide(entries: list[Entry]) -> Entry | None:
                return None if len(entries) > 1 else Entry("1-1", b"second")

            try:
                written = await bus.append_watched("stream", "0-0", decide)
            except BusLost:  # it says so: whoever asked asks again
                written = await bus.append_watched("stream", "0-0", decide)
            assert written
            assert proxy.num_cuts == 1
        assert [entry for entry, _ in client.xrange("stream")] == [b"0-1", b"1-1"]


async def test_a_bus_that_dies_while_watched_is_lost(own_valkey: ValkeyServer) -> None:
    with own_valkey.client() as client:
        client.xadd("stream", {EVENT_FIELD: b"first"}, id="0-1")
    async with connected(own_valkey.url) as bus:

        def decide(entries: list[Entry]) -> Entry | None:
            own_valkey.kill()
            return Entry("1-1", b"second")

        with pytest.raises(BusLost):
            await bus.append_watched("stream", "0-0", decide)


async def test_a_write_in_between_is_decided_upon_again(valkey: ValkeyServer) -> None:
    seen: list[int] = []
    with valkey.client() as client:
        client.xadd("stream", {EVENT_FIELD: b"first"}, id="0-1")
        async with connected(valkey.url) as bus:

            def decide(entries: list[Entry]) -> Entry | None:
                seen.append(len(entries))
                if len(entries) == 1:
                    client.xadd("stream", {EVENT_FIELD: b"other"}, id="1-1")
                return Entry("2-1", b"ours")

            assert await bus.append_watched("stream", "0-0", decide)
    assert seen == [1, 2]


async def test_no_cancel_is_lost_in_a_command_whenever_it_comes(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:

        async def work() -> None:
            await bus.get("key")
            await asyncio.Event().wait()

        for is_new in (False, True):
            for num_steps in range(25):
                if is_new:
                    await bus.commands.connection_pool.disconnect()
                task = asyncio.create_task(work())
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                task.cancel()
                _, lasting = await asyncio.wait([task], timeout=5)
                assert not lasting, (is_new, num_steps)


async def test_a_time_limit_holds_though_it_ends_within_a_command(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        for number in range(25):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(number / 100_000):
                    await bus.get("key")
                    await asyncio.sleep(5)
