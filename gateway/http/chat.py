"""POST /v1/chat/completions: the order of the road, nothing of its parts."""

from __future__ import annotations

from aiohttp import web

from .api import parse_chat
from .calls import answer_call
from .requests import prepare_chat


async def post_chat(request: web.Request) -> web.StreamResponse:
    """Starts the run and follows it to its end."""
    return await answer_call(request, parse_chat, prepare_chat)
