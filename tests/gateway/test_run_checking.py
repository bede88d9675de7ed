"""A result's JSON value is told where one was asked for and it is what was asked for; else the fault is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.runs.checking import checked
from gateway.store.results import ResultCall, RunResult
from workers.messages import Derail

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ENCODED = msgspec.json.encode(SCHEMA)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (' {"a": 1}\n', None),
        ('{"a": "1"}', "result.a breaks the schema's 'type'"),
        ('{"a": 1, "b": 2}', "result.b breaks"),
        ("{}", "result breaks the schema's 'required'"),
        ("no", "the result is no JSON"),
        ("", "the result is no JSON"),
        ('{"a": 1', "the result is no JSON"),
        ("[" * 100 + "]" * 100, "nested deeper"),
        ("[" * 100_000, "the result is no JSON"),
    ],
)
def test_a_value_is_told_if_it_fits_its_schema(text: str, problem: str | None) -> None:
    result = checked(RunResult(state="completed", text=text), ENCODED)
    assert result.state == "completed" and result.text == text
    if problem is None:
        assert (result.json, result.problem, result.derail) == ('{"a": 1}', "", None)
    else:
        assert result.json == "" and problem in result.problem
        assert result.derail is not None and result.derail.excerpt == result.problem
        assert (result.derail.derail, result.derail.severity) == ("schema", "warning")


def test_any_json_will_do_where_the_schema_says_so() -> None:
    assert checked(RunResult(state="completed", text="[1]"), b"true").json == "[1]"
    assert checked(RunResult(state="completed", text="[1]"), b"false").problem


def test_a_run_that_was_cut_off_is_not_blamed_for_its_shape() -> None:
    result = checked(RunResult(state="cancelled", text='{"a": ', is_partial=True), ENCODED)
    assert (result.json, result.problem, result.derail) == ("", "the result is no JSON", None)
    assert checked(RunResult(state="cancelled", text='{"a": 1}'), ENCODED).json == '{"a": 1}'


def test_calls_are_no_value_and_no_fault() -> None:
    calls = (ResultCall(id="c", name="f", arguments="{}"),)
    result = RunResult(state="completed", text="I look", calls=calls)
    assert checked(result, ENCODED) == result


def test_a_run_that_was_derailed_before_says_so_first() -> None:
    cycle = Derail(derail="token_cycle")
    result = checked(RunResult(state="completed", text="aaa", derail=cycle), ENCODED)
    assert result.derail == cycle and result.problem
