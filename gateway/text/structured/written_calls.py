"""Calls whose arguments are no JSON object: Qwen's XML and Python's keywords. Pure.

An argument is written on its own, so its part of the schema is; what holds between arguments is not enforced
beyond their names, and arguments come in the schema's order.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gateway.errors import InvalidField
from gateway.text.parsing import types_of

from .lark import ANY_TEXT, Rules, choice, json_of, literal
from .schemas import Schema, pointer_of
from .wants import WantedTool

_ROOT_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$ref")
)
_XML_NAME = re.compile(r"[^\s<>]+")
_XML_KEY = re.compile(r"[^<>\n]+")
_VALUE_END = "\n</parameter>\n"
_TEXT_FACETS = ("pattern", "format")
_MAX_HOPS = 16


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    schema: Schema
    is_required: bool


def xml_call(rules: Rules, tool: WantedTool) -> str:
    """`<function=name>` to `</function>`. Raises InvalidField for what cannot be written so."""
    if not _XML_NAME.fullmatch(tool.name):
        raise _unwritable(tool, "its name has spaces or angle brackets")
    parts = [literal(f"<function={tool.name}>\n")]
    for argument in _arguments(tool):
        if not _XML_KEY.fullmatch(argument.name):
            raise _unwritable(tool, "an argument's name has angle brackets or line ends")
        part = f"{literal(f'<parameter={argument.name}>' + chr(10))} {_xml_value(rules, tool, argument)}"
        parts.append(rules.rule(part) + ("" if argument.is_required else "?"))
    return " ".join([*parts, literal("</function>")])


def python_call(rules: Rules, tool: WantedTool) -> str:
    """`name(key=value, ...)`. JSON's values are read as Python's. Raises InvalidField, likewise."""
    names = tool.name.split(".")
    arguments = _arguments(tool)
    if not all(_is_name(name) for name in [*names, *(argument.name for argument in arguments)]):
        raise _unwritable(tool, "its name or an argument's is no name in Python")
    definitions = _definitions(tool)
    items = [
        f"{literal(argument.name + '=')} {_json_value(tool, argument, definitions)}" for argument in arguments
    ]
    body = _in_order(rules, items, [argument.is_required for argument in arguments])
    return f"{literal(tool.name + '(')} {body} {literal(')')}"


def _in_order(rules: Rules, items: list[str], required: list[bool]) -> str:
    """The items, with commas between those that are there."""
    later = ""  # what may follow an item
    first = ""  # what may follow none
    for item, is_required in reversed([*zip(map(rules.rule, items), required, strict=True)]):
        tail = f"{literal(', ')} {item} {later}".strip()
        head = f"{item} {later}".strip()
        if not is_required:
            first = rules.rule(f"({choice([head, first]) if first else head})" + ("" if first else "?"))
            later = rules.rule(f"({choice([tail, later]) if later else tail})" + ("" if later else "?"))
            continue
        first, later = rules.rule(head), rules.rule(tail)
    return first


def _arguments(tool: WantedTool) -> list[_Argument]:
    root = _resolved(tool.schema.schema, tool.schema.schema)
    if not isinstance(root, dict):
        return []
    if root.keys() - _ROOT_KEYS or root.get("type", "object") not in ("object", ["object"]):
        raise _unwritable(tool, "its schema must be an object with properties and nothing above them")
    properties, required = root.get("properties", {}), root.get("required", [])
    names = [*properties, *(name for name in required if name not in properties)]
    return [
        _Argument(name, properties.get(name, True), name in required)
        for name in names
        if name in required or properties.get(name, True) is not False
    ]


def _xml_value(rules: Rules, tool: WantedTool, argument: _Argument) -> str:
    """A value and its closing tag: raw text where the schema allows a string, else JSON."""
    schema = _resolved(argument.schema, tool.schema.schema)
    kinds = types_of(schema, tool.schema.schema)
    if kinds and "string" not in kinds:
        return f"{_json_value(tool, argument, _definitions(tool))} {literal(_VALUE_END)}"
    facets = schema if isinstance(schema, dict) else {}
    values = facets.get("enum", [facets["const"]] if "const" in facets else None)
    if values is not None:
        texts = [one if isinstance(one, str) else json.dumps(one) for one in values if _is_raw(one)]
        return choice([literal(text + _VALUE_END) for text in texts])
    if tool.is_strict and any(name in facets for name in (*_TEXT_FACETS, "allOf")):
        raise _unwritable(tool, f"the pattern or format of '{argument.name}' does not hold for raw text")
    least, most = facets.get("minLength", 0), facets.get("maxLength", "")
    is_any = not least and most == ""
    return rules.rule(ANY_TEXT if is_any else f"/(?s:.{{{least},{most}}})/", suffix=_VALUE_END)


def _is_raw(value: Any) -> bool:
    """Whether a value that stands where a string may stand is read as itself."""
    return value is None or (isinstance(value, str) and "</parameter>" not in value)


def _json_value(tool: WantedTool, argument: _Argument, definitions: dict[str, Any]) -> str:
    if all(
        reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references(argument.schema)
    ):
        return json_of(argument.schema, definitions)
    if tool.is_strict:
        raise _unwritable(tool, f"'{argument.name}' refers to a schema outside of $defs")
    return json_of({})


def _definitions(tool: WantedTool) -> dict[str, Any]:
    root = tool.schema.schema
    parts: dict[str, Any] = root if isinstance(root, dict) else {}
    found = {key: part for key, part in parts.items() if key in ("$defs", "definitions")}
    if not all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in _references(found)):
        if tool.is_strict:
            raise _unwritable(tool, "a definition refers to a schema outside of $defs")
        return {}
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _resolved(schema: Any, root: Schema) -> Any:
    """What a schema that is a reference and nothing else stands for, with the root's definitions."""
    for _ in range(_MAX_HOPS):
        if (
            not isinstance(schema, dict)
            or "$ref" not in schema
            or schema.keys() - {"$ref", "$defs", "definitions"}
        ):
            return schema
        found: Any = root
        for name in pointer_of(schema["$ref"]):
            found = found[int(name)] if isinstance(found, list) else found[name]
        schema = found
    return schema


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _unwritable(tool: WantedTool, problem: str) -> InvalidField:
    return InvalidField(
        tool.path,
        f"A call of the tool at '{tool.path}' cannot be enforced in the way that this model writes calls: "
        f"{problem}. Change the schema, or leave strict and tool_choice out.",
    )
