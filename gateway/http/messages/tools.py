"""The tools of a Messages body as chat tools.

One whose loading is deferred is not in the prompt's list: it is told where a message refers to it, so that
the prompt before that stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from .blocks import Block, may, need, wrong
from .typed_tools import client_tool

ChatTool = dict[str, Any]


class ToolChoice(Struct, frozen=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


@dataclass(slots=True)
class Tools:
    """`listed` at the prompt's head; `deferred` by name; `num_skipped`: of a server that is not this one."""

    listed: list[ChatTool] = field(default_factory=list)
    deferred: dict[str, ChatTool] = field(default_factory=dict)
    num_skipped: int = 0

    @property
    def names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.listed} | self.deferred.keys()

    def define(self, tool: Block, where: str) -> None:
        """Adds a tool that a message brings along. Raises InvalidField."""
        run_by_client = _run_by_client(tool, where)
        if run_by_client is not None:
            self.deferred[need(tool, "name", str, where)] = _chat_tool(run_by_client, where)

    def definitions(self, names: Sequence[str]) -> str:
        """Tools as a message tells of them."""
        known = {tool["function"]["name"]: tool for tool in self.listed} | self.deferred
        lines = [_definition(known[name]) if name in known else f"There is no tool {name}." for name in names]
        return "\n".join(["<functions>", *lines, "</functions>"])


def read_tools(tools: Sequence[Block]) -> Tools:
    """The tools that a client runs; those of Anthropic's own servers, which have other types, are left out.

    Raises InvalidField.
    """
    found = Tools()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        run_by_client = _run_by_client(tool, where)
        if run_by_client is None:
            found.num_skipped += 1
        elif may(tool, "defer_loading", bool, where, default=False):
            found.define(tool, where)
        else:
            found.listed.append(_chat_tool(run_by_client, where))
    return found


def chat_choice(choice: ToolChoice | None, tools: Tools) -> str | dict[str, Any]:
    """`tool_choice` as chat has it. Raises InvalidField."""
    kind = choice.type if choice is not None else "auto"
    if choice is None or kind in ("auto", "none"):
        return kind
    if kind == "any" and not tools.names:
        raise wrong("tool_choice.type", kind, "'auto' or 'none': there are no tools to call")
    if kind == "any":
        return "required"
    if choice.name not in tools.names:
        raise wrong("tool_choice.name", choice.name, "the name of one of 'tools' that the client runs")
    return {"type": "function", "function": {"name": choice.name}}


def _run_by_client(tool: Block, where: str) -> Block | None:
    """The tool with its schema; None where the client does not run it."""
    return tool if tool.get("type") in (None, "custom") else client_tool(tool, where)


def _chat_tool(tool: Block, where: str) -> ChatTool:
    name = need(tool, "name", str, where)
    if not name:
        raise wrong(f"{where}.name", name)
    function: dict[str, Any] = {"name": name}
    if description := may(tool, "description", str, where, ""):
        function["description"] = description
    function["parameters"] = need(tool, "input_schema", dict, where)
    if may(tool, "strict", bool, where, default=False):
        function["strict"] = True
    return {"type": "function", "function": function}


def _definition(tool: ChatTool) -> str:
    return f"<function>{json.dumps(tool['function'], ensure_ascii=False)}</function>"
