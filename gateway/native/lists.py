"""Runs looked at: one, many, a session's tree; and one forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from gateway.callers.hints import clean
from gateway.errors import Conflict, GatewayError, InvalidField
from gateway.http.access import tenant_of
from gateway.http.fields import bad_field
from gateway.http.stream import json_response
from gateway.runs.forgetting import forget
from gateway.runs.outcomes import FINAL
from gateway.store.index import Filter, RunNote

from .access import own_run, state_of, store_of
from .bodies import RunBody, RunList, TreeBody
from .reading import whole_number
from .showing import show, show_line
from .structs import MAX_LISTED
from .trees import sum_usage, tree_of

INLINE_RUNS = 100
"""The tree of more is made in a thread."""

STATUSES = ("queued", "prefilling", "decoding", "paused", "input_required", *FINAL)


async def get_run(request: web.Request) -> web.Response:
    """One run."""
    run_id, _ = await own_run(request)
    return json_response(await shown(request, run_id))


async def shown(request: web.Request, run_id: str) -> RunBody:
    """A run that the caller may see, as it is now. Raises RunNotFound."""
    state = await state_of(request, run_id)
    has_ended = state.status in FINAL
    return show(run_id, state, await store_of(request).results.get(run_id) if has_ended else None)


async def get_runs(request: web.Request) -> web.Response:
    """The caller's runs, or those of another tenant for an admin; newest first."""
    query = request.query
    limit = whole_number(query, "limit", 100, MAX_LISTED)
    if not limit:
        raise bad_field("limit", 0, remedy=f"a whole number from 1 to {MAX_LISTED}")
    status = query.get("status")
    if status is not None and status not in STATUSES:
        raise bad_field("status", status, remedy=" or ".join(f"'{name}'" for name in STATUSES))
    which = Filter(
        session=query.get("session"),
        agent=query.get("agent"),
        parent=query.get("parent"),
        parent_run=query.get("parent_run"),
        status=status,
        priority_class=query.get("class"),
        kind=query.get("kind"),
    )
    try:
        page = await store_of(request).index.find(
            tenant_of(request), which, before=query.get("before"), limit=limit
        )
    except ValueError:
        raise bad_field("before", query["before"], remedy="the 'next' of an earlier page") from None
    return json_response(RunList(data=[show_line(note) for note in page.notes], next=page.cursor))


async def delete_run(request: web.Request) -> web.Response:
    """Forgets an ended run: its events, its result, its ids, the response that it was. What was forked from
    it stays, and the key that made it makes it no more.
    """
    run_id, state = await own_run(request)
    if state.status not in FINAL:
        raise Conflict(
            "run_live", f"{run_id} has not ended: it is {state.status}. Cancel it first, or wait for its end."
        )
    await forget(store_of(request), run_id)
    return json_response({"id": run_id, "object": "run", "deleted": True})


async def get_tree(request: web.Request) -> web.Response:
    """A session's agents and their runs."""
    session, notes = await session_runs(request)
    agents = tree_of(notes) if len(notes) <= INLINE_RUNS else await asyncio.to_thread(tree_of, notes)
    return json_response(
        TreeBody(
            session=session,
            num_runs=len(notes),
            num_live=sum(note.status not in FINAL for note in notes),
            usage=sum_usage([agent.usage for agent in agents]),
            agents=agents,
        )
    )


async def session_runs(request: web.Request) -> tuple[str, Sequence[RunNote]]:
    """The session in the request's path, and its runs. Raises GatewayError `not_found`."""
    given = request.match_info["session"]
    session = clean(given)
    if not session:
        raise InvalidField("session", "'session' must be the name of a session.")
    notes = await store_of(request).index.of_session(tenant_of(request), session)
    if not notes:
        raise GatewayError("not_found", f"There is no session '{session}', or its runs are over a week old.")
    return session, notes
