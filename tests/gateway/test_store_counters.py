"""What a tree has used, counted once; and which orchestrators are still there."""

from __future__ import annotations

import asyncio

from gateway.store.heartbeats import Heartbeats
from gateway.store.tree_usage import TreeUsage, Used
from tests.conftest import ValkeyServer

from .bus_fixture import connected


async def test_each_turn_counts_once_whoever_tells_it(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus, connected(valkey.url, "g2") as other:
        first, second = TreeUsage(bus), TreeUsage(other)
        used = Used(prompt_tokens=10, output_tokens=5, thinking_tokens=2, tool_calls=1)
        assert await first.total("root") == Used()
        totals = await asyncio.gather(
            *(usage.add("root", run, 1, used) for usage in (first, second) for run in "abcdefgh")
        )
        assert max(total.output_tokens for total in totals) == 40
        assert await first.total("root") == Used(80, 40, 16, 8)
        await second.add("root", "a", 2, Used(prompt_tokens=1))
        assert (await first.add("root", "a", 1, used)).prompt_tokens == 81
        assert await first.total("other") == Used()


async def test_promises_never_exceed_what_the_tree_may_still_put_out(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        usage = TreeUsage(bus)
        granted = await asyncio.gather(*(usage.promise("root", run, 30, 100) for run in "abcdef"))
        assert sorted(granted) == [False, False, False, True, True, True]
        winner = "abcdef"[granted.index(True)]
        assert await usage.promise("root", winner, 40, 100), "a repeat replaces"
        assert not await usage.promise("root", "g", 1, 100)
        await usage.add("root", winner, 1, Used(output_tokens=12))
        assert not await usage.promise("root", "g", 29, 100), "none in part: a turn is never cut for another"
        assert await usage.promise("root", "g", 28, 100)
        await usage.forget("root", "g")
        await usage.forget("root", "g")
        assert await usage.promise("root", "h", 28, 100)
        assert not await usage.promise("root", "h", 28, 5)


async def test_a_heart_beats_for_as_long_as_it_was_told(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        beats = Heartbeats(bus)
        assert await beats.beating([]) == frozenset()
        await beats.beat("a", 60_000)
        await beats.beat("b", 1)
        await asyncio.sleep(0.02)
        assert await beats.beating(["a", "b", "c"]) == {"a"}
