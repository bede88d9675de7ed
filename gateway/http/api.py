"""The public API's shapes (OpenAI chat and text completions): parsed at the door, trusted inside.

Unknown fields are ignored, null means absent, and a known field with a bad type or value is named with its
remedy. Knows no engine: what depends on a model is checked in requests.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from gateway.dialects.answer import Endpoint
from gateway.dialects.openai import CUSTOM_TOOLS
from gateway.flow.classes import MAX_PRIORITY, FlowClass
from workers.messages import Retain

from .chat_tools import CustomTool, CustomToolCall, plain_tools
from .fields import MAX_STOP_CHARS, MAX_STOPS, bad_field, convert, read_fields

Penalty = Annotated[float, Meta(ge=-2, le=2)]
AtLeastOne = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1)]

INLINE_BODY_BYTES = 65_536
"""A longer body is parsed in a thread."""


class StreamOptions(Struct, frozen=True):
    """`{}` is fine: it asks for nothing."""

    include_usage: bool | None = None


class HintFields(Struct, frozen=True, kw_only=True):
    """`tetrarch`: what a caller tells of its agent. All optional; the headers X-Tetrarch-* say the same."""

    session: str | None = None
    agent: str | None = None
    parent: str | None = None
    fork_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    expects: str | None = None
    final: bool | None = None
    retain: Retain | None = None
    explain: bool | None = None
    flow_class: FlowClass | None = field(name="class", default=None)
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    expected_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    unattended: bool | None = None  # nobody watches: a run that goes astray may be stopped


class CommonRequest(Struct, frozen=True, kw_only=True):
    """Fields that both endpoints take. Defaults are OpenAI's where it has the field."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None  # None: what the context leaves
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] = {}
    seed: int | None = None
    stop: StopString | list[StopString] = []
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] = []
    ignore_eos: bool = False
    n: int = 1
    user: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    tetrarch: HintFields | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class FunctionCall(Struct, frozen=True):
    """`arguments` is JSON text as OpenAI sends it; an object is taken as well."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, frozen=True):
    """A call that an assistant message made."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message. Fields that are not named here reach the template as they came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionSchema(Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    """One entry of `tools`."""

    function: FunctionSchema
    type: Literal["function"] = "function"


class JsonSchemaFormat(Struct, frozen=True):
    """A schema for the answer's content. It is enforced, whatever `strict` says."""

    name: str
    schema: dict[str, Any] | bool | None = None  # None: any object
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True):
    """What the content must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `raw_messages` and `raw_tools` are what the template gets."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None  # a word that a template may know; others do no harm
    chat_template_kwargs: dict[str, Any] = {}
    response_format: ResponseFormat | None = None
    raw_messages: list[dict[str, Any]] = []
    raw_tools: list[dict[str, Any]] | None = None
    later_tools: list[dict[str, Any]] = []  # that messages tell of: not in the template's list
    endpoint: Endpoint = "chat"  # other dialects' bodies become chat requests too
    echoed: dict[str, Any] = {}  # what their answers repeat of the body
    allowed_tools: frozenset[str] | None = None  # None: any of them may be called
    schema_field: str = ""  # where the answer's schema was given, if not where this API has it

    @property
    def tools_in_use(self) -> list[dict[str, Any]] | None:
        """What the template gets of the tools; None where there are none, or where none may be called."""
        if self.tool_choice == "none":
            return None
        return [tool for tool in self.raw_tools or () if self._allows(tool)] or None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """What the answer may call."""
        return [tool for _, tool in self.placed_tools]

    @property
    def placed_tools(self) -> list[tuple[int, dict[str, Any]]]:
        """The same, each with its index in the body."""
        if self.tool_choice == "none":
            return []
        tools = enumerate([*(self.raw_tools or ()), *self.later_tools])
        return [(index, tool) for index, tool in tools if self._allows(tool)]

    def _allows(self, tool: dict[str, Any]) -> bool:
        return self.allowed_tools is None or tool["function"]["name"] in self.allowed_tools


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int = 1


HIDDEN = ("raw_messages", "raw_tools", "later_tools", "endpoint", "echoed", "allowed_tools", "schema_field")
"""Fields of ours that no caller may set."""

INSTEAD: dict[type[Struct], type[Struct]] = {Tool: CustomTool, ToolCall: CustomToolCall}
"""What bodies may also hold where these stand: it is made into them at the door."""

Request = TypeVar("Request", ChatRequest, CompletionRequest)


async def parse(parser: Callable[[bytes], Request], body: bytes) -> Request:
    """`parse_chat` or `parse_completion`, off the event loop where that takes long."""
    return parser(body) if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(parser, body)


def parse_chat(body: bytes) -> ChatRequest:
    """The body as a chat request. Raises InvalidField naming the first bad field."""
    plain = plain_tools(read_fields(body))
    request = chat_request(plain.fields)
    echoed = {CUSTOM_TOOLS: [*plain.custom]} if plain.custom else {}
    return msgspec.structs.replace(request, echoed=echoed, allowed_tools=plain.allowed)


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """A body's fields as a chat request, also those that another API's body was made into."""
    request = convert(fields, ChatRequest, hidden=HIDDEN)
    check_common(request, fields)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_field("top_logprobs", request.top_logprobs)
    for name in ("messages", "tools"):
        if name in request.chat_template_kwargs:
            raise bad_field("chat_template_kwargs", name)
    return msgspec.structs.replace(
        request,
        raw_messages=fields["messages"],
        raw_tools=fields.get("tools"),
        chat_template_kwargs=_variables(request),
    )


def _variables(request: ChatRequest) -> dict[str, Any]:
    """Templates that know efforts read `reasoning_effort`; some can leave thoughts out altogether."""
    effort = request.reasoning_effort
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        variables["enable_thinking"] = False
    return variables | request.chat_template_kwargs


def parse_completion(body: bytes) -> CompletionRequest:
    """The body as a text completion request. Raises InvalidField naming the first bad field."""
    fields = read_fields(body)
    request = convert(fields, CompletionRequest)
    check_common(request, fields)
    if request.echo:
        raise bad_field("echo", request.echo)
    if request.suffix:
        raise bad_field("suffix", request.suffix)
    if request.best_of != 1:
        raise bad_field("best_of", request.best_of)
    return request


def check_common(request: CommonRequest, fields: dict[str, Any]) -> None:
    """What types cannot say of the fields that all endpoints take. Raises InvalidField."""
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", fields["stream_options"], remedy="absent unless 'stream' is true")
    if request.n != 1:
        raise bad_field("n", request.n)
    if request.seed is not None and not -(2**63) <= request.seed < 2**64:
        raise bad_field("seed", request.seed)
    stops = request.stops
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise bad_field("stop", fields["stop"])
