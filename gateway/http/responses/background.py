"""Runs that are followed without a client: to their end for background responses, so far for a look at one.

Owns the tasks that do it. Knows no items.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import cast

import msgspec
from aiohttp import web

from gateway.bus import BusLost
from gateway.dialects.answer import Answer
from gateway.dialects.responses.ids import response_id
from gateway.dialects.table import DIALECTS
from gateway.errors import RunNotFound
from gateway.http.state import STATE, State
from gateway.http.stream import Told, stop_when_complete, tell
from gateway.runs.event_ids import id_pair
from gateway.runs.runs import Run, RunEvent, Runs
from gateway.store.responses import fits
from gateway.tasks import Tasks
from workers.messages import RUN_END_ID

RETRY_SECONDS = 1.0
"""How long a bus that is away is left alone."""

BACKGROUND = web.AppKey("background", Tasks)


async def keep_background(app: web.Application) -> AsyncIterator[None]:
    """Keeps the tasks of one application, and follows responses whose own gateway is gone; for its
    cleanup_ctx.
    """
    app[BACKGROUND] = tasks = Tasks()
    state = app[STATE]

    def follow_taken_over(run: Run) -> None:
        if run.state.spec.is_background:
            tasks.spawn(_follow_taken_over(state, run.run_id), run.in_logs())

    state.runs.on_take_over.append(follow_taken_over)
    yield
    state.runs.on_take_over.remove(follow_taken_over)
    await tasks.end()


async def _follow_taken_over(state: State, run_id: str) -> None:
    """A response that nobody here has begun: stopped where it has said all, and stored at its end."""
    while True:
        try:
            return await _store(state, run_id)
        except RunNotFound:
            return
        except BusLost:
            await asyncio.sleep(RETRY_SECONDS)


async def _store(state: State, run_id: str) -> None:
    response, store = response_id(run_id), state.store.responses
    told = await told_run(state.runs, run_id)
    (begun,) = await store.get([response])
    if begun is not None:
        whole = msgspec.structs.replace(begun, body=msgspec.json.encode(told.teller.body()))
        if fits(whole):
            await store.end(response, whole)


async def follow(
    stack: contextlib.AsyncExitStack, runs: Runs, run_id: str, on_end: Callable[[Told], Awaitable[None]]
) -> None:
    """Follows a run to its end. What is in `stack` lasts as long."""
    async with stack:
        await on_end(await told_run(runs, run_id))


async def told_run(runs: Runs, run_id: str, upto: str = RUN_END_ID) -> Told:
    """A run told up to its end, or to an event that it has. Raises RunNotFound."""
    answer = Answer(run_id)
    generator = cast(AsyncGenerator[RunEvent, None], runs.events(run_id))
    async with contextlib.aclosing(generator) as events:
        entry = await anext(events)
        answer.feed(entry.event)
        if answer.shape.endpoint not in DIALECTS:
            raise RunNotFound(run_id)
        told = Told(answer, DIALECTS[answer.shape.endpoint].teller(answer))
        told.teller.begin()
        while id_pair(entry.id) < id_pair(upto):
            entry = await anext(events)
            tell(told, entry)
            await stop_when_complete(runs, answer)
    failure = answer.failure()
    if failure is not None:
        told.teller.fail(failure)
    return told


async def told_so_far(runs: Runs, run_id: str) -> Told:
    """A run told as far as it has come. Raises RunNotFound."""
    return await told_run(runs, run_id, (await runs.state(run_id)).last_id)
