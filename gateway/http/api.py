"""The public API's shapes (OpenAI chat and text completions): parsed at the door, trusted inside.

Unknown fields are ignored, null means absent, and a known field with a bad type or value is named with its
remedy. Knows no engine: what depends on a model is checked in requests.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from gateway.dialects.answer import Endpoint
from gateway.errors import GatewayError, InvalidField, shorten
from gateway.flow.classes import MAX_PRIORITY, FlowClass
from workers.messages import Retain

Penalty = Annotated[float, Meta(ge=-2, le=2)]
AtLeastOne = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1)]

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_NESTING = 64
"""Deeper bodies are refused: no tool schema needs more, and recursion is not free."""


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


class Tool(Struct, frozen=True):
    """One entry of `tools`."""

    function: FunctionSchema
    type: Literal["function"] = "function"


class ResponseFormat(Struct, frozen=True):
    """Only plain text: anything else is refused instead of silently dropped."""

    type: Literal["text"] = "text"


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `raw_messages` and `raw_tools` are what the template gets."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    response_format: ResponseFormat | None = None
    raw_messages: list[dict[str, Any]] = []
    raw_tools: list[dict[str, Any]] | None = None
    endpoint: Endpoint = "chat"  # other dialects' bodies become chat requests too
    echoed: dict[str, Any] = {}  # what their answers repeat of the body

    @property
    def tools_in_use(self) -> list[dict[str, Any]] | None:
        """What the template gets of the tools; None where there are none, or where none may be called."""
        return None if self.tool_choice == "none" else self.raw_tools or None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int = 1


REMEDIES = {
    "messages": "a non-empty list of messages",
    "role": "'system', 'developer', 'user', 'assistant' or 'tool'",
    "content": "a string, a list of parts {'type': 'text', 'text': ...} or null",
    "prompt": "a string, a list of token ids, or a list with one of these",
    "model": "a string from GET /v1/models, or absent",
    "stream": "true or false",
    "stream_options": 'an object such as {"include_usage": true}',
    "include_usage": "true or false",
    "max_tokens": "a whole number from 1",
    "max_completion_tokens": "a whole number from 1",
    "temperature": "a number from 0 to 2",
    "top_p": "a number above 0 and up to 1",
    "top_k": "a whole number from 0 (off)",
    "min_p": "a number from 0 to 1",
    "repetition_penalty": "a number above 0 and up to 10 (1 is off)",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
    "logit_bias": "an object of token ids and numbers from -100 to 100",
    "seed": "a whole number of at most 64 bits",
    "stop": f"a non-empty string of up to {MAX_STOP_CHARS} characters, or a list of at most {MAX_STOPS}",
    "stop_token_ids": "a list of token ids of this model",
    "ignore_eos": "true or false",
    "n": "1: one answer per call",
    "best_of": "1: one answer per call",
    "echo": "false: the prompt is not sent back",
    "suffix": "absent: text is not inserted before a suffix",
    "user": "a string",
    "prompt_cache_key": "a string",
    "metadata": "an object",
    "tetrarch": "an object of hints about the calling agent",
    "session": "the name of a session: a string",
    "agent": "the name of an agent: a string",
    "parent": "the name of the agent that called this one: a string",
    "fork_tokens": "the number of the prompt's first tokens that are the parent's: a whole number from 0",
    "expects": "the name of the tool whose result comes next: a string",
    "final": "true or false",
    "retain": "'session', 'ephemeral' or 'pin'",
    "explain": "true or false",
    "class": "'system', 'interactive', 'default' or 'bulk'",
    "priority": f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
    "expected_output_tokens": "a whole number from 1",
    "top_logprobs": "a whole number from 0 to 20, with logprobs true",
    "tools": "a list of {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}",
    "tool_choice": "'auto' or 'none': a call cannot be forced yet, so ask for it in the prompt",
    "parallel_tool_calls": "true or false",
    "tool_calls": "a list of {'id': ..., 'function': {'name': ..., 'arguments': ...}}",
    "chat_template_kwargs": "an object with the template's variables, except messages and tools",
    "response_format": "{'type': 'text'}: structured output is not supported yet",
}
_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")

Request = TypeVar("Request", ChatRequest, CompletionRequest)


async def parse(parser: Callable[[bytes], Request], body: bytes) -> Request:
    """`parse_chat` or `parse_completion`, off the event loop where that takes long."""
    return parser(body) if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(parser, body)


def parse_chat(body: bytes) -> ChatRequest:
    """The body as a chat request. Raises InvalidField naming the first bad field."""
    fields = _fields(body)
    request = _convert(fields, ChatRequest)
    _check_common(request, fields)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_field("top_logprobs", request.top_logprobs)
    if request.tool_choice not in ("auto", "none"):
        raise bad_field("tool_choice", request.tool_choice)
    for name in ("messages", "tools"):
        if name in request.chat_template_kwargs:
            raise bad_field("chat_template_kwargs", name)
    return msgspec.structs.replace(request, raw_messages=fields["messages"], raw_tools=fields.get("tools"))


def parse_completion(body: bytes) -> CompletionRequest:
    """The body as a text completion request. Raises InvalidField naming the first bad field."""
    fields = _fields(body)
    request = _convert(fields, CompletionRequest)
    _check_common(request, fields)
    if request.echo:
        raise bad_field("echo", request.echo)
    if request.suffix:
        raise bad_field("suffix", request.suffix)
    if request.best_of != 1:
        raise bad_field("best_of", request.best_of)
    return request


def bad_field(param: str, value: object, *, remedy: str | None = None) -> InvalidField:
    """The error for one field: its name, the value shortened, and what would be right."""
    names = [name for name in re.findall(r"\w+", param) if name in REMEDIES]
    right = remedy or (REMEDIES[names[-1]] if names else "another type")
    subject = f"'{names[-1]}'" if names and param.endswith("]") else "it"
    return InvalidField(param, f"'{param}' is {describe(value)}, but {subject} must be {right}.")


def describe(value: object) -> str:
    """A JSON value in a few words. Never long, however large the value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if value.bit_length() > 128:
            return "an enormous integer"
        case str():
            return f"'{shorten(value[:200])}'"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return f"an object of {len(value)} fields" if value else "an empty object"
        case _:
            return shorten(repr(value))


def _fields(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise _unreadable(body, str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    if is_deep(decoded, MAX_NESTING):
        raise _too_deep()
    if not isinstance(decoded, dict):
        raise GatewayError("invalid_json", f"The body must be a JSON object, not {describe(decoded)}.")
    return {name: value for name, value in decoded.items() if value is not None}


def _unreadable(body: bytes, problem: str) -> GatewayError:
    """Names the field when the trouble is a number that JSON or a double cannot hold (NaN, 1e999)."""
    try:
        loose = json.loads(body, parse_int=_parse_int)
        infinite = _infinite_field(loose) if isinstance(loose, dict) else None
    except (ValueError, RecursionError):
        infinite = None
    if infinite is None:
        return GatewayError("invalid_json", f"The body is not valid JSON: {problem}.")
    value = loose[infinite]
    param = shorten(infinite)
    return bad_field(param, value if isinstance(value, float) else "a value with NaN or Infinity")


def _infinite_field(fields: dict[str, Any]) -> str | None:
    return next((name for name, value in fields.items() if not _is_finite(value)), None)


def _parse_int(digits: str) -> float:
    """Python refuses to read whole numbers beyond a few thousand digits; to a double they are infinite."""
    return int(digits) if len(digits) < 400 else math.copysign(math.inf, -1 if digits[0] == "-" else 1)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _too_deep() -> GatewayError:
    return GatewayError("invalid_json", f"The body is nested deeper than {MAX_NESTING} levels.")


def is_deep(value: Any, levels: int) -> bool:
    """Whether lists and objects nest deeper than so many levels."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(is_deep(item, levels - 1) for item in value if isinstance(item, (dict, list)))


def _convert(fields: dict[str, Any], kind: type[Request]) -> Request:
    hidden = ("raw_messages", "raw_tools", "endpoint", "echoed")
    known = {name: value for name, value in fields.items() if name not in hidden}
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), known) from None


def _explain(problem: str, fields: dict[str, Any]) -> InvalidField:
    missing = re.search(r"missing required field `(\w+)`", problem)
    found = _PATH.search(problem)
    path = found[1] if found else ""
    if missing:
        param = f"{path}.{missing[1]}".lstrip(".")
        names = [name for name in re.findall(r"\w+", param) if name in REMEDIES]
        remedy = REMEDIES[names[-1]] if names else "a value"
        return InvalidField(param, f"'{param}' is missing: it must be {remedy}.")
    param = ""
    value: Any = fields
    for name, index in _STEP.findall(path):
        key: str | int | None = name or (int(index) if index.isdigit() else None)
        if key is None:  # msgspec does not say which item: the whole container is shown
            break
        param += f".{name}" if name else f"[{index}]"
        value = value[key]
    return bad_field(param.lstrip("."), value)


def _check_common(request: CommonRequest, fields: dict[str, Any]) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", fields["stream_options"], remedy="absent unless 'stream' is true")
    if fields.get("stream_options") == {}:
        raise bad_field("stream_options", {})
    if request.n != 1:
        raise bad_field("n", request.n)
    if request.seed is not None and not -(2**63) <= request.seed < 2**64:
        raise bad_field("seed", request.seed)
    stops = request.stops
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise bad_field("stop", fields["stop"])
