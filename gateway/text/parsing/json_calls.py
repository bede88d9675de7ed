"""Calls as JSON: `{"name": ..., "arguments": {...}}`. Arguments go out while they come in."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Any

import msgspec

from .parts import Arguments, CallBegun, CallEnded
from .tape import Steps, Tape, blanks, match_up_to, one_of, starts

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}?")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*"(?:name|arguments|parameters|type|function|id)"')
_OUTSIDE = re.compile(r'[^"{}\[\]]+|.', re.DOTALL)
_INSIDE = re.compile(r'[^"\\\x00-\x1f]+|.', re.DOTALL)
KEY_CHARS = 48


class ObjectScan:
    """Finds the end of a JSON object that comes in pieces. Line ends and other control characters in strings,
    which models write and JSON forbids, become escapes.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def read(self, text: str, start: int = 0) -> tuple[str, int | None]:
        """The piece from `start` on as valid text; the object's end in it, if it has come."""
        clean: list[str] = []
        position = start
        while position < len(text):
            found = (_INSIDE if self._in_string else _OUTSIDE).match(text, position)
            assert found is not None
            position = found.end()
            clean.append(self._step(found[0]))
            if self._depth == 0:
                return "".join(clean), position
        return "".join(clean), None

    def _step(self, token: str) -> str:
        if self._in_string:
            return self._step_inside(token)
        if token == '"':
            self._in_string = True
        elif token in ("{", "["):
            self._depth += 1
        elif token in ("}", "]"):
            self._depth -= 1
        return token

    def _step_inside(self, token: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif token == "\\":
            self._is_escaped = True
        elif token == '"':
            self._in_string = False
        return json.dumps(token)[1:-1] if token < " " else token


def json_call(
    tape: Tape, at: int, names: Container[str] | None = None, *, is_certain: bool = True
) -> Steps[bool]:
    """Reads one call object at `at`; False: there is none, and nothing was read. `names`: those that make it
    a call, None for all. Not `is_certain`: an object that begins like no call is left at once.
    """
    if not (yield from starts(tape, "{", at)):
        return False
    if not is_certain and (yield from match_up_to(tape, _FIRST_KEY, ":", KEY_CHARS, at)) is None:
        return False
    scan, position = ObjectScan(), at
    while True:
        head = _HEAD.match(tape.text, at)
        if head is not None:
            return (yield from _streamed(tape, head, names))
        _, end = scan.read(tape.text, position)
        if end is not None:
            return _whole(tape, at, end, names)
        if tape.is_over:
            return False
        position = len(tape.text)
        yield


def arguments_object(tape: Tape) -> Steps[None]:
    """Reads an object as the arguments of the call that was begun."""
    scan, sent = ObjectScan(), list[str]()
    while True:
        text, end = scan.read(tape.text)
        tape.drop(len(tape.text) if end is None else end)
        if text:
            sent.append(text)
            tape.parts.append(Arguments(text))
        if end is not None:
            tape.parts.append(CallEnded(isinstance(decoded("".join(sent)), dict)))
            return
        if tape.is_over:
            return
        yield


def decoded(text: str) -> Any:
    """The JSON value; None for what is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _streamed(tape: Tape, head: re.Match[str], names: Container[str] | None) -> Steps[bool]:
    name = decoded(head[1])
    if not isinstance(name, str) or (names is not None and name not in names):
        return False
    tape.drop(head.end())
    tape.parts.append(CallBegun(name))
    yield from arguments_object(tape)
    position = yield from blanks(tape)
    following = yield from one_of(tape, ("}", ","), position)
    if following == "}":
        tape.drop(position + 1)
    elif following == ",":
        yield from _skip_members(tape)
    return True


def _skip_members(tape: Tape) -> Steps[None]:
    """Members behind the arguments say nothing to us."""
    scan, position = ObjectScan(depth=1), 0
    while True:
        _, end = scan.read(tape.text, position)
        if end is not None:
            tape.drop(end)
        if end is not None or tape.is_over:
            return
        position = len(tape.text)
        yield


def _whole(tape: Tape, at: int, end: int, names: Container[str] | None) -> bool:
    """A call whose members come in another order, or whose arguments are JSON in a string."""
    clean, _ = ObjectScan().read(tape.text[at:end])
    call = decoded(clean)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict):
        return False
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = decoded(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return False
    if names is not None and (name not in names or not {"arguments", "parameters"} & call.keys()):
        return False
    tape.drop(end)
    text = json.dumps(arguments, ensure_ascii=False)
    tape.parts += [CallBegun(name), Arguments(text), CallEnded()]
    return True
