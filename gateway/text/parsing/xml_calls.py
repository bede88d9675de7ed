"""Calls as Qwen's coders write them: `<function=name><parameter=key>value</parameter></function>`.

A value is raw text; the schema says what it means. Strings go out while they come in.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from .formats import Reading
from .json_calls import decoded
from .parts import Arguments, CallBegun, CallEnded
from .python_calls import expression_of
from .tape import Steps, Tape, blanks, match_up_to, one_of, open_tail

FUNCTION = "<function="
_PARAMETER, _END = "<parameter=", "</function>"
_CLOSING = "</parameter>"
_NAME_CHARS = 256
_MAX_LITERAL_CHARS = 65_536
_FUNCTION = re.compile(r"<function=([^\s<>]+)>")
_KEY = re.compile(r"<parameter=([^<>]+)>")
_NEXT = (_PARAMETER, _END, "</tool_call>")


def xml_call(tape: Tape, at: int, reading: Reading) -> Steps[bool]:
    """Reads one call whose `<function=` stands at `at`; False: it is none, and nothing was read."""
    head = yield from match_up_to(tape, _FUNCTION, ">", _NAME_CHARS, at)
    if head is None:
        return False
    position = yield from blanks(tape, head.end())
    if (yield from one_of(tape, _NEXT, position)) is None:
        return False
    tape.drop(position)
    tape.parts += [CallBegun(head[1]), Arguments("{")]
    yield from _parameters(tape, reading.tools.get(head[1], {}))
    return True


def _parameters(tape: Tape, types: dict[str, tuple[str, ...]]) -> Steps[None]:
    separator = ""
    keys: set[str] = set()
    while True:
        position = yield from blanks(tape)
        following = yield from one_of(tape, _NEXT, position)
        if following in (_END, "</tool_call>"):
            tape.drop(position + (len(_END) if following == _END else 0))
            tape.parts += [Arguments("}"), CallEnded()]
            return
        key = None
        if following is not None:
            key = yield from match_up_to(tape, _KEY, ">", _NAME_CHARS, position)
        if key is None or key[1] in keys:
            if not tape.is_over or tape.text[position:]:
                tape.parts.append(CallEnded(is_whole=False))  # what follows is no part of the call
            return
        tape.drop(key.end())
        keys.add(key[1])
        tape.parts.append(Arguments(f"{separator}{json.dumps(key[1], ensure_ascii=False)}: "))
        separator = ", "
        if not (yield from _value(tape, types.get(key[1], ("string",)))):
            return


def _value(tape: Tape, types: tuple[str, ...]) -> Steps[bool]:
    """Reads a value and its closing tag; False: the text ended before."""
    is_text = types in ((), ("string",))
    if is_text:
        tape.parts.append(Arguments('"'))
    pieces: list[str] = []
    while True:
        piece, is_whole = yield from _piece(tape, is_first=not pieces)
        pieces.append(piece)
        if is_text and piece:
            tape.parts.append(Arguments(json.dumps(piece, ensure_ascii=False)[1:-1]))
        if is_whole or (tape.is_over and not tape.text):
            break
    if is_text and is_whole:
        tape.parts.append(Arguments('"'))
    elif is_whole:
        tape.parts.append(Arguments(_typed("".join(pieces), types)))
    return is_whole


def _piece(tape: Tape, *, is_first: bool) -> Steps[tuple[str, bool]]:
    """Some more of a value; whether that was its end. A closing tag ends it only where a call goes on."""
    if is_first and (yield from one_of(tape, ("\n",))):
        tape.drop(1)
    closing = "\n" + _CLOSING
    while True:
        end = tape.text.find(_CLOSING)
        if end >= 0:
            position = yield from blanks(tape, end + len(_CLOSING))
            following = yield from one_of(tape, _NEXT, position)
            if following is None and position < len(tape.text):
                return tape.take(end + len(_CLOSING)), False
            value = tape.take(end + len(_CLOSING))[:end]
            return value.removesuffix("\n"), True
        num_certain = len(tape.text) - open_tail(tape.text, (closing, _CLOSING))
        if tape.is_over:
            return tape.take(len(tape.text)), False
        if num_certain:
            return tape.take(num_certain), False
        yield


def _typed(text: str, types: tuple[str, ...]) -> str:
    """The value as JSON text of one of the types, or as a string where it is of none."""
    if "null" in types and text.strip().lower() in ("null", "none"):
        return "null"
    if "string" in types:
        return json.dumps(text, ensure_ascii=False)
    value = _literal(text.strip(), types)
    try:
        return json.dumps(text if value is None else value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _literal(text: str, types: tuple[str, ...]) -> Any:
    """None: the text is of none of the types."""
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = decoded(text)
    if value is None and len(text) <= _MAX_LITERAL_CHARS:
        try:
            value = ast.literal_eval(expression_of(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    allowed: tuple[type, ...] = tuple(_PYTHON_TYPES[name] for name in types if name in _PYTHON_TYPES)
    if "number" in types:
        allowed += (int,)
    if "object" in types:
        allowed += (list,)  # also what a reference stands for
    if isinstance(value, bool) and "boolean" not in types:
        return None
    return value if isinstance(value, allowed) else None


_PYTHON_TYPES: dict[str, type] = {
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
}
