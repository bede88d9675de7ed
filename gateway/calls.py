"""The road of each generating call up to its run: check, admit, prepare, start, before headers are sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from .api import Request, parse
from .directory import EngineView
from .prompts import PromptLibrary
from .requests import Caller, Prepared, caller_of, find_engine
from .state import STATE
from .stream import TENANT_KEY

Prepare = Callable[[Request, Caller, EngineView, PromptLibrary], Awaitable[Prepared]]


async def start_call(
    request: web.Request, parser: Callable[[bytes], Request], prepare: Prepare[Request]
) -> tuple[str, Prepared]:
    """The run's id, and what it was made of. Raises GatewayError for what cannot be taken."""
    state = request.app[STATE]
    asked = await parse(parser, await request.read())
    caller = caller_of(request.headers, asked.user, request.get(TENANT_KEY, ""))
    if caller.agent:
        structlog.contextvars.bind_contextvars(session=caller.agent)
    engine = find_engine(state.directory, asked.model)
    with state.runs.reserve(engine) as place:
        prepared = await prepare(asked, caller, engine, state.prompts)
        return await state.followers.start(prepared.order, place), prepared
