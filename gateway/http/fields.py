"""Bodies at the door: JSON to structs, and what is wrong with a field in words its sender can act on.

Knows names and their remedies; knows no endpoint and no model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from gateway.errors import GatewayError, InvalidField, shorten
from gateway.flow.classes import MAX_PRIORITY

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_NESTING = 64
"""Deeper bodies are refused: no tool schema needs more, and recursion is not free."""

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
    "unattended": "true or false",
    "retain": "'session', 'ephemeral' or 'pin'",
    "explain": "true or false",
    "class": "'system', 'interactive', 'default' or 'bulk'",
    "priority": f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
    "expected_output_tokens": "a whole number from 1",
    "top_logprobs": "a whole number from 0 to 20, with logprobs true",
    "tools": "a list of {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}",
    "tool_choice": "'auto', 'none', 'required', {'type': 'function', 'function': {'name': ...}}, or such an "
    "object of type 'custom' or 'allowed_tools'",
    "custom": "an object {'name': ..., 'description': ...}",
    "functions": "absent: send them as 'tools', each {'type': 'function', 'function': {...}}",
    "function_call": "absent: send 'tool_choice', with the functions as 'tools'",
    "reasoning_effort": "a string such as 'medium'",
    "parallel_tool_calls": "true or false",
    "tool_calls": "a list of {'id': ..., 'function': {'name': ..., 'arguments': ...}}",
    "chat_template_kwargs": "an object with the template's variables, except messages and tools",
    "json_schema": "an object {'name': ..., 'schema': {...}}",
    "strict": "true or false",
    "response_format": "an object of type 'text', 'json_object' or 'json_schema' with its 'json_schema'",
}
_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")

Body = TypeVar("Body", bound=Struct)


def bad_field(
    param: str, value: object, *, remedy: str | None = None, remedies: Mapping[str, str] = REMEDIES
) -> InvalidField:
    """The error for one field: its name, the value shortened, and what would be right."""
    names = [name for name in re.findall(r"\w+", param) if name in remedies]
    right = remedy or (remedies[names[-1]] if names else "another type")
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


def read_fields(body: bytes) -> dict[str, Any]:
    """The body's fields, nulls left out. Raises GatewayError `invalid_json`, InvalidField for NaN."""
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


def convert(
    fields: dict[str, Any],
    kind: type[Body],
    *,
    hidden: Sequence[str] = (),
    remedies: Mapping[str, str] = REMEDIES,
    where: str = "",
) -> Body:
    """The fields as a struct, but for those in `hidden`. Raises InvalidField naming the first bad one, with
    the path of what holds it (`where`, such as "input[3]").
    """
    known = {name: value for name, value in fields.items() if name not in hidden}
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), known, remedies, where) from None


def _explain(problem: str, fields: dict[str, Any], remedies: Mapping[str, str], where: str) -> InvalidField:
    missing = re.search(r"missing required field `(\w+)`", problem)
    found = _PATH.search(problem)
    path = found[1] if found else ""
    if missing:
        param = f"{where}{path}.{missing[1]}".lstrip(".")
        names = [name for name in re.findall(r"\w+", param) if name in remedies]
        remedy = remedies[names[-1]] if names else "a value"
        return InvalidField(param, f"'{param}' is missing: it must be {remedy}.")
    param = where
    value: Any = fields
    for name, index in _STEP.findall(path):
        key: str | int | None = name or (int(index) if index.isdigit() else None)
        if key is None:  # msgspec does not say which item: the whole container is shown
            break
        param += f".{name}" if name else f"[{index}]"
        value = value[key]
    return bad_field(param.lstrip("."), value, remedies=remedies)
