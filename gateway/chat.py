"""POST /v1/chat/completions: the order of the road, nothing of its parts."""

from __future__ import annotations

from aiohttp import web

from .api import parse_chat
from .calls import start_call
from .requests import prepare_chat
from .stream import answer_run


async def post_chat(request: web.Request) -> web.StreamResponse:
    """Starts the run, follows it to its end, and learns which tokens its answer was."""
    run_id, prepared = await start_call(request, parse_chat, prepare_chat)
    return await answer_run(request, run_id, on_end=prepared.learn)
