"""What a chat request demands of its answer's shape: response_format, tool_choice, strict tools. Pure.

Other APIs' bodies become chat requests first; only the names of their fields differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from gateway.errors import InvalidField
from gateway.text.structured import ANY_OBJECT, Checked, Schema, WantedTool, Wants, check_schema

from .api import ChatRequest
from .fields import bad_field

_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class _Paths:
    """Where an API's callers wrote what is checked here."""

    answer: str
    tool: Callable[[int, str], str]  # of a tool's schema, by index and name


_CHAT = _Paths(
    "response_format.json_schema.schema", lambda index, name: f"tools[{index}].function.parameters"
)
_PATHS = {
    "responses": _Paths("text.format.schema", lambda index, name: f"tools.{name}.parameters"),
    "messages": _Paths("output_config.format.schema", lambda index, name: f"tools.{name}.input_schema"),
}


def wants_of(request: ChatRequest) -> Wants:
    """Raises InvalidField for a choice that cannot be, and for what cannot be enforced of a schema."""
    paths = _PATHS.get(request.endpoint, _CHAT)
    if request.schema_field:
        paths = replace(paths, answer=request.schema_field)
    wants = _with_answer(Wants(is_parallel=request.parallel_tool_calls), request, paths)
    chosen = _chosen(request)
    tools = [(index, tool["function"]) for index, tool in request.placed_tools]
    if chosen not in ("auto", "none", "required"):
        tools = [(index, tool) for index, tool in tools if tool["name"] == chosen]
        wants = replace(wants, is_parallel=False)
    wants = replace(wants, must_call=chosen not in ("auto", "none"))
    if wants.is_free and not any(tool.get("strict") for _, tool in tools):
        return wants
    return replace(wants, tools=tuple(_wanted(tool, paths.tool(i, tool["name"])) for i, tool in tools))


def later_wants_of(request: ChatRequest) -> Wants:
    """What holds for further turns: a call that was demanded has been made by then."""
    choice = "none" if request.tool_choice == "none" else "auto"
    return wants_of(structs.replace(request, tool_choice=choice))


def _with_answer(wants: Wants, request: ChatRequest, paths: _Paths) -> Wants:
    form = request.response_format
    if form is None or form.type == "text":
        return wants
    if form.type == "json_object":
        return replace(wants, answer=Checked(ANY_OBJECT))
    if form.json_schema is None:
        raise bad_field("response_format.json_schema", None)
    schema = form.json_schema.schema
    checked = Checked(ANY_OBJECT) if schema is None else check_schema(schema, paths.answer)
    return replace(wants, answer=checked, answer_path=paths.answer)


def _chosen(request: ChatRequest) -> str:
    """`auto`, `none`, `required` or the name of a tool that is there."""
    choice = request.tool_choice
    match choice:
        case "auto" | "none":
            return choice
        case "required" if request.callable_tools:
            return choice
        case "required":
            raise bad_field("tool_choice", choice, remedy="absent: there are no tools to call")
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in ("auto", "none", "required") and _has(request, name):
                return name
            raise bad_field("tool_choice.function.name", name, remedy="the name of one of the tools")
        case _:
            raise bad_field("tool_choice", choice)


def _has(request: ChatRequest, name: str) -> bool:
    return any(tool["function"]["name"] == name for tool in request.callable_tools)


def _wanted(tool: Mapping[str, Any], path: str) -> WantedTool:
    is_strict = bool(tool.get("strict"))
    wanted = WantedTool(tool["name"], is_strict=is_strict, path=path)
    schema = tool.get("parameters")
    try:
        return replace(wanted, schema=check_schema(_NO_ARGUMENTS if schema is None else schema, path))
    except InvalidField:
        if is_strict:
            raise
        return wanted
