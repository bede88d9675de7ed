"""Event streams of runs and sessions: complete, resumable without loss or repeat, kept alive, gaps told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.runs.events import CallAsked, InputRequired, Resumed, TurnOpened
from tests.conftest import ValkeyServer
from workers.messages import (
    RUN_END_ID,
    Derail,
    Derailed,
    Failed,
    Finished,
    Paused,
    Progress,
    Timings,
    Usage,
    run_events_key,
)

from .native_gateway import Native, Told, native_gateway

USAGE = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)


@pytest.fixture
async def native(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[Native]:
    async with native_gateway(valkey.url, tmp_path) as gateway:
        yield gateway


async def a_life(native: Native) -> str:
    """A run of two turns, with a pause, a dropped call and a derailed moment."""
    verbs, run_id = native.verbs, await native.create(session="s", agent="a")
    await verbs.play(run_id, "One", " two")
    await verbs.write(run_id, Paused(usage=USAGE, timings=Timings()))
    await verbs.write(run_id, Resumed())
    await verbs.play(run_id, " three")
    await verbs.write(run_id, Finished(reason="stop", usage=USAGE, timings=Timings()))
    await verbs.write(run_id, TurnOpened(turn=2, cause="steer", added=(), dropped_call="read"))
    await verbs.play(run_id, "Four")
    await verbs.write(run_id, Derailed(what=Derail(derail="text_loop", excerpt="la la")))
    await verbs.write(run_id, Finished(reason="derailed", usage=USAGE, timings=Timings()))
    await verbs.end(run_id, "derailed")
    return run_id


def untold(events: list[Told]) -> list[Told]:
    return [{name: value for name, value in told.items() if not name.startswith("sse_")} for told in events]


async def test_a_life_is_told_in_order_with_names_and_ids(native: Native) -> None:
    run_id = await a_life(native)
    events = await native.stream(f"/v1/runs/{run_id}/events")
    assert [told["type"] for told in events] == [
        "run.accepted",
        "run.routed",
        "run.started",
        "token",
        "token",
        "run.paused",
        "run.resumed",
        "run.routed",
        "run.started",
        "token",
        "turn.ended",
        "tool_call.dropped",
        "run.steered",
        "run.routed",
        "run.started",
        "token",
        "run.derail",
        "turn.ended",
        "run.derailed",
    ]
    assert all(told["sse_event"] == told["type"] and told["run"] == run_id for told in events)
    assert [told["text"] for told in events if told["type"] == "token"] == ["One", " two", " three", "Four"]
    assert events[0]["session"] == "s" and events[2]["cached_tokens"] == 4
    assert events[-1]["turns"] == 2 and events[-1]["usage"]["completion_tokens"] == 6
    assert events[-1]["sse_id"] == RUN_END_ID
    dropped = next(told for told in events if told["type"] == "tool_call.dropped")
    assert dropped["name"] == "read" and "sse_id" not in dropped, "only the last of one bus event has an id"


async def test_a_stream_resumed_anywhere_neither_loses_nor_repeats(native: Native) -> None:
    run_id = await a_life(native)
    path = f"/v1/runs/{run_id}/events"
    whole = await native.stream(path)
    for number, told in enumerate(whole[:-1]):
        if "sse_id" in told:
            rest = await native.stream(path, Last_Event_ID=told["sse_id"])
            assert rest == whole[number + 1 :]
            assert await native.stream(f"{path}?after={told['sse_id']}&follow=false") == rest


async def test_a_stream_follows_a_live_run_to_its_end(native: Native) -> None:
    run_id = await native.create()
    reading = asyncio.create_task(native.stream(f"/v1/runs/{run_id}/events"))
    await asyncio.sleep(0.05)
    await native.verbs.play(run_id, "a", "b")
    await native.verbs.write(run_id, Progress(processed_tokens=8, prompt_tokens=10), "1-5")
    await native.verbs.end(run_id)
    events = await asyncio.wait_for(reading, 5)
    assert [told["type"] for told in events][-4:] == ["token", "run.progress", "turn.ended", "run.completed"]
    there = await native.stream(f"/v1/runs/{run_id}/events?follow=false")
    assert untold(there) == untold(events)


async def test_what_is_there_is_told_without_following(native: Native) -> None:
    run_id = await native.create()
    await native.verbs.play(run_id, "a")
    events = await native.stream(f"/v1/runs/{run_id}/events?follow=false")
    assert [told["type"] for told in events] == ["run.accepted", "run.routed", "run.started", "token"]


async def test_a_silent_stream_tells_how_far_the_run_is(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with native_gateway(valkey.url, tmp_path, keepalive_seconds=0.05) as native:
        run_id = await native.create(session="s")
        await native.verbs.play(run_id)
        events = await native.stream(f"/v1/runs/{run_id}/events", count=6)
        assert events[-1] == {
            "type": "run.progress",
            "run": run_id,
            "phase": "prefilling",
            "processed": 4,
            "total": 10,
            "eta_ms": None,
            "queue_pos": None,
            "sse_event": "run.progress",
        }
        told = await native.stream("/v1/sessions/s/events", count=6)
        assert told[-1] == {"type": "keepalive", "sse_event": "keepalive"}


async def test_calls_are_told_as_they_come(native: Native) -> None:
    run_id = await native.create()
    await native.verbs.play(run_id)
    await native.verbs.write(run_id, Finished(reason="stop", usage=USAGE, timings=Timings()))
    await native.verbs.write(run_id, InputRequired(calls=(CallAsked(id="c", name="read", arguments="{}"),)))
    (asked,) = [
        told
        for told in await native.stream(f"/v1/runs/{run_id}/events?follow=false")
        if told["type"] == "run.input_required"
    ]
    assert asked["calls"] == [{"id": "c", "name": "read", "arguments": "{}"}]


async def test_lost_events_are_told_as_a_gap(native: Native) -> None:
    run_id = await native.create()
    await native.verbs.play(run_id, "a")
    await native.verbs.write(run_id, Failed(error="gap", message="The message bus lost events."))
    await native.verbs.end(run_id, "failed")
    events = await native.stream(f"/v1/runs/{run_id}/events")
    gap = next(told for told in events if told["type"] == "gap")
    assert (gap["after"], gap["before"]) == ("1-3", "2-1")
    assert events[-1]["type"] == "run.failed"


async def test_events_that_are_kept_no_more_are_a_gap_before_the_end(native: Native) -> None:
    run_id = await native.create()
    await native.verbs.play(run_id, "a")
    await native.verbs.end(run_id, text="a")
    await native.bus.commands.delete(run_events_key(run_id))
    events = await native.stream(f"/v1/runs/{run_id}/events", Last_Event_ID="1-2")
    assert [told["type"] for told in events] == ["gap", "run.completed"]
    assert events[0]["after"] == "1-2" and events[1]["sse_id"] == RUN_END_ID


async def test_one_stream_tells_of_a_whole_tree_and_resumes(native: Native) -> None:
    first = await a_life(native)
    second = await native.create(session="s", parent_run=first)
    whole = await native.stream("/v1/sessions/s/events?follow=false")
    assert {told["run"] for told in whole} == {first, second}
    assert not {"token", "run.progress"} & {told["type"] for told in whole}
    assert [told["type"] for told in whole if told["run"] == first][-1] == "run.derailed"
    for number, told in enumerate(whole[:-1]):
        if "sse_id" in told:
            path = f"/v1/sessions/s/events?follow=false&after={told['sse_id']}"
            assert await native.stream(path) == whole[number + 1 :]
    last = whole[-1]["sse_id"]
    reading = asyncio.create_task(native.stream("/v1/sessions/s/events", 2, Last_Event_ID=last))
    await asyncio.sleep(0.05)
    await native.verbs.play(second)
    assert [told["type"] for told in await asyncio.wait_for(reading, 5)] == ["run.routed", "run.started"]


async def test_a_session_log_that_was_lost_is_a_gap(native: Native) -> None:
    await native.create(session="s")
    events = await native.stream("/v1/sessions/s/events?follow=false", Last_Event_ID="99999999999999-0")
    assert [told["type"] for told in events] == ["gap", "run.accepted"]


@pytest.mark.parametrize("path", ["/v1/runs/{}/events", "/v1/sessions/s/events"])
async def test_a_bad_query_is_refused_before_the_stream_begins(native: Native, path: str) -> None:
    run_id = await native.create(session="s")
    status, told = await native.call("GET", f"{path.format(run_id)}?follow=maybe")
    assert (status, told["error"]["param"]) == (400, "follow")


@pytest.mark.parametrize("path", ["/v1/runs/{}/events", "/v1/sessions/s/events"])
@pytest.mark.parametrize("after", ["x", "1", "1-2-3", "-1", "9" * 30 + "-1", "9" * 20 + "-1", "1-\u0661"])
async def test_an_id_of_no_stream_is_refused(native: Native, path: str, after: str) -> None:
    run_id = await native.create(session="s")
    status, told = await native.call("GET", f"{path.format(run_id)}?after={after}")
    assert (status, told["error"]["param"]) == (400, "after")
