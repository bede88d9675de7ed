"""Whether a result is what its schema says. Patterns take linear time, references are never fetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing import Registry

from gateway.errors import shorten

from .checks import matches
from .schemas import Schema

_MAX_PATH = 120


def problem_with(schema: Schema, value: Any) -> str | None:
    """The first thing that is wrong with a JSON value, by its path; None: nothing. `schema`: a checked one.

    Names keys and no values. Takes milliseconds, for a large value more: not on an event loop.
    """
    try:
        error = next(_Validator(schema, registry=Registry()).iter_errors(value), None)
    except RecursionError:
        return "the result is nested too deep to be checked"
    if error is None:
        return None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    broken = f"the schema's '{error.validator}'" if error.validator else "the schema: nothing may stand there"
    return f"{shorten('result' + path, _MAX_PATH)} breaks {broken}"


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not matches(pattern, value):
        yield ValidationError("pattern")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    for pattern, inner in patterns.items():
        for name, item in value.items():
            if matches(pattern, name):
                yield from validator.descend(item, inner, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in value.items():
        if name in known or any(matches(pattern, name) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError("additionalProperties", path=[name])
        else:
            yield from validator.descend(item, allowed, path=name)


_Validator: Any = extend(
    Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    },
)
