"""Bodies and queries of the native API, checked and named field by field. Knows no run and no engine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from gateway.callers.hints import Names
from gateway.errors import InvalidField, shorten
from gateway.http.api import HIDDEN, ChatRequest, parse_chat
from gateway.http.chat_tools import plain_tools
from gateway.http.fields import bad_field, convert, read_fields
from gateway.text.structured import check_schema
from gateway.text.structured.checks import problem_of
from gateway.text.structured.lark import json_of

from .structs import CHAT_ONLY, REMEDIES, RunRequest

RUN_ID = re.compile(r"run-[0-9a-f]{32}")
MAX_KEY_CHARS = 256

Kind = TypeVar("Kind", bound=Struct)
RunKind = TypeVar("RunKind", bound=RunRequest)

_HINTS = {
    "session": "session",
    "agent": "agent",
    "parent": "parent",
    "final": "final",
    "retain": "retain",
    "expects": "expects",
    "flow_class": "class",
    "priority": "priority",
    "expected_output_tokens": "expected_output_tokens",
    "unattended": "unattended",
}
"""Fields of a run that a chat request tells in `tetrarch`, with their names there."""

_CHAT_NAMES = frozenset(field.encode_name for field in msgspec.structs.fields(ChatRequest)) - {
    *CHAT_ONLY,
    *HIDDEN,
    "metadata",
}


@dataclass(frozen=True, slots=True)
class AskedRun:
    """A run's request, and the chat request in it."""

    request: RunRequest
    chat: ChatRequest
    chat_fields: Mapping[str, Any]
    schema: bytes  # that the result must fit, checked; b"": none
    digest: bytes  # of all fields, however they were ordered and spaced

    def body(self, names: Names) -> bytes:
        """The chat request as JSON, under the names that its agent has in the end."""
        told = {"session": names.session, "agent": names.agent, "parent": names.parent}
        named = {name: value for name, value in told.items() if value}
        return msgspec.json.encode({**self.chat_fields, "tetrarch": self.chat_fields["tetrarch"] | named})


def read_verb(body: bytes, kind: type[Kind], remedies: Mapping[str, str] = {}) -> Kind:
    """A verb's body; an empty one is {}. Raises InvalidField or GatewayError `invalid_json`."""
    fields = read_fields(body or b"{}")
    _refuse_unknown(fields, kind)
    return convert(fields, kind, remedies={**REMEDIES, **remedies})


def read_run(fields: dict[str, Any], kind: type[RunKind]) -> tuple[RunKind, AskedRun]:
    """A run's fields, nulls left out. Raises InvalidField naming the first bad one."""
    _refuse_unknown(fields, kind)
    request = convert(plain_tools(fields).fields, kind, hidden=HIDDEN, remedies=REMEDIES)
    if (request.messages is None) == (request.input is None):
        raise InvalidField("messages", "Give either 'messages', a list, or 'input', a string: one of them.")
    if request.messages is not None and not request.messages:
        raise bad_field("messages", [])
    chat_fields = {name: value for name, value in fields.items() if name in _CHAT_NAMES}
    if request.input is not None:
        chat_fields["messages"] = [{"role": "user", "content": request.input}]
    told = {theirs: getattr(request, ours) for ours, theirs in _HINTS.items()}
    chat_fields["tetrarch"] = {name: value for name, value in told.items() if value is not None}
    chat = parse_chat(msgspec.json.encode(chat_fields))
    digest = hashlib.blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=16).digest()
    return request, AskedRun(request, chat, chat_fields, _checked_schema(request), digest)


@contextmanager
def inside(where: str) -> Iterator[None]:
    """Names the fields of errors from where they stand in a larger body."""
    try:
        yield
    except InvalidField as error:
        param = f"{where}.{error.param}" if error.param else where
        raise InvalidField(param, f"{where}: {error.message}", kind=error.kind) from None


def run_id_of(given: str, param: str = "id") -> str:
    """A run's id as it must look. Raises InvalidField."""
    if not RUN_ID.fullmatch(given):
        raise bad_field(param, given, remedy="a run's id: run- and 32 hex digits")
    return given


def whole_number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A query's number from 0. Raises InvalidField."""
    text = query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > most:
        raise bad_field(name, text, remedy=f"a whole number from 0 to {most}")
    return int(text)


def flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    """A query's truth. Raises InvalidField."""
    text = query.get(name)
    if text not in (None, "true", "1", "false", "0"):
        raise bad_field(name, text, remedy="true or false")
    return default if text is None else text in ("true", "1")


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The header's value. Raises InvalidField."""
    key = headers.get("Idempotency-Key")
    if key is not None and not (key.isprintable() and 0 < len(key) <= MAX_KEY_CHARS):
        raise InvalidField(
            "Idempotency-Key",
            f"'Idempotency-Key' is '{shorten(key)}', but it must be 1 to {MAX_KEY_CHARS} printable letters.",
        )
    return key


def _checked_schema(request: RunRequest) -> bytes:
    """The schema of enforced keys. Raises InvalidField naming what cannot be enforced."""
    if request.result_schema is None:
        return b""
    form = request.response_format
    if form is not None and form.type != "text":
        raise InvalidField("result_schema", "Give either 'result_schema' or 'response_format': one of them.")
    checked = check_schema(request.result_schema, "result_schema")
    for where, pattern in checked.patterns.items():
        if problem := problem_of("start: " + json_of({"type": "string", "pattern": pattern})):
            raise InvalidField(where, f"'{where}' cannot be enforced: {problem}. Write it another way.")
    return msgspec.json.encode(checked.schema)


def _refuse_unknown(fields: Mapping[str, Any], kind: type[Struct]) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    if issubclass(kind, RunRequest):
        known -= {*CHAT_ONLY, *HIDDEN}
    for name, value in fields.items():
        if name not in known:
            raise bad_field(shorten(name), value, remedy=f"absent: the fields are {', '.join(sorted(known))}")
