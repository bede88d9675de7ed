"""The list of runs: newest first, page by page, filtered, bounded."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.store.index import Filter, RunIndex, RunNote
from tests.conftest import ValkeyServer
from workers.messages import KEY_PREFIX, Usage

from .bus_fixture import Clock, connected


def note(number: int, **fields: object) -> RunNote:
    told = {"run_id": f"run-{number:032x}", "created": 1e9 + number, "session": "s", **fields}
    return RunNote(**told)  # type: ignore[arg-type]


async def all_of(index: RunIndex, which: Filter, *, limit: int) -> list[str]:
    found: list[str] = []
    cursor = None
    while True:
        page = await index.find("", which, before=cursor, limit=limit)
        assert len(page.notes) <= limit
        found += [entry.run_id for entry in page.notes]
        cursor = page.cursor
        if cursor is None:
            return found


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from("xy")), max_size=12),
    st.integers(1, 4),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_pages_hold_each_run_once_newest_first(
    valkey: ValkeyServer, runs: list[tuple[int, str, str]], limit: int
) -> None:
    with valkey.client() as client:
        client.flushall()
    async with connected(valkey.url) as bus:
        index = RunIndex(bus, now=Clock(1e9))
        notes = [
            note(number, created=1e9 + moment, agent=agent, session=session)
            for number, (moment, agent, session) in enumerate(runs)
        ]
        for entry in notes:
            await index.add(entry)
        ordered = sorted(notes, key=lambda entry: (entry.created, entry.run_id), reverse=True)
        for which in (Filter(), Filter(agent="a"), Filter(session="x"), Filter(session="y", agent="b")):
            expected = [entry.run_id for entry in ordered if which.holds(entry)]
            assert await all_of(index, which, limit=limit) == expected


async def test_more_runs_of_one_moment_than_a_page_holds(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        index = RunIndex(bus, now=Clock(1e9))
        for number in range(600):
            await index.add(note(number, created=1e9))
        found = await all_of(index, Filter(), limit=250)
    assert len(found) == len(set(found)) == 600


async def test_a_status_that_stays_is_never_replaced(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        index = RunIndex(bus, now=Clock(1e9))
        await index.add(note(1))
        for status in ("decoding", "completed", "paused", "failed"):
            await index.note(note(1).run_id, status)
        await index.note(note(1).run_id, "failed", Usage(prompt_tokens=3))
        await index.add(note(1))  # a repeat
        await index.note("run-unknown", "decoding")
        (entry,) = await index.get([note(1).run_id, "run-unknown"])
        assert (entry.status, entry.usage) == ("completed", Usage(prompt_tokens=3))
        assert (await index.find("", Filter(status="completed"))).notes
        assert not (await index.find("", Filter(status="queued"))).notes


async def test_tenants_do_not_see_each_others_runs(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        index = RunIndex(bus, now=Clock(1e9))
        await index.add(note(1, tenant="a"))
        assert not (await index.find("b", Filter())).notes
        assert not (await index.find("b", Filter(session="s"))).notes
        assert not await index.of_session("b", "s")
        assert len(await index.of_session("a", "s")) == 1


async def test_the_index_forgets_after_a_week_and_over_its_number(valkey: ValkeyServer) -> None:
    clock = Clock(1e9)
    async with connected(valkey.url) as bus:
        index = RunIndex(bus, max_runs=5, now=clock)
        for number in range(12):
            await index.add(note(number))
        assert await all_of(index, Filter(), limit=10) == [note(n).run_id for n in range(11, 6, -1)]
        assert len(await index.of_session("", "s")) == 5
        with valkey.client() as client:
            assert sum(1 for _ in client.scan_iter(f"{KEY_PREFIX}run:*:note")) == 5
        clock.now += 8 * 86_400
        await index.add(note(99, created=clock.now))
        assert await all_of(index, Filter(), limit=10) == [note(99).run_id]
        await index.remove(note(99, created=clock.now))
        assert await all_of(index, Filter(), limit=10) == []


@pytest.mark.parametrize("cursor", ["", "x", "1e9", "nan.run-1", "1.0.run-1", "\0.", "inf.x"])
async def test_a_cursor_of_nobodys_is_refused_or_harmless(valkey: ValkeyServer, cursor: str) -> None:
    async with connected(valkey.url) as bus:
        index = RunIndex(bus, now=Clock(1e9))
        await index.add(note(1))
        try:
            page = await index.find("", Filter(), before=cursor)
        except ValueError:
            return
        assert page.cursor is None
