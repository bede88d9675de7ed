"""JSON schemas of callers: what can be enforced goes on, anything else is named by its path.

Pure: knows the keys that llguidance enforces (its docs/json_schema.md, 1.9) and JSON Schema 2020-12's others.
Whether patterns and unions can be made a grammar only the library knows: checks.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from gateway.errors import InvalidField, shorten

Schema = dict[str, Any] | bool

_INDEX = re.compile(r"[0-9]{1,9}")

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_SCHEMAS = ("items", "additionalProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_UNENFORCED = frozenset(
    (
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
        "additionalItems",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "x-guidance",
    )
)
"""Keys that forbid something and that no grammar of ours would; all others that are not known say nothing."""


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Of one schema."""

    depth: int = 32
    properties: int = 2000
    properties_each: int = 500  # of one object: each step of its keys costs by their number
    enum_values: int = 2000
    text_chars: int = 120_000  # names, enum values and patterns together
    pattern_chars: int = 1000
    count: int = 1_000_000  # of characters, items or properties


@dataclass(frozen=True, slots=True)
class Checked:
    """A schema of enforced keys only. `patterns`: where each is, for the one that turns out not to work."""

    schema: Schema
    patterns: Mapping[str, str] = field(default_factory=dict)  # by path


def check_schema(schema: object, path: str, limits: SchemaLimits | None = None) -> Checked:
    """The schema without what says nothing. `path`: where it stands in the body. Raises InvalidField."""
    check = _Check(limits or SchemaLimits())
    cleaned = check.schema(schema, path, 0)
    for where, reference in check.references.items():
        _check_reference(cleaned, where, reference)
    return Checked(cleaned, check.patterns)


def pointer_of(reference: str) -> list[str]:
    """The names of a reference into its own schema, `#/a/b`."""
    return [
        unquote(part).replace("~1", "/").replace("~0", "~")
        for part in reference.removeprefix("#").split("/")[1:]
    ]


class _Check:
    def __init__(self, limits: SchemaLimits) -> None:
        self.limits = limits
        self.references: dict[str, str] = {}
        self.patterns: dict[str, str] = {}
        self._num_properties = self._num_values = self._num_chars = 0

    def schema(self, schema: object, path: str, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _wrong(path, "an object, or true or false")
        if depth > self.limits.depth:
            raise _wrong(path, f"nested no deeper than {self.limits.depth} levels")
        return {
            key: self._value(key, value, f"{path}.{key}", depth)
            for key, value in schema.items()
            if self._is_enforced(key, schema, path, depth)
        }

    def _is_enforced(self, key: str, schema: dict[str, Any], path: str, depth: int) -> bool:
        if key in _UNENFORCED or (key == "$id" and depth > 0):
            raise InvalidField(
                f"{path}.{key}",
                f"'{path}.{key}' is a key of JSON Schema that cannot be enforced here: leave it out, or say "
                "the same with type, properties, required, items, enum, anyOf or pattern.",
            )
        if key == "format":
            return _is_text(schema)
        return key in _CHECKS

    def _value(self, key: str, value: Any, path: str, depth: int) -> Any:
        if key in _SCHEMAS:
            return self.schema(value, path, depth + 1)
        if key in _SCHEMA_LISTS:
            return self._list(value, path, depth)
        if key in _SCHEMA_MAPS:
            return self._map(key, value, path, depth)
        if key in _COUNTS:
            return self._count(value, path)
        if key in _BOUNDS:
            return _bound(key, value, path)
        check = getattr(self, _CHECKS[key])
        return check(value, path)

    def _list(self, value: Any, path: str, depth: int) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise _wrong(path, "a list of at least one schema")
        return [self.schema(one, f"{path}[{index}]", depth + 1) for index, one in enumerate(value)]

    def _map(self, key: str, value: Any, path: str, depth: int) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise _wrong(path, "an object of schemas by name")
        if key == "properties" and len(value) > self.limits.properties_each:
            raise _wrong(path, f"of at most {self.limits.properties_each} properties in one object")
        self._num_properties += len(value)
        if self._num_properties > self.limits.properties:
            raise _wrong(path, f"of at most {self.limits.properties} properties in all")
        cleaned = {}
        for name, one in value.items():
            where = f"{path}.{shorten(name)}"
            self._chars(name, path)
            if key == "patternProperties":
                self._pattern(name, where)
            cleaned[name] = self.schema(one, where, depth + 1)
        return cleaned

    def _count(self, value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= self.limits.count:
            raise _wrong(path, f"a whole number from 0 to {self.limits.count}")
        return value

    def _type(self, value: Any, path: str) -> Any:
        kinds = value if isinstance(value, list) else [value]
        if not kinds or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
            raise _wrong(path, f"one of {', '.join(_TYPES)}, or a list of these")
        return value

    def _enum(self, value: Any, path: str) -> Any:
        if not isinstance(value, list) or not value:
            raise _wrong(path, "a list of at least one value")
        self._num_values += len(value)
        if self._num_values > self.limits.enum_values:
            raise _wrong(path, f"of at most {self.limits.enum_values} values in all")
        for one in value:
            self._chars(one if isinstance(one, str) else repr(one), path)
        return value

    def _const(self, value: Any, path: str) -> Any:
        return self._enum([value], path)[0]

    def _required(self, value: Any, path: str) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _wrong(path, "a list of names")
        return value

    def _pattern(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or len(value) > self.limits.pattern_chars:
            raise _wrong(path, f"a regular expression of at most {self.limits.pattern_chars} characters")
        self._chars(value, path)
        self.patterns[path] = value
        return value

    def _format(self, value: Any, path: str) -> Any:
        if not isinstance(value, str) or value not in _FORMATS:
            raise _wrong(path, f"one of {', '.join(sorted(_FORMATS - {'unknown'}))}, or absent")
        return value

    def _reference(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise _wrong(path, "a reference into this schema, such as #/$defs/name")
        self.references[path] = value
        return "#" + "".join(
            "/" + quote(name.replace("~", "~0").replace("/", "~1"), safe="$~") for name in pointer_of(value)
        )

    def _chars(self, text: str, path: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > self.limits.text_chars:
            raise _wrong(
                path, f"smaller: names and values have more than {self.limits.text_chars} characters"
            )


_CHECKS = {
    **dict.fromkeys((*_SCHEMAS, *_SCHEMA_LISTS, *_SCHEMA_MAPS, *_COUNTS, *_BOUNDS), ""),
    "type": "_type",
    "enum": "_enum",
    "const": "_const",
    "required": "_required",
    "pattern": "_pattern",
    "format": "_format",
    "$ref": "_reference",
}


def _is_text(schema: dict[str, Any]) -> bool:
    """Whether a format forbids anything: of numbers it only tells a reader their size."""
    kinds = schema.get("type", "string")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _bound(key: str, value: Any, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(path, "a number")
    if key == "multipleOf" and value <= 0:
        raise _wrong(path, "a number above 0")
    return value


def _check_reference(root: Schema, path: str, reference: str) -> None:
    found: Any = root
    for name in pointer_of(reference):
        if isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise _wrong(path, "a reference to something that is there")
    if not isinstance(found, dict | bool):
        raise _wrong(path, "a reference to a schema")


def _wrong(path: str, right: str) -> InvalidField:
    return InvalidField(path, f"'{path}' cannot be used as it is: it must be {right}.")
