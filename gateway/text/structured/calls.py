"""Tool calls as grammars, one for each way in which models write them. They mirror text/parsing. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .lark import Rules, choice, in_expression, json_of, literal, up_to, without
from .schemas import Schema
from .wants import CallForm, WantedTool
from .written_calls import python_call, xml_call

MAX_CALLS = 32
"""Of one answer."""


class Calls:
    """The calls of some tools, as rules of one grammar."""

    def __init__(
        self, rules: Rules, form: CallForm, tools: Sequence[WantedTool], *, is_parallel: bool
    ) -> None:
        self._rules = rules
        self._form = form
        self._tools = tools
        self._most = MAX_CALLS if is_parallel else 1

    def only(self) -> str:
        """Calls and nothing else."""
        form, call = self._form.format, self._any_call()
        match form:
            case "tagged" | "xml":
                return _joined(f"{literal('<tool_call>')} {call}", self._most, "\n")
            case "mistral" if self._form.names_first:
                return up_to(f"{literal('[TOOL_CALLS]')} {call}", self._most)
            case "mistral":
                return f"{literal('[TOOL_CALLS][')} {_joined(call, self._most, ', ')} {literal(']')}"
            case "python":
                return (
                    f"{literal('<|tool_call_start|>[')} {_joined(call, self._most, ', ')} "
                    f"{literal(']<|tool_call_end|>')}"
                )
            case "llama":
                return call  # its templates allow one at a time

    def among_text(self) -> str:
        """Text in which each call is one of these."""
        form, names = self._form.format, "|".join(in_expression(tool.name) for tool in self._tools)
        match form:
            case "tagged":
                return self._marked("<tool_call>", self._any_call(), ("<tool_call>",))
            case "xml":
                return self._marked("<tool_call>", self._any_call(), ("<tool_call>", "<function="))
            case "mistral" if self._form.names_first:
                bare = rf"\s*(\[\s*\{{|({names})(\[ARGS\])?\{{)"
                return self._marked("[TOOL_CALLS]", self._any_call(), ("[TOOL_CALLS]",), bare)
            case "mistral":
                body = f"{literal('[')} {_joined(self._any_call(), self._most, ', ')} {literal(']')}"
                bare = rf"\s*(\[\s*\{{|({names})(\[ARGS\])?\{{)"
                return self._marked("[TOOL_CALLS]", body, ("[TOOL_CALLS]",), bare)
            case "python":
                calls = _joined(self._any_call(), self._most, ", ")
                body = f"{literal('[')} {calls} {literal(']<|tool_call_end|>')}"
                return self._marked(
                    "<|tool_call_start|>", body, ("<|tool_call_start|>",), rf"\s*\[({names})\("
                )
            case "llama":
                text = self._rules.terminal(without(("<|python_tag|>",), r"\s*\{"))
                return f"({literal('<|python_tag|>')}? {self._any_call()} | {text})"

    def _marked(self, marker: str, body: str, markers: Sequence[str], beginning: str = "") -> str:
        """Text in which each marker begins such a body."""
        first = self._rules.terminal(without(markers, beginning))
        rest = self._rules.terminal(without(markers)) if beginning else first
        heads = [self._rules.terminal(f"{text} {literal(marker)}") for text in (first, rest)]
        if self._most == 1:
            return f"({heads[0]} {body} {rest} | {first})"
        return f"({heads[0]} {body} ({heads[1]} {body}){{0,{self._most - 1}}} {rest} | {first})"

    def _any_call(self) -> str:
        return self._rules.rule(choice([self._rules.rule(self._call(tool)) for tool in self._tools]))

    def _call(self, tool: WantedTool) -> str:
        """What stands behind the marker."""
        form = self._form.format
        match form:
            case "xml":
                return f"{literal(chr(10))} {xml_call(self._rules, tool)} {literal(chr(10) + '</tool_call>')}"
            case "python":
                return python_call(self._rules, tool)
            case "mistral" if self._form.names_first:
                call_id = f"({literal('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? " if self._form.has_call_ids else ""
                return f"{literal(tool.name)} {call_id}{literal('[ARGS]')} {_arguments(tool)}"
            case _:
                return self._json_call(tool)

    def _json_call(self, tool: WantedTool) -> str:
        key = "parameters" if self._form.format == "llama" else "arguments"
        head = f'{{"name": {_json_text(tool.name)}, "{key}": '
        if self._form.format != "tagged":
            return f"{literal(head)} {_arguments(tool)} {literal('}')}"
        head, end = "\n" + head, "}\n</tool_call>"
        return f"{literal(head)} {_arguments(tool)} {literal(end)}"


def as_object(schema: Schema) -> Schema:
    """The same, for objects only: arguments are never anything else."""
    if schema is True:
        return {"type": "object"}
    return {"type": "object", **schema} if isinstance(schema, dict) else schema


def _arguments(tool: WantedTool) -> str:
    return json_of(as_object(tool.schema.schema))


def _joined(call: str, most: int, separator: str) -> str:
    return call if most == 1 else f"{call} ({literal(separator)} {call}){{0,{most - 1}}}"


def _json_text(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
