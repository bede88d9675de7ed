"""Schemas of callers: enforced as they say, or refused by the path of what cannot be."""

from __future__ import annotations

import json
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gateway.errors import InvalidField
from gateway.text.structured import (
    CallForm,
    Checked,
    GrammarChecks,
    SchemaLimits,
    Thought,
    WantedTool,
    Wants,
    check_schema,
    problem_with,
)
from gateway.text.structured.checks import matches

from .grammar_walk import allows, walk

PATH = "response_format.json_schema.schema"


def source_of(schema: Any) -> str:
    checked = check_schema(schema, PATH)
    grammar = GrammarChecks().grammar_now(Wants(answer=checked, answer_path=PATH), CallForm(), Thought())
    assert grammar is not None and grammar.after is None
    return grammar.source


def refused_at(schema: Any) -> str:
    with pytest.raises(InvalidField) as refused:
        source_of(schema)
    message = str(refused.value)
    assert str(refused.value.param) in message and len(message) < 400
    return str(refused.value.param).removeprefix(PATH)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"x": {"not": {}}}}, ".properties.x.not"),
        ({"items": {"anyOf": [{}, {"if": {}}]}}, ".items.anyOf[1].if"),
        ({"$defs": {"a": {"uniqueItems": True}}}, ".$defs.a.uniqueItems"),
        ({"properties": {"x": {"x-guidance": {"lenient": True}}}}, ".properties.x.x-guidance"),
        ({"x-guidance": {}}, ".x-guidance"),
        ({"dependentRequired": {}}, ".dependentRequired"),
        ({"prefixItems": [{}, {"contains": {}}]}, ".prefixItems[1].contains"),
        ({"propertyNames": {}}, ".propertyNames"),
        ({"type": "text"}, ".type"),
        ({"type": []}, ".type"),
        ({"type": ["string", 7]}, ".type"),
        ({"enum": []}, ".enum"),
        ({"enum": "a"}, ".enum"),
        ({"anyOf": []}, ".anyOf"),
        ({"anyOf": {}}, ".anyOf"),
        ({"items": [{}]}, ".items"),
        ({"properties": []}, ".properties"),
        ({"properties": {"a": 7}}, ".properties.a"),
        ({"required": "a"}, ".required"),
        ({"required": [7]}, ".required"),
        ({"maxLength": -1}, ".maxLength"),
        ({"maxLength": 1.5}, ".maxLength"),
        ({"maxItems": True}, ".maxItems"),
        ({"minLength": 10**9}, ".minLength"),
        ({"exclusiveMinimum": True}, ".exclusiveMinimum"),
        ({"multipleOf": 0}, ".multipleOf"),
        ({"pattern": 7}, ".pattern"),
        ({"pattern": "a" * 1001}, ".pattern"),
        ({"type": "string", "format": "iri"}, ".format"),
        ({"format": 7}, ".format"),
        ({"$ref": "https://example.org/a.json"}, ".$ref"),
        ({"$ref": "#anchor"}, ".$ref"),
        ({"$ref": "#/$defs/a"}, ".$ref"),
        ({"$ref": "#/required", "required": ["a"]}, ".$ref"),
        ({"properties": {"a": {"$id": "a"}}}, ".properties.a.$id"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, ".properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "pattern": r"\bword\b"}}}, ".properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "pattern": "["}}}, ".properties.a.pattern"),
        ({"patternProperties": {"(?!a)": {}}}, ".patternProperties.(?!a)"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, ""),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, ""),
        ({"type": "number", "minimum": 2, "maximum": 1}, ""),
        ({"$ref": "#"}, ""),
        ("x", ""),
        (None, ""),
        ([], ""),
    ],
)
def test_what_cannot_be_enforced_is_named_by_its_path(schema: Any, path: str) -> None:
    assert refused_at(schema) == path


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"title": "a", "description": "b", "examples": [1], "default": 7, "$comment": "c", "$schema": "d"},
        {"type": "integer", "format": "int32"},
        {"type": "string", "nullable": True, "x-order": 3, "unheard": {"not": 1}},
        {"$id": "https://example.org/a", "type": "string"},
        {"$defs": {"a/b~ ü": {"type": "string"}}, "$ref": "#/$defs/a~1b~0%20ü"},
        {"properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"$defs": {"n": {"properties": {"c": {"items": {"$ref": "#/$defs/n"}}}}}, "$ref": "#/$defs/n"},
    ],
)
def test_what_says_nothing_is_left_out_and_the_rest_enforced(schema: Any) -> None:
    assert "unheard" not in source_of(schema)


def nested(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(40),
        {"properties": {f"p{i}": {} for i in range(501)}},
        {"properties": {f"a{i}": {"properties": {f"b{j}": {} for j in range(300)}} for i in range(9)}},
        {"enum": [*range(2001)]},
        {"enum": ["x" * 130_000]},
        {"properties": {"x" * 130_000: {}}},
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(3)]} for i in range(12)]},
    ],
)
def test_sizes_are_limited_and_refused_quickly(schema: Any) -> None:
    started = time.perf_counter()
    with pytest.raises(InvalidField):
        source_of(schema)
    assert time.perf_counter() - started < 5


def test_limits_are_named() -> None:
    with pytest.raises(InvalidField, match="at most 1 "):
        check_schema({"properties": {"a": {}, "b": {}}}, "x", SchemaLimits(properties_each=1))


def test_only_enforced_keys_reach_the_grammar() -> None:
    checked = check_schema({"type": "string", "title": "t", "format": "date", "unknown": 1}, "x")
    assert checked == Checked({"type": "string", "format": "date"})


SCALARS = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 9)),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}é?$"}),
    st.just({"type": "string", "format": "date"}),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        *[st.integers(-99, 99)] * 2,
    ),
    st.just({"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9}),
    st.just({"type": ["boolean", "null"]}),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.sampled_from(["a", "ü\n", 1, None, [1]]), min_size=1)
    ),
)


def objects(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, required, closed: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            "additionalProperties": False if closed else {"type": "integer", "maximum": 9, "minimum": 0},
            "maxProperties": len(properties) + 1,
        },
        st.dictionaries(st.sampled_from(["a", "b", "c d", "é", '"']), members, max_size=3),
        st.sets(st.sampled_from(["a", "b", "c d", "é", '"'])),
        st.booleans(),
    )


def containers(members: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(lambda item: {"type": "array", "items": item, "maxItems": 3}, members)
    unions = st.builds(lambda some: {"anyOf": some}, st.lists(members, min_size=1, max_size=3))
    return st.one_of(objects(members), arrays, unions)


@settings(max_examples=60, deadline=None)
@given(schema=st.recursive(SCALARS, containers, max_leaves=5), seed=st.integers(0, 2**32))
def test_whatever_a_grammar_allows_validates(schema: Any, seed: int) -> None:
    try:
        source = source_of(schema)
    except InvalidField:
        return  # e.g. a property that can never be
    text = walk(source, seed)
    if text is not None:
        assert problem_with(check_schema(schema, "x").schema, json.loads(text)) is None, (schema, text)


@pytest.mark.parametrize(
    ("schema", "value", "path"),
    [
        ({"type": "object", "required": ["a"]}, {}, "result"),
        ({"properties": {"a": {"items": {"type": "integer"}}}}, {"a": [1, "x"]}, "result.a[1]"),
        ({"type": "string", "pattern": "^a+$"}, "ab", "result"),
        ({"patternProperties": {"^x": {"type": "integer"}}}, {"xa": "no"}, "result.xa"),
        ({"patternProperties": {"^x": {}}, "additionalProperties": False}, {"xa": 1, "y": 1}, "result.y"),
        ({"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}, 1, "result"),
        (False, 1, "result"),
    ],
)
def test_a_result_that_breaks_its_schema_is_told_by_its_path(schema: Any, value: Any, path: str) -> None:
    problem = problem_with(schema, value)
    assert problem is not None and problem.startswith(f"{path} breaks")


def test_a_sound_result_has_no_problem() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"pattern": "b"}},
        "patternProperties": {"^x": {"type": "null"}},
    }
    assert problem_with(schema, {"a": "abc", "x1": None, "other": 1}) is None
    assert problem_with(True, {"a": 1}) is None


def test_a_hostile_pattern_takes_linear_time() -> None:
    started = time.perf_counter()
    assert problem_with({"pattern": "^(x+x+)+y$"}, "x" * 20_000) is not None
    assert time.perf_counter() - started < 2


def test_a_result_nested_without_end_is_a_problem_and_no_crash() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert "nested" in (
        problem_with({"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}, value) or ""
    )


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        ("a", "bab", True),
        ("^a+$", "aaa", True),
        ("^a+$", "ab", False),
        ("^.$", "é", True),
        ("^.$", "\x7f", True),
        ("^[^a]$", "\n", True),
        ("é", "xéx", True),
        ('^"$', '"', True),
        (r"^\\$", "\\", True),
        ("^$", "", True),
    ],
)
def test_patterns_search_as_json_schema_says(pattern: str, text: str, is_found: bool) -> None:
    assert matches(pattern, text) is is_found


async def test_checks_are_made_once_for_each_grammar() -> None:
    checks = GrammarChecks()
    schema = check_schema({"properties": {f"p{i}": {"type": "string"} for i in range(400)}}, PATH)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        assert await checks.grammar(Wants(answer=schema), CallForm(), Thought())
        seconds.append(time.perf_counter() - started)
    assert seconds[1] < seconds[0] / 3


async def test_free_wants_make_no_grammar() -> None:
    assert await GrammarChecks().grammar(Wants(tools=(WantedTool("a"),)), CallForm(), Thought()) is None


def test_white_space_between_signs_is_bounded() -> None:
    source = source_of(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    )
    assert allows(source, '{\n    "a": 1\n}')
    assert not allows(source, "{" + " " * 40 + '"a": 1}')
