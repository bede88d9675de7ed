"""Results: kept a week, cut where too large, and never more than the bus can hold."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from structlog.testing import capture_logs

from gateway.store.evictions import Evictions
from gateway.store.results import MAX_RESULT_BYTES, ResultCall, ResultError, ResultStore, RunResult
from gateway.store.shelf import Bound, Shelf
from gateway.store.store import store_in
from metrics.exposition import render
from metrics.instruments import Instruments
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


@pytest.mark.parametrize("num_bytes", [0, 900, 1100, 60_000, 900_000])
async def test_a_result_is_kept_small_and_read_whole(valkey: ValkeyServer, num_bytes: int) -> None:
    text = ("The quick brown fox. " * (num_bytes // 20))[:num_bytes]
    result = RunResult(state="completed", text=text)
    async with connected(valkey.url) as bus:
        store = ResultStore(bus)
        await store.put(RUN, result)
        assert await store.get(RUN) == result
        with valkey.client() as client:
            assert int(client.strlen(f"{KEY_PREFIX}run:{RUN}:result")) <= 2600
            key = f"{KEY_PREFIX}run:{RUN}:result"
            client.set(key, msgspec.msgpack.encode(result))  # as an older gateway kept it
        assert await store.get(RUN) == result


async def test_results_of_calls_do_not_drive_out_those_of_runs(valkey: ValkeyServer) -> None:
    rng = random.Random(3)
    call = RunResult(state="completed", text=rng.randbytes(2000).hex())
    async with connected(valkey.url) as bus:
        store = ResultStore(bus, max_bytes=100_000, max_call_bytes=50_000)
        await store.put(RUN, WHOLE)
        for number in range(100):
            await store.put(f"call-{number}", call, is_call=True)
        assert await store.get(RUN) == WHOLE
        assert await store.get("call-0") is None
        assert await store.get("call-99") == call
        await store.remove("call-99")
        with valkey.client() as client:
            assert client.zscore(f"{KEY_PREFIX}call-results:sizes", "call-99") is None


async def test_what_goes_before_its_time_is_counted_and_logged_now_and_then(valkey: ValkeyServer) -> None:
    clock, counted = Clock(), Counter[str]()
    evictions = Evictions(lambda kind, number: counted.update({kind: number}), clock)
    async with connected(valkey.url) as bus:
        shelf = Shelf(bus, "things", Bound(20_000, 3600, evictions), now=clock)
        with capture_logs() as lines:
            await fill(shelf, clock, 40)
            num_early = 40 - sum(value is not None for value in await shelf.get([f"t{n}" for n in range(40)]))
            assert counted == {"things": num_early} and num_early > 5
            (line,) = lines
            assert (line["event"], line["kind"], line["log_level"]) == ("kept_too_short", "things", "warning")
            clock.now += 601
            await fill(shelf, clock, 40)
        assert len(lines) == 2
        assert lines[0]["number"] + lines[1]["number"] > num_early, (
            "the line tells those of the meantime, too"
        )


async def test_what_goes_in_its_time_is_not_told(valkey: ValkeyServer) -> None:
    clock, counted = Clock(), Counter[str]()
    evictions = Evictions(lambda kind, number: counted.update({kind: number}), clock)
    async with connected(valkey.url) as bus:
        shelf = Shelf(bus, "things", Bound(100_000, 3600, evictions), now=clock)
        await fill(shelf, clock, 50)
        clock.now += 3601
        await fill(shelf, clock, 50)
        assert not counted


async def test_the_metrics_page_shows_what_went_before_its_time(valkey: ValkeyServer) -> None:
    instruments, rng = Instruments(), random.Random(3)
    async with connected(valkey.url) as bus:
        store = store_in(bus, 1 << 20, instruments.store.evicted)
        large = RunResult(state="completed", text=rng.randbytes(50_000).hex())
        for number in range(12):
            await store.results.put(f"run-{number}", large)
        kept = [number for number in range(12) if await store.results.get(f"run-{number}") is not None]
    page = render(instruments.registry).decode()
    assert kept == list(range(12 - len(kept), 12)) and kept != list(range(12))
    assert f'tetrarch_kept_evicted_total{{kind="results"}} {12 - len(kept)}.0' in page


async def fill(shelf: Shelf, clock: Clock, number: int) -> None:
    """With so many values of a thousand bytes, a second apart."""
    for name in range(number):
        clock.now += 1
        await shelf.put(f"t{name}", b"x" * 1000)


async def test_the_oldest_go_when_all_are_too_many(valkey: ValkeyServer) -> None:
    clock = Clock()
    async with connected(valkey.url) as bus:
        shelf = Shelf(bus, "things", Bound(100_000, 3600), now=clock)
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
        shelf = Shelf(bus, "things", Bound(100_000, 3600), now=clock)
        for number in range(50):
            await shelf.put(f"old{number}", b"x" * 1000)
        clock.now += 3601
        for number in range(10):
            await shelf.put(f"new{number}", b"x" * 1000)
        with valkey.client() as client:
            names = client.zrange(f"{KEY_PREFIX}things:order", 0, -1)
    assert {name.decode()[:3] for name in names} == {"new"}
