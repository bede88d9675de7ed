"""Calls that must be, or must be right: each way of writing them, written by grammar and read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import InvalidField
from gateway.text.parsing import CallFormat, Reading, Said, parameter_types, read
from gateway.text.structured import (
    CallForm,
    GrammarChecks,
    Thought,
    WantedTool,
    Wants,
    check_schema,
    grammar_for,
    problem_with,
)

from .grammar_walk import allows, walk

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "kelvin"]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
        "exact": {"type": "boolean"},
        "note": {"type": ["string", "null"], "maxLength": 8},
        "level": {"$ref": "#/$defs/level"},
    },
    "required": ["city", "days", "level"],
    "additionalProperties": False,
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "string", "maxLength": 4}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "level": {"enum": [1, 2, 3]},
    },
}
FORMS = [
    CallForm("tagged"),
    CallForm("xml"),
    CallForm("mistral"),
    CallForm("mistral", names_first=True),
    CallForm("mistral", names_first=True, has_call_ids=True),
    CallForm("llama"),
    CallForm("python"),
]
ARGUMENTS = {"city": "Rome", "days": 3, "level": 2}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ping"}},
]
SPELT = {
    "tagged": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=level>\n2\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]',
    "llama": '{"name": "get_weather", "parameters": %s}',
    "python": '<|tool_call_start|>[get_weather(city="Rome", days=3, level=2)]<|tool_call_end|>',
}


def tool(name: str = "get_weather", schema: Any = WEATHER, *, is_strict: bool = True) -> WantedTool:
    path = f"tools.{name}"
    return WantedTool(name, check_schema(schema, path), is_strict=is_strict, path=path)


PING = tool("ping", {"type": "object", "properties": {}, "additionalProperties": False}, is_strict=False)


def source_of(wants: Wants, form: CallForm, thought: Thought | None = None) -> str:
    grammar = GrammarChecks().grammar_now(wants, form, thought or Thought())
    assert grammar is not None
    return grammar.source


def said(text: str, form: CallFormat, tools: list[dict[str, Any]] = TOOLS, **how: Any) -> Said:
    return read(Reading(calls=form, tools=parameter_types(tools), **how), text)


def spelt(form: CallForm) -> str:
    if form.names_first:
        return f"[TOOL_CALLS]get_weather[ARGS]{json.dumps(ARGUMENTS)}"
    return SPELT[form.format].replace("%s", json.dumps(ARGUMENTS))


def wrong(form: CallForm) -> str:
    """The same call with a city too many."""
    return spelt(form).replace("days", "nights")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forced_calls_are_read_back_and_their_arguments_validate(form: CallForm, seed: int) -> None:
    source = source_of(Wants(tools=(tool(), PING), must_call=True, is_parallel=seed % 2 == 0), form)
    text = walk(source, seed)
    if text is None:
        return
    what = said(text, form.format)
    assert what.content == "" and what.calls, text
    assert seed % 2 == 0 or len(what.calls) == 1
    for call in what.calls:
        assert call.is_over and call.is_whole
        schema = WEATHER if call.name == "get_weather" else PING.schema.schema
        assert problem_with(schema, json.loads(call.arguments)) is None, text


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_forced_call_is_written_as_the_model_writes_it_and_in_no_other_way(form: CallForm) -> None:
    source = source_of(Wants(tools=(tool(), PING), must_call=True), form)
    assert allows(source, spelt(form))
    assert said(spelt(form), form.format).calls[0].arguments
    for text in ("", "words", "words " + spelt(form), spelt(form) + " words", wrong(form), spelt(form)[:-1]):
        assert not allows(source, text), text


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_named_tool_is_the_only_one(form: CallForm) -> None:
    source = source_of(Wants(tools=(PING,), must_call=True, is_parallel=False), form)
    assert not allows(source, spelt(form))
    text = walk(source, 1)
    assert text is not None
    assert [call.name for call in said(text, form.format).calls] == ["ping"]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_strict_tools_are_held_to_where_the_model_calls_of_itself(form: CallForm) -> None:
    source = source_of(Wants(tools=(tool(), PING)), form)
    for text in ("", "words", "<", "a [b] {c} <d>"):
        assert allows(source, text), text
    assert allows(source, spelt(form))
    assert not allows(source, wrong(form))
    assert not allows(source, spelt(form).replace("get_weather", "get_other"))
    if form.format != "llama":
        assert allows(source, "words " + spelt(form) + " words")
        assert not allows(source, "words " + wrong(form))
        assert not allows(source, spelt(form) + wrong(form))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_strict_text_with_calls_is_read_back(form: CallForm, seed: int) -> None:
    source = source_of(Wants(tools=(tool(), PING)), form)
    text = walk(source, seed)
    if text is None:
        return
    for call in said(text, form.format).calls:
        schema = WEATHER if call.name == "get_weather" else PING.schema.schema
        assert problem_with(schema, json.loads(call.arguments)) is None, text


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_call_at_a_time_is_one_call(form: CallForm) -> None:
    source = source_of(Wants(tools=(tool(),), must_call=True, is_parallel=False), form)
    assert allows(source, spelt(form))
    assert not allows(source, spelt(form) + "\n" + spelt(form))
    assert not allows(source, spelt(form) + spelt(form))


def test_an_answer_by_schema_may_be_a_call_instead_where_calls_are_free() -> None:
    answer = check_schema({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, "x")
    source = source_of(Wants(answer=answer, tools=(tool(is_strict=False),)), CallForm())
    assert allows(source, '{"a": null}') and allows(source, spelt(CallForm()))
    assert not allows(source, "words") and not allows(source, "{}")


THINK = ("<think>", "</think>")


def test_an_open_thought_is_waited_for() -> None:
    grammar = grammar_for(Wants(tools=(PING,), must_call=True), CallForm(), Thought("open", *THINK))
    assert grammar is not None and grammar.after == "</think>"
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert allows(grammar.source, call) and allows(grammar.source, "\n\n" + call)
    assert not allows(grammar.source, "<think></think>" + call)


def test_a_possible_thought_may_come_first_and_must_be_closed() -> None:
    source = source_of(
        Wants(answer=check_schema({"type": "null"}, "x")), CallForm(), Thought("possible", *THINK)
    )
    for text in ("null", "<think>\nhm null </thin\n</think>\n\nnull", "\n<think></think>null"):
        assert allows(source, text), text
    for text in ("\nnull", "<think>null", "<think>null</think>", "<think></think><think></think>null"):
        assert not allows(source, text), text


@pytest.mark.parametrize(
    "name", ['q"uote', "back\\slash", "ü", "a b", "</tool_call>", "new\nline", "x" * 200]
)
def test_hostile_names_stay_data(name: str) -> None:
    wants = Wants(
        tools=(tool(name, {"properties": {name: {"const": name}}, "required": [name]}),), must_call=True
    )
    source = source_of(wants, CallForm())
    text = '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>'
    spelt_name = json.dumps(name, ensure_ascii=False)
    assert allows(source, text % (spelt_name, json.dumps({name: name}, ensure_ascii=False)))
    assert not allows(source, text % (spelt_name, "{}"))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^a$"}}}, "pattern"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        ({"anyOf": [{"properties": {"a": {}}}]}, "object"),
        ({"properties": {"a": {"items": {"$ref": "#"}, "type": "array"}}}, "refers"),
        ({"properties": {"a<b": {}}}, "name"),
    ],
)
def test_what_xml_cannot_hold_is_refused_by_name_for_strict_tools(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidField, match=problem) as refused:
        source_of(Wants(tools=(tool(schema=schema),), must_call=True), CallForm("xml"))
    assert refused.value.param == "tools.get_weather"


@pytest.mark.parametrize("name", ["get-weather", "class", "1a", "a..b", ""])
def test_names_that_python_cannot_write_are_refused(name: str) -> None:
    with pytest.raises(InvalidField, match="Python"):
        source_of(Wants(tools=(tool(name),), must_call=True), CallForm("python"))


@pytest.mark.parametrize(
    ("value", "is_allowed"),
    [("a", False), ("ab", True), ("a\nb", True), ("abcde", True), ("abcdef", False), ("é😀", True)],
)
def test_raw_text_has_the_length_that_its_schema_says(value: str, is_allowed: bool) -> None:
    schema = {"properties": {"a": {"type": "string", "minLength": 2, "maxLength": 5}}, "required": ["a"]}
    source = source_of(Wants(tools=(tool(schema=schema),), must_call=True), CallForm("xml"))
    written = f"<parameter=a>\n{value}\n</parameter>"
    text = f"<tool_call>\n<function=get_weather>\n{written}\n</function>\n</tool_call>"
    assert allows(source, text) is is_allowed
    if is_allowed:
        tools = [{"function": {"name": "get_weather", "parameters": schema}}]
        assert json.loads(said(text, "xml", tools).calls[0].arguments) == {"a": value}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_tool_that_nobody_calls_strict_is_held_to_what_can_be_enforced(form: CallForm) -> None:
    """tool_choice is required, and a tool has what no grammar can say: it takes any object."""
    odd = tool("odd", {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, is_strict=False)
    source = source_of(Wants(tools=(odd, tool()), must_call=True), form)
    assert allows(source, spelt(form)) and not allows(source, wrong(form))
    with pytest.raises(InvalidField) as refused:
        source_of(
            Wants(tools=(tool("odd", {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}),)), form
        )
    assert str(refused.value.param).startswith("tools.odd")


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_call_that_is_cut_is_no_whole_call(form: CallForm) -> None:
    """Bug 20: what max_tokens cut off is not passed on as a complete call."""
    whole = spelt(form)
    for length in range(len(whole)):
        for call in said(whole[:length], form.format).calls:
            assert not (call.is_over and call.is_whole) or json.loads(call.arguments) == ARGUMENTS
