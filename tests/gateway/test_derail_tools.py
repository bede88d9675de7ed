"""Tool calls that lead nowhere are found in the messages of a prompt and its answer; work is left alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.derail.rules import MAX_HISTORY, DerailRules
from gateway.derail.tool_loops import ToolLoop, asked_calls, past_calls, tool_loop
from gateway.text.parsing.parts import Call

RULES = DerailRules()


def called(name: str, arguments: Any, result: str | None, call_id: str = "c1") -> list[dict[str, Any]]:
    """A call and its result, as a prompt tells of them."""
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "function": function}]}
    if result is None:
        return [asked]
    return [asked, {"role": "tool", "tool_call_id": call_id, "content": result}]


def asks(name: str, arguments: str) -> list[Call]:
    return [Call(name, arguments, is_over=True, is_whole=True)]


def found(messages: list[dict[str, Any]], calls: list[Call], rules: DerailRules = RULES) -> ToolLoop | None:
    return tool_loop(past_calls(messages), asked_calls(calls), rules)


@pytest.mark.parametrize(
    ("past", "severity"), [(1, None), (2, "warning"), (3, "warning"), (4, "critical"), (9, "critical")]
)
def test_a_call_repeated_with_equal_results(past: int, severity: str | None) -> None:
    loop = found(called("read", {"path": "/a", "n": 1}, "none") * past, asks("read", '{"n":1,  "path":"/a"}'))
    assert (None if loop is None else loop.severity) == severity
    assert loop is None or (loop.period, loop.copies) == (1, past + 1)


def test_other_results_are_progress() -> None:
    messages = [message for number in range(9) for message in called("read", {}, f"line {number}")]
    assert found(messages, asks("read", "{}")) is None


def test_other_arguments_or_tools_are_none() -> None:
    past = called("read", {"path": "/a"}, "none") * 5
    assert found(past, asks("read", '{"path": "/b"}')) is None
    assert found(past, asks("write", '{"path": "/a"}')) is None
    assert found(past, []) is None


@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_cycle_of_calls(period: int) -> None:
    cycle = [message for number in range(period) for message in called(f"tool_{number}", {}, "same")]
    loop = found(cycle * 4, asks("tool_0", "{}"))
    assert loop == ToolLoop("warning", period, 4)
    assert found(cycle * 5, asks("tool_0", "{}")) == ToolLoop("critical", period, 5)


def test_a_cycle_longer_than_four_is_none() -> None:
    cycle = [message for number in range(5) for message in called(f"tool_{number}", {}, "same")]
    assert found(cycle * 6, asks("tool_0", "{}")) is None


@pytest.mark.parametrize("name", ["job_poll", "task_get_result", "wait_agent", "mcp__tetrarch__wait"])
def test_pollers_may_ask_again(name: str) -> None:
    assert found(called(name, {}, "running") * 20, asks(name, "{}")) is None
    both = called("look", {}, "same") + called(name, {}, "running")
    assert found(both * 20, asks("look", "{}")) is None


def test_calls_asked_for_together_are_no_repetition() -> None:
    assert found([], asks("roll_die", "{}") * 6) is None
    assert found(called("roll_die", {}, "4"), asks("roll_die", "{}") * 6) is None


def test_results_are_told_apart_by_id_whatever_their_order() -> None:
    calls = [called(name, {}, None, f"id-{name}")[0]["tool_calls"][0] for name in ("a", "b")]
    results = [
        {"role": "tool", "tool_call_id": f"id-{name}", "content": [{"type": "text", "text": f"of {name}"}]}
        for name in ("b", "a")
    ]
    together = past_calls([{"role": "assistant", "tool_calls": calls}, *results])
    assert together == past_calls(called("a", {}, "of a") + called("b", {}, "of b"))


@pytest.mark.parametrize("arguments", ["", "{", "\ud800", '{"a": NaN}', "[" * 2000, '"\\ud800"'])
def test_hostile_arguments_are_compared_as_text(arguments: str) -> None:
    past = called("read", arguments, "\ud800 none") * 4
    assert found(past, asks("read", arguments)) is not None


def test_messages_without_ids_or_results_are_read() -> None:
    function = {"name": "read", "arguments": {"path": "/a"}}
    asked = {"role": "assistant", "tool_calls": [{"function": function}]}
    known = past_calls([asked, {"role": "tool", "content": "x"}, asked, {"role": "user", "content": "go on"}])
    assert [call.result is None for call in known] == [False, True]


def test_a_long_prompt_costs_little_and_no_memory_of_earlier_ones() -> None:
    messages = [
        message
        for number in range(200)
        for message in called(
            "read", {"path": f"/file/{number}", "text": "y" * 200}, "x" * 3000, f"c{number}"
        )
    ]
    before = time.process_time()
    known = past_calls(messages)
    seconds = time.process_time() - before
    assert len(known) == MAX_HISTORY
    assert [call.name for call in known] == ["read"] * MAX_HISTORY
    assert seconds < 0.02  # measured: 0.001


def test_limits_that_look_back_too_far_are_refused() -> None:
    with pytest.raises(ValueError, match="critical_calls is 20 and max_call_cycle 4"):
        DerailRules(critical_calls=20)
    with pytest.raises(ValueError, match="warn_chunks is 2: use 3 or more"):
        DerailRules(warn_chunks=2)
