"""POST /v1/completions: the order of the road, nothing of its parts."""

from __future__ import annotations

import structlog
from aiohttp import web

from .api import parse, parse_completion
from .requests import caller_of, find_engine, prepare_completion
from .state import STATE
from .stream import TENANT_KEY, answer_run


async def post_completion(request: web.Request) -> web.StreamResponse:
    """Checks, admits and encodes, all before headers are sent; then follows the run to its end."""
    state = request.app[STATE]
    asked = await parse(parse_completion, await request.read())
    caller = caller_of(request.headers, asked.user, request.get(TENANT_KEY, ""))
    if caller.agent:
        structlog.contextvars.bind_contextvars(session=caller.agent)
    engine = find_engine(state.directory, asked.model)
    with state.runs.reserve(engine) as place:
        prepared = await prepare_completion(asked, caller, engine, state.prompts)
        run_id = await state.followers.start(prepared.order, place)
    return await answer_run(request, run_id)
