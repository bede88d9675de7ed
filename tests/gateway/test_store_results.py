"""Results: kept a week, cut where too large, and never more than the bus can hold."""

from __future__ import annotations

import pytest

from gateway.store.results import MAX_RESULT_BYTES, ResultCall, ResultError, ResultStore, RunResult
from gateway.store.shelf import Shelf
from tests.conftest import ValkeyServer
from workers.messages import KEY_PREFIX, Usage

from .bus_fixture import Clock, connected

RUN = "run-" + "1" * 32
WHOLE = RunResult(
    state="failed",
    text="answer",
    calls=(ResultCall(id="call_1", name="read", arguments="{}"),),
    usage=Usage(prompt_tokens=3, completion_tokens=2),
    error=ResultError(code="budget_exceeded", message="No output tokens are left."),
    is_partial=True,
)


async def test_a_result_is_kept_for_a_week_and_read_as_it_was(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = ResultStore(bus)
        assert await store.get(RUN) is None
        await store.put(RUN, WHOLE)
        assert await store.get(RUN) == WHOLE
        assert await store.get_many([RUN, "run-x"]) == {RUN: WHOLE}
        with valkey.client() as client:
            assert 604_000 < int(client.ttl(f"{KEY_PREFIX}run:{RUN}:result")) <= 604_800
        await store.remove(RUN)
        await store.remove(RUN)
        assert await store.get(RUN) is None


@pytest.mark.parametrize("size", [MAX_RESULT_BYTES + 1, 5 * MAX_RESULT_BYTES])
@pytest.mark.parametrize("letter", ["a", "漢", "\ud800"])
async def test_a_result_that_is_too_large_keeps_the_heads_of_its_texts(
    valkey: ValkeyServer, size: int, letter: str
) -> None:
    if letter == "\ud800":
        letter = "👩"
    large = RunResult(state="completed", text=letter * size, reasoning=letter * size)
    async with connected(valkey.url) as bus:
        store = ResultStore(bus)
        await store.put(RUN, large)
        kept = await store.get(RUN)
        with valkey.client() as client:
            assert int(client.strlen(f"{KEY_PREFIX}run:{RUN}:result")) <= MAX_RESULT_BYTES
    assert kept is not None and kept.is_truncated and kept.state == "completed"
    assert len(kept.text.encode()) > MAX_RESULT_BYTES // 3
    assert set(kept.text) == {letter}


async def test_a_result_of_just_the_limit_is_whole(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = ResultStore(bus)
        await store.put(RUN, RunResult(state="completed", text="x" * (MAX_RESULT_BYTES - 100)))
        kept = await store.get(RUN)
    assert kept is not None and not kept.is_truncated and len(kept.text) == MAX_RESULT_BYTES - 100


async def test_the_oldest_go_when_all_are_too_many(valkey: ValkeyServer) -> None:
    clock = Clock()
    async with connected(valkey.url) as bus:
        shelf = Shelf(bus, "things", max_bytes=100_000, seconds=3600, now=clock)
        for number in range(300):
            clock.now += 1
            await shelf.put(f"t{number}", b"x" * 1000, used=["t3"] if number > 3 else [])
        values = await shelf.get([f"t{number}" for number in range(300)])
        with valkey.client() as client:
            sizes = dict(client.zrange(f"{KEY_PREFIX}things:sizes", 0, -1, withscores=True))
            num_keys = sum(1 for _ in client.scan_iter(f"{KEY_PREFIX}things:t*"))
    kept = {number for number, value in enumerate(values) if value is not None}
    assert sum(sizes.values()) <= 100_000 * 17 / 16
    assert num_keys == len(kept) == len(sizes)
    assert 3 in kept, "what is used stays"
    assert kept - {3} == set(range(300 - len(kept) + 1, 300)), "the youngest"


async def test_what_has_expired_is_no_longer_counted(valkey: ValkeyServer) -> None:
    clock = Clock()
    async with connected(valkey.url) as bus:
        shelf = Shelf(bus, "things", max_bytes=100_000, seconds=3600, now=clock)
        for number in range(50):
            await shelf.put(f"old{number}", b"x" * 1000)
        clock.now += 3601
        for number in range(10):
            await shelf.put(f"new{number}", b"x" * 1000)
        with valkey.client() as client:
            names = client.zrange(f"{KEY_PREFIX}things:order", 0, -1)
    assert {name.decode()[:3] for name in names} == {"new"}
