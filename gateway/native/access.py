"""Whose run it is: what a request may reach of runs and store. Another tenant's run is not there."""

from __future__ import annotations

import structlog
from aiohttp import web

from gateway.errors import RunNotFound
from gateway.http.access import access_of
from gateway.http.state import STATE
from gateway.http.stream import RUN_KEY
from gateway.runs.facade import RunVerbs
from gateway.runs.state import RunState
from gateway.store.store import Store

from .reading import RUN_ID


def verbs_of(request: web.Request) -> RunVerbs:
    """What can be done with runs."""
    return request.app[STATE].runs


def store_of(request: web.Request) -> Store:
    """What is kept of them."""
    return request.app[STATE].store


async def own_run(request: web.Request) -> tuple[str, RunState]:
    """The run in the request's path. Raises RunNotFound, also for another tenant's."""
    run_id = request.match_info["id"]
    state = await state_of(request, run_id)
    request[RUN_KEY] = run_id
    structlog.contextvars.bind_contextvars(run=run_id)  # until the request ends
    return run_id, state


async def state_of(request: web.Request, run_id: str) -> RunState:
    """A run that the caller may see. Raises RunNotFound."""
    if not RUN_ID.fullmatch(run_id):
        raise RunNotFound(run_id)
    state = await verbs_of(request).state(run_id)
    if not access_of(request).sees(state.spec.tenant):
        raise RunNotFound(run_id)
    return state
