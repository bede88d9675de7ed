"""POST /v1/completions: the order of the road, nothing of its parts."""

from __future__ import annotations

from aiohttp import web

from .api import parse_completion
from .calls import start_call
from .requests import prepare_completion
from .stream import answer_run


async def post_completion(request: web.Request) -> web.StreamResponse:
    """Starts the run and follows it to its end."""
    run_id, _ = await start_call(request, parse_completion, prepare_completion)
    return await answer_run(request, run_id)
