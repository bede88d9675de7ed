"""POST /v1/completions: the order of the road, nothing of its parts."""

from __future__ import annotations

from aiohttp import web

from .api import parse_completion
from .calls import answer_call
from .requests import prepare_completion


async def post_completion(request: web.Request) -> web.StreamResponse:
    """Starts the run and follows it to its end."""
    return await answer_call(request, parse_completion, prepare_completion)
