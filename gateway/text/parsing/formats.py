"""How a model's turn is to be read, told from its chat template and the tools of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

CallFormat = Literal["tagged", "xml", "mistral", "llama", "python"]

_MARKERS: tuple[tuple[str, CallFormat], ...] = (
    ("<function=", "xml"),
    ("<tool_call>", "tagged"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "python"),
    ("<|python_tag|>", "llama"),
    ("ipython", "llama"),
)
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_MAX_HOPS = 16  # of references and unions inside of each other
_UNIONS = ("anyOf", "oneOf", "allOf")
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to read one turn. `tools`: for each name the types of those parameters that are no mere strings."""

    calls: CallFormat | None = None  # None: calls are not looked for
    thinking: tuple[str, str] | None = None  # opening and closing tag; None: the model does not think
    is_thinking: bool = False  # the prompt ends in an open thought
    only_first_call: bool = False  # what comes after the first call is left out
    tools: dict[str, dict[str, tuple[str, ...]]] = {}


def call_format(chat_template: str) -> CallFormat:
    """The format in which the template shows calls to its model; JSON in tags where it shows none."""
    return next((name for marker, name in _MARKERS if marker in chat_template), "tagged")


def thinking_tags(chat_template: str) -> tuple[str, str] | None:
    """The tags around thoughts, if the template knows any."""
    return next((tags for tags in _THINKING if tags[1] in chat_template), None)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """`Reading.tools` of a call's checked `tools`."""
    found = {}
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        properties = schema.get("properties")
        types = {
            name: types_of(wanted, schema)
            for name, wanted in (properties.items() if isinstance(properties, dict) else ())
        }
        if not tool["function"]["name"]:
            continue
        found[tool["function"]["name"]] = {
            name: kinds for name, kinds in types.items() if kinds != ("string",)
        }
    return found


def types_of(schema: Any, root: Any = None, hops: int = _MAX_HOPS) -> tuple[str, ...]:
    """JSON types that a schema allows; () where it does not say. `root`: what its references go into."""
    if not isinstance(schema, dict) or hops == 0:
        return ()
    kinds: list[str] = []
    told = schema.get("type")
    if told is not None:
        kinds += [kind for kind in (told if isinstance(told, list) else [told]) if isinstance(kind, str)]
    for union in _UNIONS:
        for member in schema.get(union) or () if isinstance(schema.get(union), list) else ():
            kinds += types_of(member, root, hops - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not kinds and isinstance(values, list):
        kinds += [_NAMES.get(type(value), "object") for value in values]
    if not kinds and isinstance(schema.get("$ref"), str):
        kinds += types_of(_referred(schema["$ref"], root), root, hops - 1)
    if not kinds and ("$ref" in schema or "properties" in schema or "items" in schema):
        kinds.append("object")
    return tuple(dict.fromkeys(kinds))


def _referred(reference: str, root: Any) -> Any:
    """What `#/a/b` stands for; None where there is nothing."""
    found = root
    for name in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(found, dict):
            return None
        found = found.get(unquote(name).replace("~1", "/").replace("~0", "~"))
    return found
