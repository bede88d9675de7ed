"""A Responses body as the chat call that the model is given, and what its answer will repeat of the body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.dialects.responses.echo import Echo, pack
from gateway.errors import InvalidField
from gateway.http.api import ChatRequest, CommonRequest, chat_request
from gateway.http.fields import bad_field

from .body import RESPONSES_REMEDIES, ResponsesRequest
from .items import Item, to_messages
from .tools import Tools

OWN_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("tool_choice.function", "tool_choice"),
    ("messages", "input"),
)
"""A chat call's fields, and the body's where it calls them otherwise."""

DROPPED = ("stream_options", "max_tokens")


@dataclass(frozen=True, slots=True)
class Asked:
    """A body, as it came and as a request."""

    fields: dict[str, Any]
    request: ResponsesRequest


def to_chat(asked: Asked, items: Sequence[Item], *, is_stored: bool) -> ChatRequest:
    """The chat call whose conversation is `items`. Raises InvalidField, also for the chat call's fields."""
    request = asked.request
    tools = Tools()
    tools.add(request.tools)
    choice = tools.choose(request.tool_choice)
    chat: dict[str, Any] = {
        name: asked.fields[name]
        for name in CommonRequest.__struct_fields__
        if name in asked.fields and name not in DROPPED
    }
    chat |= {
        "messages": to_messages(items, request.instructions),
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "chat_template_kwargs": asked.fields.get("chat_template_kwargs", {}),
    }
    if request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if tools.all:
        chat["tools"] = tools.all
    if request.max_output_tokens is not None or request.max_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens or request.max_tokens
    if request.shows_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    response_format = _response_format(request.text.format)
    if response_format is not None:
        chat["response_format"] = response_format
    echoed = pack(_echo(request, tools, is_stored=is_stored))
    return msgspec.structs.replace(chat_request(chat), endpoint="responses", echoed=echoed)


@contextmanager
def own_words() -> Iterator[None]:
    """Errors of the chat call that a body was made into name the body's own fields."""
    try:
        yield
    except InvalidField as error:
        own = _own_param(error.param or "")
        message = error.message.replace(f"'{error.param}'", f"'{own}'")
        raise InvalidField(own or None, message, kind=error.kind) from None


def _own_param(param: str) -> str:
    for chat, own in OWN_NAMES:
        if param.startswith(chat):
            return own + param[len(chat) :]
    return param


def _response_format(told: dict[str, Any] | None) -> dict[str, Any] | None:
    match (told or {"type": "text"}).get("type"):
        case "text":
            return None
        case "json_schema":
            assert told is not None
            schema = {
                name: told[name] for name in ("name", "schema", "strict", "description") if name in told
            }
            return {"type": "json_schema", "json_schema": schema}
        case "json_object":
            return {"type": "json_object"}
        case other:
            remedy = "'text', 'json_object' or 'json_schema'"
            raise bad_field("text.format.type", other, remedy=remedy, remedies=RESPONSES_REMEDIES)


def _echo(request: ResponsesRequest, tools: Tools, *, is_stored: bool) -> Echo:
    shown = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": request.temperature,
        "text": {
            "format": request.text.format or {"type": "text"},
            "verbosity": request.text.verbosity or "medium",
        },
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",  # what is in force: a prompt that is too long is refused
        "user": request.user,
    }
    return Echo(
        shown={name: msgspec.Raw(msgspec.json.encode(value)) for name, value in shown.items()},
        tools=tools.called_as,
        is_stored=is_stored,
        is_background=request.background,
        shows_summary=request.reasoning.shows_summary,
        is_encrypted="reasoning.encrypted_content" in request.include,
        shows_logprobs=request.shows_logprobs,
    )
