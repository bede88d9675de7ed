"""What chat bodies say of tools otherwise than models know it: custom tools, a choice among allowed ones.

Makes plain functions and a plain choice of them. Checks no schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from .custom_tools import custom_arguments, custom_function
from .fields import bad_field, convert

Fields = dict[str, Any]

LEGACY = ("functions", "function_call")
"""What the API had before tools: nobody would notice that a model has not heard of these."""


class CustomSchema(Struct, frozen=True, kw_only=True):
    """A tool whose input is text; `format` is of type `text` or `grammar`."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class CustomTool(Struct, frozen=True, kw_only=True):
    """One entry of `tools`."""

    custom: CustomSchema
    type: Literal["custom"]


class CustomCall(Struct, frozen=True, kw_only=True):
    """A call of it."""

    name: str
    input: str | None = None


class CustomToolCall(Struct, frozen=True, kw_only=True):
    """A call that an assistant message made."""

    custom: CustomCall
    type: Literal["custom"]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class PlainTools:
    """A body with functions only. `allowed`: None where any may be called."""

    fields: Fields
    custom: frozenset[str]
    allowed: frozenset[str] | None


def plain_tools(fields: Fields) -> PlainTools:
    """The body as models know it. Raises InvalidField for what is custom, chosen or legacy and cannot be."""
    for name in LEGACY:
        if name in fields:
            raise bad_field(name, fields[name])
    plain = dict(fields)
    custom: set[str] = set()
    if isinstance(fields.get("tools"), list):
        plain["tools"] = [_tool(tool, f"tools[{i}]", custom) for i, tool in enumerate(fields["tools"])]
    if isinstance(fields.get("messages"), list):
        messages = enumerate(fields["messages"])
        plain["messages"] = [_message(message, f"messages[{i}]") for i, message in messages]
    allowed = None
    match fields.get("tool_choice"):
        case {"type": "custom", "custom": {"name": str(name)}}:
            if name not in custom:
                raise bad_field("tool_choice.custom.name", name, remedy="the name of one of the custom tools")
            plain["tool_choice"] = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*tools], **more}}:
            mode = more.get("mode", "auto")
            if mode not in ("auto", "required"):
                raise bad_field("tool_choice.allowed_tools.mode", mode, remedy="'auto' or 'required'")
            allowed = frozenset(_allowed(tools, {*_names(plain.get("tools"))}))
            plain["tool_choice"] = mode
    return PlainTools(plain, frozenset(custom), allowed)


def _tool(tool: Any, where: str, custom: set[str]) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "custom":
        return tool
    told = convert(tool, CustomTool, where=where).custom
    form = told.format or {}
    grammar = form.get("grammar") if form.get("type") == "grammar" else None
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if form.get("type", "text") not in ("text", "grammar") or (grammar is None) != (definition is None):
        raise bad_field(f"{where}.custom.format", told.format)
    custom.add(told.name)
    return {"type": "function", "function": custom_function(told.name, told.description, definition)}


def _message(message: Any, where: str) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("function_call") is not None:
        remedy = "absent: tell it as one of 'tool_calls', and its result as a message of role 'tool'"
        raise bad_field(f"{where}.function_call", message["function_call"], remedy=remedy)
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {
        **message,
        "tool_calls": [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)],
    }


def _call(call: Any, where: str) -> Any:
    if not isinstance(call, dict) or call.get("type") != "custom":
        return call
    told = convert(call, CustomToolCall, where=where).custom
    function = {"name": told.name, "arguments": custom_arguments(told.input or "")}
    rest = {name: value for name, value in call.items() if name != "custom"}
    return {**rest, "type": "function", "function": function}


def _names(tools: Any) -> Iterator[str]:
    for tool in tools if isinstance(tools, list) else ():
        match tool:
            case {"function": {"name": str(name)}}:
                yield name


def _allowed(tools: list[Any], known: set[str]) -> Iterator[str]:
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name in known:
                yield name
            case {"type": "custom", "custom": {"name": str(name)}} if name in known:
                yield name
            case _:
                where = f"tool_choice.allowed_tools.tools[{index}]"
                raise bad_field(where, tool, remedy="one of the tools by its type and name")
