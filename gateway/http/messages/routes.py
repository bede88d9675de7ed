"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from gateway.callers.hints import Caller, read_hints
from gateway.http.access import access_of
from gateway.http.api import parse
from gateway.http.calls import answer_call
from gateway.http.requests import encode_chat, find_engine, prepare_chat
from gateway.http.route import Route
from gateway.http.state import STATE
from gateway.http.stream import json_response

from .body import MessagesRequest, PromptRequest, parse_messages, parse_prompt
from .shapes import Message, MessageEvent, MessagesErrorBody


class TokenCount(Struct, frozen=True):
    """Tokens of the rendered prompt: system text, tools, messages and what opens the answer."""

    input_tokens: int


async def post_messages(request: web.Request) -> web.StreamResponse:
    """Starts the run and follows it to its end."""
    return await answer_call(request, parse_messages, prepare_chat)


async def post_count(request: web.Request) -> web.StreamResponse:
    """Counts as a call would be counted, but takes no place in any line. A count may exceed the context."""
    state = request.app[STATE]
    asked = await parse(parse_prompt, await request.read())
    access = access_of(request)
    caller = Caller(access.tenant, read_hints(request.headers, asked), access.namespace, access.flow_class)
    engine = find_engine(state.directory, asked.model, state.aliases)
    most = state.settings.body_limit_bytes  # no token is shorter than a byte
    _, prompt = await encode_chat(asked, caller, engine, state.prompts, most)
    return json_response(TokenCount(len(prompt.token_ids) // 4))


ROUTES = (
    Route(
        method="POST",
        path="/v1/messages",
        call=post_messages,
        scope="control",
        summary="Answers a conversation.",
        body=MessagesRequest,
        answers={200: Message},
        events=(MessageEvent,),
        error=MessagesErrorBody,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        call=post_count,
        scope="read",
        summary="How many tokens a conversation's prompt has.",
        body=PromptRequest,
        answers={200: TokenCount},
        error=MessagesErrorBody,
        is_limited=False,
    ),
)
