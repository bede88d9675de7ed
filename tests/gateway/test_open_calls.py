"""Where the call begins that a text leaves open, at every point where it may be cut off."""

from __future__ import annotations

import pytest

from gateway.text.parsing import read
from gateway.text.parsing.formats import Reading
from gateway.text.parsing.open_calls import OpenCall, open_call

BODY = '{"name": "look", "arguments": {"path": "<tool_call> {", "deep": {"a": [1]}}}'
XML = "<function=look>\n<parameter=path>\n/a\n</parameter>\n</function>"
TAGGED = [f"<tool_call>\n{BODY}\n</tool_call>", f"<tool_call>{BODY}</tool_call>"]
CALLS: dict[str, list[str]] = {
    "tagged": TAGGED,
    "xml": [f"<tool_call>\n{XML}\n</tool_call>"],
    "python": ['<|tool_call_start|>[look(path="/a")]<|tool_call_end|>'],
    "mistral": [f"[TOOL_CALLS][{BODY}]", f"[TOOL_CALLS] [{BODY}, {BODY}]"],
}
OPENINGS = {
    "tagged": "<tool_call>",
    "xml": "<tool_call>",
    "python": "<|tool_call_start|>",
    "mistral": "[TOOL_CALLS]",
}


def reading(calls: str) -> Reading:
    return Reading(calls=calls, tools={"look": {}})  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind, calls in CALLS.items() for call in calls])
def test_a_call_is_open_from_its_opening_to_the_end_of_its_closing_tag(kind: str, call: str) -> None:
    before = "I look.\n"
    text = f"{before}{call}\n{call} and on"
    spans = [(start, start + len(call)) for start in (len(before), len(before) + len(call) + 1)]
    for end in range(len(text) + 1):
        opened = next((s for s, e in spans if s + len(OPENINGS[kind]) <= end < e), None)
        found = open_call(reading(kind), text[:end])
        assert (None if found is None else found.start) == opened, text[:end]
        if found is not None:
            assert found.name in ("", "look")


def test_a_call_whose_closing_tag_is_cut_off_has_its_name() -> None:
    text = f"<tool_call>\n{BODY}\n</tool"
    assert open_call(reading("tagged"), text) == OpenCall(0, "look")


@pytest.mark.parametrize("call", [*TAGGED, *CALLS["xml"]])
def test_a_cut_off_closing_tag_is_no_content(call: str) -> None:
    kind = "xml" if "<function" in call else "tagged"
    for end in range(call.index("</tool_call>") + 1, len(call) + 1):
        said = read(reading(kind), call[:end])
        assert (said.content, len(said.calls)) == ("", 1), call[:end]
        assert said.calls[0].is_whole
