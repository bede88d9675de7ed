"""The JSON value of a result whose run asked for one, if it is what was asked for.

Pure, but large values take long: not on an event loop.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from gateway.store.results import RunResult
from gateway.text.structured import problem_with
from workers.messages import Derail

MAX_NESTING = 64
"""A deeper value is not told: no reader need follow it."""


def checked(result: RunResult, schema: bytes) -> RunResult:
    """With its value, or with what is wrong with it. `schema`: the checked one of the run's spec, as JSON.

    A run that came to its end with another value has derailed; one that was cut off is not blamed for that,
    and one that ends in tool calls has no value to tell.
    """
    if result.calls:
        return result
    text = result.text.strip()
    problem = problem_in(text, schema)
    if problem is None:
        return structs.replace(result, json=text)
    result = structs.replace(result, problem=problem)
    if result.state != "completed" or result.derail is not None:
        return result
    return structs.replace(result, derail=Derail(derail="schema", severity="warning", excerpt=problem[:200]))


def problem_in(text: str, schema: bytes) -> str | None:
    """What makes a text no value of the schema; None: nothing. Names keys and no values."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return "the result is no JSON"
    if _is_deep(value):
        return f"the result is nested deeper than {MAX_NESTING} levels"
    return problem_with(msgspec.json.decode(schema), value)


def _is_deep(value: object) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        containers = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for items in containers for child in items if isinstance(child, dict | list)]
        if not level:
            return False
    return True
