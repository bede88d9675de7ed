"""Pieces of llguidance's dialect of Lark: literals, JSON by schema, text up to a marker. Pure text work."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .schemas import Schema

WHITE_SPACE = r"[ \n\r\t]{1,32}"
"""Between JSON's signs. Unbounded, a small model would write blanks for ever."""

ANY_TEXT = "/(?s:.*)/"


class Rules:
    """A grammar's rules in the order in which they were made."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_made = 0

    def rule(self, body: str, *, suffix: str = "") -> str:
        """A new rule's name. `suffix`: ends the body, where it first occurs."""
        self._num_made += 1
        name = f"r{self._num_made}"
        attributes = f"[suffix={literal(suffix)}]" if suffix else ""
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """A new terminal's name: it is read as one piece, and may use `&` and `~`."""
        self._num_made += 1
        name = f"T{self._num_made}"
        self._lines.append(f"{name}: {body}")
        return name

    def source(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._lines, ""])


def literal(text: str) -> str:
    """Exactly this text, which must not be empty."""
    return json.dumps(text)


def json_of(schema: Schema, definitions: dict[str, Any] | None = None) -> str:
    """A JSON text by its schema. `definitions`: what its references need."""
    root = schema if isinstance(schema, dict) else {} if schema else {"anyOf": []}
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return "%json " + json.dumps({**options, **(definitions or {}), **root})


def choice(options: Sequence[str]) -> str:
    """One of them."""
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def up_to(text: str, most: int) -> str:
    """At least one and at most so many of them."""
    return f"({text}){{1,{most}}}"


def without(markers: Sequence[str], beginning: str = "") -> str:
    """The body of a terminal: text that holds none of the markers, nor begins as the expression says."""
    held = "|".join(_escaped(marker) for marker in markers)
    body = f"{ANY_TEXT} & ~/(?s:.*)({held})(?s:.*)/"
    return f"{body} & ~/(?s:{beginning}.*)/" if beginning else body


def in_expression(text: str) -> str:
    """The text as part of a regular expression."""
    return _escaped(text)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")
