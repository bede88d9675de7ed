"""One log for a session: each event once, in order, resumable, bounded; what is lost is told."""

from __future__ import annotations

import asyncio

from gateway.bus import BusLost
from gateway.store.session_log import MAX_EVENT_BYTES, SessionLog, log_entry
from tests.conftest import ValkeyServer
from tests.cutting_proxy import cutting_proxy

from .bus_fixture import connected

WHERE = ("t", "s")


def events(*numbers: int) -> list[tuple[str, bytes]]:
    return [(f"1-{number}", b'{"type":"run.progress"}') for number in numbers]


async def told(log: SessionLog) -> list[tuple[str, str]]:
    return [(entry.run_id, entry.event_id) for entry in await log.read(*WHERE)]


async def test_two_owners_in_turn_neither_lose_nor_repeat(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus, connected(valkey.url, "g2") as other:
        first, second = SessionLog(bus), SessionLog(other)
        assert await first.mirror(WHERE, "a", events(1, 2)) == 2
        assert await second.mirror(WHERE, "a", events(1, 2, 3)) == 1
        assert await first.mirror(WHERE, "a", events(1, 2, 3)) == 0
        assert await first.mirror(WHERE, "b", events(1), is_last=True) == 1
        assert await told(first) == [("a", "1-1"), ("a", "1-2"), ("a", "1-3"), ("b", "1-1")]
        assert await second.read("u", "s") == []


async def test_two_owners_at_once_neither_lose_nor_repeat(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus, connected(valkey.url, "g2") as other:
        logs = [SessionLog(bus), SessionLog(other)]

        async def follow(log: SessionLog, run_id: str) -> int:
            return sum([await log.mirror(WHERE, run_id, events(*range(1, last))) for last in range(2, 22)])

        counts = await asyncio.gather(*(follow(log, run_id) for log in logs for run_id in "abcd"))
        entries = await told(logs[0])
    assert sum(counts) == len(entries) == 80
    for run_id in "abcd":
        assert [entry for name, entry in entries if name == run_id] == [f"1-{n}" for n in range(1, 21)]


async def test_a_connection_that_fails_in_a_mirror_neither_loses_nor_repeats(
    own_valkey: ValkeyServer,
) -> None:
    with cutting_proxy(own_valkey.socket) as proxy:
        async with connected(proxy.url) as bus, connected(own_valkey.url, "g2") as other:
            log = SessionLog(bus)
            for number, (word, after) in enumerate(
                [(b"WATCH", True), (b"MULTI", False), (b"MULTI", True)], 1
            ):
                proxy.cut_at(word, after=after)
                try:
                    await log.mirror(WHERE, "a", events(*range(1, number + 1)))
                except BusLost:
                    await log.mirror(WHERE, "a", events(*range(1, number + 1)))
            assert await told(SessionLog(other)) == [("a", f"1-{number}") for number in (1, 2, 3)]


async def test_a_follower_reads_on_as_the_log_grows(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        log = SessionLog(bus)
        await log.mirror(WHERE, "a", events(1, 2))
        first, _ = await log.read(*WHERE)
        follower = log.follow(*WHERE, first.id)
        assert log_entry(await follower.next()).event_id == "1-2"
        await log.mirror(WHERE, "b", events(9))
        entry = log_entry(await asyncio.wait_for(follower.next(), 5))
        assert (entry.run_id, entry.event_id, entry.event) == ("b", "1-9", b'{"type":"run.progress"}')
        follower.close()


async def test_what_was_cut_off_is_told(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        log = SessionLog(bus, max_entries=100)
        await log.mirror(WHERE, "a", events(1))
        (first,) = await log.read(*WHERE)
        assert not await log.lacks(*WHERE, "0-0")
        assert not await log.lacks(*WHERE, first.id)
        await log.mirror(WHERE, "a", events(*range(2, 500)))
        last = (await log.read(*WHERE))[-1]
        assert await log.lacks(*WHERE, "0-0")
        assert await log.lacks(*WHERE, first.id)
        assert not await log.lacks(*WHERE, last.id)
        assert await log.lacks(*WHERE, "99999999999999-0"), "an id of a log that was lost"
        assert await log.lacks("t", "other", first.id)
        assert not await log.lacks("t", "other", "0-0")
        assert await log.exists(*WHERE) and not await log.exists("t", "other")


async def test_a_large_event_is_kept_without_its_body(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        log = SessionLog(bus)
        await log.mirror(WHERE, "a", [("1-1", b"x" * (MAX_EVENT_BYTES + 1))])
        (entry,) = await log.read(*WHERE)
    assert entry.event == b""


async def test_logs_together_stay_under_their_bound(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        log = SessionLog(bus, max_bytes=50_000)
        for number in range(60):
            await log.mirror(("t", f"s{number}"), f"run{number}", [("1-1", b"x" * 2000)])
        kept = [number for number in range(60) if await log.exists("t", f"s{number}")]
    assert 59 in kept and 0 not in kept and len(kept) <= 27
