"""Waits for one or all of many runs, so that nobody need poll."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import cast

import msgspec
from aiohttp import web

from gateway.http.stream import json_response
from gateway.runs.facade import RunVerbs
from gateway.runs.run import RunEvent
from gateway.runs.state import RunState, advance

from .access import state_of, verbs_of
from .bodies import WaitBody
from .lists import shown
from .reading import read_verb, whole_number
from .showing import is_settled
from .structs import MAX_WAIT_MS, WaitRequest

_WAIT = {"mode": "'any' or 'all'"}


async def post_wait(request: web.Request) -> web.Response:
    """Answers when the runs are done, or with those that are when the time is over."""
    return await _wait(request, read_verb(await request.read(), WaitRequest, _WAIT))


async def get_wait(request: web.Request) -> web.Response:
    """The same with a query: ids separated by commas."""
    query = request.query
    told = {
        "ids": [run_id for run_id in query.get("ids", "").split(",") if run_id],
        "mode": query.get("mode", "all"),
        "until": query.get("until", "settled"),
        "timeout_ms": whole_number(query, "timeout_ms", 30_000, MAX_WAIT_MS),
    }
    return await _wait(request, read_verb(msgspec.json.encode(told), WaitRequest, _WAIT))


async def _wait(request: web.Request, asked: WaitRequest) -> web.Response:
    input_counts = asked.until == "settled"
    run_ids = list(dict.fromkeys(asked.ids))
    states = {run_id: await state_of(request, run_id) for run_id in run_ids}
    done = {run_id for run_id, state in states.items() if is_settled(state, input_counts=input_counts)}
    timed_out = False
    if len(done) < len(run_ids) and not (done and asked.mode == "any"):
        verbs = verbs_of(request)
        waiting = [
            asyncio.ensure_future(_settled(verbs, run_id, state, input_counts=input_counts))
            for run_id, state in states.items()
            if run_id not in done
        ]
        timed_out = await _gather(waiting, asked)
        done |= {task.result() for task in waiting if task.done() and not task.cancelled()}
    return json_response(
        WaitBody(
            timed_out=timed_out,
            done=[await shown(request, run_id) for run_id in run_ids if run_id in done],
            pending=[run_id for run_id in run_ids if run_id not in done],
        )
    )


async def _gather(waiting: list[asyncio.Task[str]], asked: WaitRequest) -> bool:
    """Whether the time was over first. A failure of one is raised."""
    how = asyncio.FIRST_COMPLETED if asked.mode == "any" else asyncio.FIRST_EXCEPTION
    try:
        done, pending = await asyncio.wait(waiting, timeout=asked.timeout_ms / 1000, return_when=how)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    for task in done:
        task.result()
    return bool(pending) and not (done and asked.mode == "any")


async def _settled(verbs: RunVerbs, run_id: str, state: RunState, *, input_counts: bool) -> str:
    """Its id, once it has ended or waits for its caller."""
    events = cast(AsyncGenerator[RunEvent, None], verbs.events(run_id, state.last_id))
    async with contextlib.aclosing(events):
        async for entry in events:
            state = advance(state, entry.id, entry.event)
            if is_settled(state, input_counts=input_counts):
                break
    return run_id
