"""POST /v1/completions: the order of the road, nothing of its parts."""

from __future__ import annotations

import structlog
from aiohttp import web

from .api import parse_completion
from .requests import caller_of, prepare_completion
from .state import STATE
from .stream import TENANT_KEY, answer_run


async def post_completion(request: web.Request) -> web.StreamResponse:
    """Checks, encodes and admits, all before headers are sent; then follows the run to its end."""
    state = request.app[STATE]
    asked = parse_completion(await request.read())
    caller = caller_of(request.headers, asked.user, request.get(TENANT_KEY, ""))
    if caller.agent:
        structlog.contextvars.bind_contextvars(session=caller.agent)
    prepared = await prepare_completion(asked, caller, state.directory, state.prompts)
    run_id = await state.followers.start(prepared.order)
    return await answer_run(request, run_id)
