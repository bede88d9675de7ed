"""The tools of a Responses body as chat tools: namespaces flattened, custom ones as functions with one text.

Tools that only OpenAI's servers run are left out: a model cannot call what nobody would answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from gateway.dialects.responses.echo import CalledAs
from gateway.errors import InvalidField
from gateway.http.custom_tools import custom_function
from gateway.http.fields import bad_field, convert

from .body import RESPONSES_REMEDIES

ChatTool = dict[str, Any]


class _Function(Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Custom(Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class _Namespace(Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    tools: list[dict[str, Any]] = []


def flat_name(namespace: str | None, name: str) -> str:
    """What the model calls a tool of a namespace."""
    return f"{namespace}.{name}" if namespace else name


@dataclass(slots=True)
class Tools:
    """Chat tools by the name that the model calls, and how the client knows those it knows otherwise."""

    by_name: dict[str, ChatTool] = field(default_factory=dict)
    called_as: dict[str, CalledAs] = field(default_factory=dict)

    @property
    def all(self) -> list[ChatTool]:
        """In the order of the body."""
        return [*self.by_name.values()]

    def add(
        self, tools: Sequence[dict[str, Any]], where: str = "tools", space: _Namespace | None = None
    ) -> None:
        """Takes tools in. Raises InvalidField."""
        for index, tool in enumerate(tools):
            self._add(tool, f"{where}[{index}]", space)
            if space is not None and index == 0:
                self._introduce(space)

    def choose(self, choice: str | dict[str, Any]) -> str | dict[str, Any]:
        """`tool_choice` as a chat call has it; where only some are allowed, the others are left out."""
        if isinstance(choice, str):
            return choice
        match choice.get("type"):
            case "function" | "custom":
                return {"type": "function", "function": {"name": self._named(choice, "tool_choice")}}
            case "allowed_tools" if choice.get("mode", "auto") in ("auto", "required"):
                return self._allow(choice)
        raise bad_field("tool_choice", choice, remedies=RESPONSES_REMEDIES)

    def _allow(self, choice: dict[str, Any]) -> str:
        allowed = choice.get("tools")
        if not isinstance(allowed, list):
            raise bad_field("tool_choice.tools", allowed, remedies=RESPONSES_REMEDIES)
        names = set()
        for index, tool in enumerate(allowed):
            where = f"tool_choice.tools[{index}]"
            if not isinstance(tool, dict):
                raise bad_field(where, tool, remedies=RESPONSES_REMEDIES)
            if tool.get("type") in ("function", "custom"):
                names.add(self._named(tool, where))
        self.by_name = {name: tool for name, tool in self.by_name.items() if name in names}
        return str(choice.get("mode", "auto"))

    def _named(self, choice: dict[str, Any], where: str) -> str:
        name, namespace = choice.get("name"), choice.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str | None):
            flat = flat_name(namespace, name)
            if flat in self.by_name:
                return flat
        raise bad_field(f"{where}.name", name, remedy="the name of a function or custom tool in 'tools'")

    def _add(self, tool: dict[str, Any], where: str, space: _Namespace | None) -> None:
        given = {name: value for name, value in tool.items() if value is not None}
        match given.get("type"):
            case "function":
                told = convert(given, _Function, remedies=RESPONSES_REMEDIES, where=where)
                self._put(_chat_function(told), where, space, is_custom=False)
            case "custom":
                custom = convert(given, _Custom, remedies=RESPONSES_REMEDIES, where=where)
                definition = (custom.format or {}).get("definition")
                function = custom_function(custom.name, custom.description, definition)
                self._put(function, where, space, is_custom=True)
            case "namespace" if space is None:
                inner = convert(given, _Namespace, remedies=RESPONSES_REMEDIES, where=where)
                self.add(inner.tools, f"{where}.tools", inner)
            case str():
                return
            case other:
                raise bad_field(f"{where}.type", other, remedies=RESPONSES_REMEDIES)

    def _put(
        self, function: dict[str, Any], where: str, space: _Namespace | None, *, is_custom: bool
    ) -> None:
        name, namespace = function["name"], space.name if space is not None else None
        flat = flat_name(namespace, name)
        if flat in self.by_name:
            raise InvalidField(
                f"{where}.name", f"'{where}.name' is the second of that name: rename one of them."
            )
        self.by_name[flat] = {"type": "function", "function": {**function, "name": flat}}
        if namespace is not None or is_custom:
            self.called_as[flat] = CalledAs(name=name, namespace=namespace, is_custom=is_custom)

    def _introduce(self, space: _Namespace) -> None:
        """What was said of the namespace opens what is said of its first tool."""
        first = next((name for name in self.by_name if name.startswith(f"{space.name}.")), None)
        if first is not None and space.description:
            function = self.by_name[first]["function"]
            told = "\n".join(filter(None, [space.description, function.get("description")]))
            self.by_name[first] = {"type": "function", "function": {**function, "description": told}}


def _chat_function(tool: _Function) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return function
