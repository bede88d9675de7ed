"""The bodies of the Messages API: parsed at the door, made into chat requests.

Fields without use here are ignored where nothing is lost, and refused where something would be.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import structlog
from msgspec import Meta, Struct, structs

from gateway.dialects.messages.teller import OMITS_THOUGHTS
from gateway.errors import InvalidField
from gateway.http.api import AtLeastOne, ChatRequest, HintFields, chat_request
from gateway.http.fields import MAX_STOP_CHARS, MAX_STOPS, convert, read_fields

from .blocks import wrong
from .history import MessageParam, read_history
from .remedies import MESSAGES_REMEDIES
from .tools import ToolChoice, chat_choice, read_tools

StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]

log = structlog.get_logger(__name__)


class Thinking(Struct, frozen=True):
    """`thinking`. The budget of tokens is taken and not held to: `max_tokens` bounds both."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: AtLeastOne | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True):
    """A JSON schema that the answer obeys."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: all that makes a prompt."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    mcp_servers: list[Any] = []
    tetrarch: HintFields | None = None


class MessagesRequest(PromptRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: AtLeastOne
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)] = []
    metadata: dict[str, Any] | None = None
    container: Any = None
    thread: Any = None


SAME_IN_CHAT = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "metadata", "tetrarch")


def parse_messages(body: bytes) -> ChatRequest:
    """The body as a chat request. Raises InvalidField naming the first bad field."""
    fields = read_fields(body)
    return _chat_request(convert(fields, MessagesRequest, remedies=MESSAGES_REMEDIES), fields)


def parse_prompt(body: bytes) -> ChatRequest:
    """A body whose tokens shall be counted as a chat request. Raises InvalidField."""
    fields = read_fields(body)
    return _chat_request(convert(fields, PromptRequest, remedies=MESSAGES_REMEDIES), fields)


def _chat_request(asked: PromptRequest, fields: dict[str, Any]) -> ChatRequest:
    _refuse_lost(asked)
    tools = read_tools(asked.tools)
    history = read_history(asked.system, asked.messages, tools)
    chat: dict[str, Any] = {name: fields[name] for name in SAME_IN_CHAT if name in fields}
    chat |= {"messages": history.messages, "tool_choice": chat_choice(asked.tool_choice, tools)}
    if tools.listed:
        chat["tools"] = tools.listed
    if asked.tool_choice is not None and asked.tool_choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    if isinstance(asked, MessagesRequest) and asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    chat |= _format(asked)
    chat["chat_template_kwargs"] = _template_variables(asked)
    request = chat_request(chat)
    if tools.num_skipped or history.num_changed:
        log.info("messages_read", hosted_tools=tools.num_skipped, changed_thoughts=history.num_changed)
    omits = asked.thinking is not None and asked.thinking.display == "omitted"
    return structs.replace(
        request,
        endpoint="messages",
        later_tools=[*tools.deferred.values()],
        echoed={OMITS_THOUGHTS: True} if omits else {},
    )


def _refuse_lost(asked: PromptRequest) -> None:
    """What could not be ignored without losing a part of the conversation."""
    if asked.mcp_servers:
        raise wrong("mcp_servers", asked.mcp_servers)
    if not isinstance(asked, MessagesRequest):
        return
    if asked.container is not None:
        raise wrong("container", asked.container)
    if asked.thread is not None:
        error = wrong("thread", asked.thread)
        raise InvalidField(error.param, error.message, kind="thread_unsupported_request")


def _format(asked: PromptRequest) -> dict[str, Any]:
    wanted = asked.output_config.format if asked.output_config is not None else None
    wanted = wanted or asked.output_format
    if wanted is None:
        return {}
    schema = {"name": "output", "schema": wanted.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _template_variables(asked: PromptRequest) -> dict[str, Any]:
    """Thinking is off unless asked for, as this API's clients expect. Not all templates know it."""
    thinks = asked.thinking is not None and asked.thinking.type != "disabled"
    variables: dict[str, Any] = {"enable_thinking": thinks}
    if asked.output_config is not None and asked.output_config.effort is not None:
        effort = asked.output_config.effort
        variables["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
    return variables
