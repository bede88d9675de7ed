"""What a tree has used, counted once; and which orchestrators are still there."""

from __future__ import annotations

import asyncio

from gateway.store.heartbeats import Heartbeats
from gateway.store.tree_usage import Most, TreeUsage, Used
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
        usage, most = TreeUsage(bus), Most(output_tokens=100)

        async def promise(run: str, num_tokens: int, most: Most = most) -> bool:
            return await usage.promise("root", run, 1, Used(output_tokens=num_tokens), most)

        granted = await asyncio.gather(*(promise(run, 30) for run in "abcdef"))
        assert sorted(granted) == [False, False, False, True, True, True]
        winner = "abcdef"[granted.index(True)]
        assert await promise(winner, 40), "a repeat replaces"
        assert not await promise("g", 1)
        await usage.add("root", winner, 1, Used(output_tokens=12))
        assert not await promise("g", 29), "none in part: a turn is never cut for another"
        assert await promise("g", 28)
        await usage.forget("root", "g")
        await usage.forget("root", "g")
        assert await promise("h", 28)
        assert not await promise("h", 28, Most(output_tokens=5))


async def test_prompts_are_promised_beside_output_and_paid_for_once_a_turn(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        usage, most = TreeUsage(bus), Most(prompt_tokens=45, output_tokens=100)

        async def promise(run: str, turn: int, prompt_tokens: int, output_tokens: int = 1) -> bool:
            return await usage.promise("root", run, turn, Used(prompt_tokens, output_tokens), most)

        granted = await asyncio.gather(*(promise(run, 1, 13) for run in "abcdefghi"))
        assert sorted(granted) == [False] * 6 + [True] * 3
        assert not await promise("j", 1, 6, 98), "the other limit counts as well"
        winner, second, _ = (run for run, is_granted in zip("abcdefghi", granted, strict=True) if is_granted)
        await usage.add("root", winner, 1, Used(prompt_tokens=13))
        assert not await promise("j", 1, 7)
        assert await promise(winner, 1, 13), "its prompt is read and counted: it goes on"
        assert not await promise(winner, 2, 13), "another turn reads it anew"
        await usage.forget("root", second)
        assert await promise("j", 1, 19)
        assert not await promise("k", 1, 1)


async def test_a_heart_beats_for_as_long_as_it_was_told(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        beats = Heartbeats(bus)
        assert await beats.beating([]) == frozenset()
        await beats.beat("a", 60_000)
        await beats.beat("b", 1)
        await asyncio.sleep(0.02)
        assert await beats.beating(["a", "b", "c"]) == {"a"}
