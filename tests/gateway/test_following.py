"""Reading many streams, and long ones, without holding up others."""

from __future__ import annotations

import asyncio

from redis.connection import Connection

from gateway.bus import PAGE_ENTRIES, Entry
from gateway.follower import MOST_AT_ONCE
from gateway.following import Positions
from tests.conftest import ValkeyServer
from workers.messages import RUN_END_ID

from .bus_fixture import connected


def packed_by_library(positions: dict[str, str]) -> bytes:
    words = ["XREAD", "COUNT", 256, "BLOCK", 5000, "STREAMS", *positions, *positions.values()]
    return b"".join(Connection().pack_command(*words))  # type: ignore[no-untyped-call]


def test_the_command_is_what_the_library_would_send() -> None:
    positions = Positions(256, 5.0)
    told: dict[str, str] = {}
    for number in range(50):
        told[f"run:ü{number}"] = f"1-{number}"
        positions.set(f"run:ü{number}", f"1-{number}")
    for number in range(0, 50, 3):
        del told[f"run:ü{number}"]
        positions.remove(f"run:ü{number}")
    told["run:ü4"] = "2-100"
    positions.set("run:ü4", "2-100")
    assert positions.command() == packed_by_library(told)
    assert dict(positions) == told
    assert positions.get("run:ü3") is None


async def test_long_streams_come_page_by_page(valkey: ValkeyServer) -> None:
    num_entries = 2 * PAGE_ENTRIES + 3
    async with connected(valkey.url) as bus:
        for number in range(num_entries):
            await bus.append("stream", f"1-{number + 1}", b"%d" % number, create=True)
        pages = [page async for page in bus.pages("stream", "0-0")]
        assert [len(page) for page in pages] == [PAGE_ENTRIES, PAGE_ENTRIES, 3]
        assert await bus.read("stream", "0-0") == [entry for page in pages for entry in page]
        assert len(await bus.read("stream", "0-0", PAGE_ENTRIES + 1)) == PAGE_ENTRIES + 1
        assert [entry.id for entry in await bus.read("stream", f"1-{num_entries - 1}")] == [
            f"1-{num_entries}"
        ]
        assert await bus.read("no such stream", "0-0") == []


async def test_a_page_that_ends_with_a_run_is_the_last_one(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        for number in range(PAGE_ENTRIES - 1):
            await bus.append("stream", f"1-{number + 1}", b"", create=True)
        await bus.append("stream", RUN_END_ID, b"end")
        assert len(await bus.read("stream", "0-0")) == PAGE_ENTRIES
        assert await bus.read("stream", RUN_END_ID) == []


async def test_a_reader_with_many_entries_before_it_leaves_the_loop_to_others(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        follower = bus.follow("stream", "0-0")
        follower.push([Entry(f"1-{number + 1}", b"") for number in range(3 * MOST_AT_ONCE)])
        others: list[str] = []
        asyncio.get_running_loop().call_soon(lambda: others.append(follower.position))
        for _ in range(3 * MOST_AT_ONCE):
            await follower.next()
        follower.close()
    assert others == [f"1-{MOST_AT_ONCE}"]
