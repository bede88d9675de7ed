"""A turn's text taken apart: each family's calls, thinking, what is broken, and the same at every cut."""

from __future__ import annotations

import importlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.parsing import (
    Call,
    Reader,
    Reading,
    Said,
    call_format,
    parameter_types,
    read,
    thinking_tags,
)

from .samples import CHATML, LLAMA3, QWEN

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "mode": {"type": ["integer", "null"]},
                    "force": {"type": "boolean"},
                    "share": {"type": "number"},
                    "lines": {"type": "array"},
                    "options": {"$ref": "#/x"},
                    "kind": {"enum": ["a", "b"]},
                    "any": {},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "look"}},
]
THINK = ("<think>", "</think>")
NAMES = parameter_types(TOOLS)


def reading(calls: Any, **more: Any) -> Reading:
    return Reading(calls=calls, tools=NAMES, **more)


def said(content: str = "", *calls: tuple[str, Any], reasoning: str = "") -> Said:
    return Said(reasoning, content, [Call(name, _text(arguments), True, True) for name, arguments in calls])


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


WRITE = '{"name": "write", "arguments": {"path": "a", "n": [1, {"b": 2.50}]}}'
WRITTEN = ("write", '{"path": "a", "n": [1, {"b": 2.50}]}')
LOOK = '{"name": "look", "arguments": {}}'
LOOKED = ("look", "{}")
XML = "<function=write>\n<parameter=path>\n a\n\n</parameter>\n<parameter=mode>\n7\n</parameter>\n</function>"

CASES: dict[str, tuple[Reading, str, Said]] = {
    # JSON in tags
    "plain words": (reading("tagged"), "Hello <b> \n", said("Hello <b> \n")),
    "one call": (reading("tagged"), f"<tool_call>\n{WRITE}\n</tool_call>", said("", WRITTEN)),
    "words and two calls": (
        reading("tagged"),
        f"Let me look.\n<tool_call>\n{WRITE}\n</tool_call>\n<tool_call>{LOOK}</tool_call>\n",
        said("Let me look.", WRITTEN, LOOKED),
    ),
    "equal calls": (
        reading("tagged"),
        f"<tool_call>{LOOK}</tool_call>" * 3,
        said("", LOOKED, LOOKED, LOOKED),
    ),
    "words after": (reading("tagged"), f"<tool_call>{LOOK}</tool_call> Done.", said(" Done.", LOOKED)),
    "arguments first": (
        reading("tagged"),
        '<tool_call>{"arguments": {"a": "ü"}, "name": "x"}</tool_call>',
        said("", ("x", '{"a": "ü"}')),
    ),
    "arguments as text": (
        reading("tagged"),
        '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>',
        said("", ("x", {"a": 1})),
    ),
    "as openai writes it": (
        reading("tagged"),
        '<tool_call>{"type": "function", "function": {"name": "x", "arguments": {"a": 1}}}</tool_call>',
        said("", ("x", {"a": 1})),
    ),
    "members behind": (
        reading("tagged"),
        '<tool_call>{"name": "x", "arguments": {"a": 1}, "id": {"b": "}"}}</tool_call>.',
        said(".", ("x", '{"a": 1}')),
    ),
    "closing tags in a value": (
        reading("tagged"),
        '<tool_call>{"name": "x", "arguments": {"a": "</tool_call>}</think>\\"}"}}</tool_call>',
        said("", ("x", '{"a": "</tool_call>}</think>\\"}"}')),
    ),
    "line end in a string": (
        reading("tagged"),
        '<tool_call>{"name": "x", "arguments": {"a": "b\n\tc"}}</tool_call>',
        said("", ("x", '{"a": "b\\n\\tc"}')),
    ),
    "no closing tag": (reading("tagged"), f"<tool_call>{LOOK}", said("", LOOKED)),
    "a brace forgotten": (
        reading("tagged"),
        f"<tool_call>{LOOK[:-1]}</tool_call><tool_call>{LOOK}</tool_call>",
        said("", LOOKED, LOOKED),
    ),
    "cut after a call": (
        reading("tagged"),
        f"<tool_call>{LOOK}</tool_call>\n<tool_",
        said("\n<tool_", LOOKED),
    ),
    "calls not looked for": (
        Reading(),
        f"<tool_call>{LOOK}</tool_call>",
        said(f"<tool_call>{LOOK}</tool_call>"),
    ),
    # Qwen XML
    "xml": (
        reading("xml"),
        f"Ok\n\n<tool_call>\n{XML}\n</tool_call>",
        said("Ok", ("write", '{"path": " a\\n", "mode": 7}')),
    ),
    "xml without its tag": (
        reading("xml"),
        XML + XML,
        said("", *2 * [("write", '{"path": " a\\n", "mode": 7}')]),
    ),
    "xml without parameters": (reading("xml"), "<function=look>\n</function>", said("", LOOKED)),
    "json in an xml model": (reading("xml"), f"<tool_call>{LOOK}</tool_call>", said("", LOOKED)),
    "xml tags in a value": (
        reading("xml"),
        "<function=write><parameter=path>a</parameter> b\n</parameter>\n</think></parameter></function>",
        said("", ("write", '{"path": "a</parameter> b\\n</parameter>\\n</think>"}')),
    ),
    # Mistral
    "mistral list": (reading("mistral"), f"[TOOL_CALLS] [{WRITE}, {LOOK}]", said("", WRITTEN, LOOKED)),
    "mistral names": (
        reading("mistral"),
        'Hm[TOOL_CALLS]write[ARGS]{"a": 1}[TOOL_CALLS]other[CALL_ID]abcdefghi[ARGS]{}',
        said("Hm", ("write", '{"a": 1}'), ("other", "{}")),
    ),
    "mistral without control tokens": (
        reading("mistral"),
        'write{"a": 1}look[ARGS]{}',
        said("", ("write", '{"a": 1}'), LOOKED),
    ),
    "mistral list without its token": (reading("mistral"), f" [{LOOK}]", said("", LOOKED)),
    "mistral words": (reading("mistral"), "writes {a} look", said("writes {a} look")),
    # Llama
    "llama": (
        reading("llama"),
        '<|python_tag|>{"name": "other", "parameters": {"a": "b"}}',
        said("", ("other", '{"a": "b"}')),
    ),
    "llama bare": (
        reading("llama"),
        '{"name": "look", "parameters": {}}; {"type": "function", "name": "write", "parameters": {"a": 1}}',
        said("", LOOKED, ("write", {"a": 1})),
    ),
    "llama json that is no call": (
        reading("llama"),
        '{"name": "Bob", "parameters": {}}',
        said('{"name": "Bob", "parameters": {}}'),
    ),
    "llama other json": (reading("llama"), '{"a": [{"name": "look"', said('{"a": [{"name": "look"')),
    # Python
    "python": (
        reading("python"),
        "Ok <|tool_call_start|>[look(), a.b(x='<|tool_call_end|>', y=[1, true, None])]<|tool_call_end|>",
        said("Ok", LOOKED, ("a.b", {"x": "<|tool_call_end|>", "y": [1, True, None]})),
    ),
    "python bare": (reading("python"), "[look(a=-1)]", said("", ("look", {"a": -1}))),
    "python that is code": (
        reading("python"),
        "<|tool_call_start|>[look(__import__('os'))]<|tool_call_end|>",
        said("<|tool_call_start|>[look(__import__('os'))]<|tool_call_end|>"),
    ),
    # thinking
    "thinking": (
        reading("tagged", thinking=THINK),
        f"<think>\nI <tool_call> must\n</think>\n\nSo <tool_call>{LOOK}</tool_call>",
        said("So", LOOKED, reasoning="I <tool_call> must"),
    ),
    "opened by the prompt": (
        reading("tagged", thinking=THINK, is_thinking=True),
        "hm\n\nha\n</think>\n\nSo",
        said("So", reasoning="hm\n\nha"),
    ),
    "opened twice": (
        reading("tagged", thinking=THINK, is_thinking=True),
        "<think>\nhm</think>So",
        said("So", reasoning="hm"),
    ),
    "cut in a thought": (Reading(thinking=THINK), "<think>hm </thi", said(reasoning="hm </thi")),
    "not thinking": (Reading(thinking=THINK), "  So </think> x", said("  So </think> x")),
    "empty thought": (Reading(thinking=THINK), "<think>\n\n</think>\n\nSo", said("So")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_turn_is_taken_apart(name: str) -> None:
    how, text, expected = CASES[name]
    assert read(how, text) == expected


BROKEN = {
    "no json": "<tool_call>{broken}</tool_call>",
    "no object": "<tool_call>[1]</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "name of no text": '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
    "arguments of no object": '<tool_call>{"name": "x", "arguments": [1]}</tool_call>',
    "never closed": '<tool_call>{"name": "x", "args',
    "nothing": "<tool_call>",
    "no function": "<tool_call><function=></tool_call>",
    "no parameter": "<function=look>hello</function>",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("calls", ["tagged", "xml"])
def test_a_broken_call_is_content(name: str, calls: Any) -> None:
    text = f"Well,\n {BROKEN[name]}"
    assert read(reading(calls), text) == said(text)


def test_a_good_call_after_a_broken_one_is_found() -> None:
    broken = '<tool_call>{"name": "x</tool_call>'
    assert read(reading("tagged"), f"{broken}\n<tool_call>{LOOK}</tool_call>") == said(broken, LOOKED)


@pytest.mark.parametrize("num_chars", range(len('{"name": "write", "arguments": {'), len(WRITE) - 2))
def test_a_call_that_is_cut_off_is_never_whole(num_chars: int) -> None:
    result = read(reading("tagged"), "<tool_call>" + WRITE[:num_chars])
    assert (result.content, result.calls[0].name, result.calls[0].is_whole) == ("", "write", False)
    assert WRITTEN[1].startswith(result.calls[0].arguments)


def test_arguments_that_turn_out_to_be_no_json_make_no_whole_call() -> None:
    result = read(reading("tagged"), '<tool_call>{"name": "x", "arguments": {a: 1}}</tool_call> so')
    assert result == Said("", " so", [Call("x", "{a: 1}", True, False)])


def test_an_xml_call_that_is_cut_off_is_never_whole() -> None:
    for num_chars in range(XML.index("<parameter="), len(XML)):
        for call in read(reading("xml"), XML[:num_chars]).calls:
            assert not call.is_whole


TYPED: dict[str, list[tuple[str, Any]]] = {
    "mode": [
        ("7", 7),
        ("7.0", 7),
        ("null", None),
        ("None", None),
        ("x", "x"),
        ("True", "True"),
        ("9" * 5000, None),
    ],
    "force": [("true", True), ("False", False), ("1", "1")],
    "share": [("1", 1), ("0.5", 0.5), ("NaN", "NaN"), ("1e999", "1e999"), ("a", "a")],
    "lines": [
        ('["a", 1]', ["a", 1]),
        ("['a', None]", ["a", None]),
        ("[", "["),
        ("{1}", "{1}"),
        ("\\d", "\\d"),
    ],
    "options": [('{"a": 1}', {"a": 1}), ("{'a': True}", {"a": True}), ("words", "words")],
    "kind": [("a", "a"), ("7", "7")],
    "any": [("7", "7"), ("false", "false")],
    "either": [("7", "7")],
    "path": [("null", "null"), ("false", "false"), ('"x"', '"x"'), ("漢\n🙂", "漢\n🙂")],
    "unknown": [("7", "7")],
}


@pytest.mark.parametrize("key", TYPED)
def test_an_xml_value_has_the_type_of_its_schema(key: str) -> None:
    for text, value in TYPED[key]:
        turn = f"<function=write>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
        call = read(reading("xml"), turn).calls[0]
        assert call.is_whole
        assert json.loads(call.arguments) == {key: text if len(text) > 4000 else value}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same(name: str) -> None:
    how, text, expected = CASES[name]
    for position in range(len(text) + 1):
        assert in_pieces(how, [text[:position], text[position:]]) == expected, text[:position]
    assert in_pieces(how, list(text)) == expected


def in_pieces(how: Reading, pieces: list[str]) -> Said:
    reader, result = Reader(how), Said()
    for piece in pieces:
        result.add(reader.feed(piece))
    result.add(reader.end())
    return result


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "<function=write>",
            "</function>",
            "</parameter>",
        ),
        *("<parameter=path>", "<parameter=mode>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
        *(
            "<|tool_call_start|>",
            "<|tool_call_end|>",
            '{"name": "look", ',
            '"arguments": {',
            '"parameters": {',
        ),
        *("{", "}", "[", "]", '"', "\\", ":", ",", ";", "\n", " ", "a", "1", "look", "write", "(a=1)", "ü🙂"),
        *(WRITE, LOOK, XML, "<tool", "</param", "<func", "[TOOL", "[look()]", '{"a": "}"}'),
    ]
)
READINGS = st.builds(
    Reading,
    calls=st.sampled_from([None, "tagged", "xml", "mistral", "llama", "python"]),
    thinking=st.sampled_from([None, THINK]),
    is_thinking=st.booleans(),
    only_first_call=st.booleans(),
    tools=st.just(NAMES),
)


@settings(max_examples=300, deadline=None)
@given(READINGS, st.lists(FRAGMENTS, max_size=14), st.data())
def test_hostile_text_gives_the_same_at_every_cut_and_loses_nothing(
    how: Reading, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(how, text)
    assert in_pieces(how, pieces) == whole
    assert in_pieces(how, list(text)) == whole
    for call in whole.calls:
        assert call.name
        if call.is_whole:
            assert isinstance(json.loads(call.arguments), dict)
    if not whole.calls and not whole.reasoning and how.thinking is None:
        assert whole.content == text


def test_only_the_first_call_is_kept_where_one_is_wanted() -> None:
    how = reading("tagged", only_first_call=True)
    text = f"So <tool_call>{LOOK}</tool_call>"
    assert read(how, text + f" and <tool_call>{WRITE}</tool_call>") == said("So", LOOKED)
    reader = Reader(how)
    reader.feed(text)
    assert not reader.has_dropped
    reader.feed(f"<tool_call>{WRITE}")
    assert reader.has_dropped


def test_arguments_go_out_while_they_come_in() -> None:
    for how, head in (
        (reading("tagged"), '<tool_call>{"name": "write", "arguments": {"path": "'),
        *XML_HEADS,
    ):
        reader, result = Reader(how), Said()
        result.add(reader.feed(head))
        before = len(result.calls[0].arguments)
        for number in range(100):
            result.add(reader.feed("word "))
            assert len(result.calls[0].arguments) - before >= 5 * number


XML_HEADS = [(reading("xml"), "<tool_call>\n<function=write>\n<parameter=path>\n")]


FLOODS = [
    "<tool_call>{" * 8000,
    '<tool_call>{"' * 8000,
    "<function=write><parameter=path>" * 4000,
    "{" * 100_000,
    "<tool_call>" + "[" * 100_000,
    "<think>" * 16_000,
    "[TOOL_CALLS]a" * 8000,
    "\n" * 100_000,
    "<|tool_call_start|>" + "(" * 60_000,
    "<|tool_call_start|>[" + "look(a=-" * 8000 + "<|tool_call_end|>",
]


@pytest.mark.parametrize("text", FLOODS, ids=range(len(FLOODS)))
@pytest.mark.parametrize("calls", ["xml", "mistral", "llama", "python"])
def test_a_flood_of_openings_costs_little(text: str, calls: Any) -> None:
    started = time.process_time()
    pieces = [text[start : start + 200] for start in range(0, len(text), 200)]
    in_pieces(reading(calls, thinking=THINK), pieces)
    assert time.process_time() - started < 3


def test_the_format_is_told_from_the_template() -> None:
    assert call_format(QWEN) == "tagged" and thinking_tags(QWEN) == THINK
    assert call_format(LLAMA3) == "llama" and thinking_tags(LLAMA3) is None
    assert call_format(CHATML) == "tagged"
    assert call_format("{{ '<tool_call>\n<function=' }}") == "xml"
    assert call_format("{{ '[TOOL_CALLS]' }}") == "mistral"


@pytest.mark.parametrize(
    ("module", "calls", "opening", "text"),
    [
        ("json_tools", "tagged", "<tool_call>", WRITE),
        ("qwen3_coder", "xml", "<tool_call>", XML),
        ("mistral", "mistral", "[TOOL_CALLS]", f"[{WRITE}, {LOOK}]"),
        ("mistral", "mistral", "[TOOL_CALLS]", 'write[ARGS]{"a": [1]}'),
        ("pythonic", "python", "<|tool_call_start|>", "[look(a='x', b=[1, true])]"),
    ],
)
def test_mlx_lm_reads_the_same_calls(module: str, calls: Any, opening: str, text: str) -> None:
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{module}")
    theirs = parser.parse_tool_call(text, TOOLS)
    ours = read(reading(calls), opening + text).calls
    assert [(call.name, json.loads(call.arguments)) for call in ours] == [
        (call["name"], call["arguments"]) for call in (theirs if isinstance(theirs, list) else [theirs])
    ]
