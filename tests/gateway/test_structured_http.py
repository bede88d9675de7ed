"""What a call demands of its answer reaches the engine as a grammar, or is a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.errors import InvalidField
from gateway.http.api import ChatRequest, parse_chat
from gateway.http.wanting import later_wants_of, wants_of
from workers.messages import Failed, Grammar

from .fake_runs import words
from .grammar_walk import allows
from .http_gateway import Gateway, chunks_of
from .samples import MISTRAL, QWEN, TOOLS
from .test_tool_calls import ASKED, CALL, THINKING, XML, serve

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
NAMED = {"type": "function", "function": {"name": "read_file"}}
WRITTEN = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>'


@pytest.fixture
def qwen(gateway: Gateway) -> Gateway:
    serve(gateway, QWEN)
    return gateway


async def grammar_of(gateway: Gateway, **body: Any) -> Grammar | None:
    gateway.runs.script = words("{}")
    status, answer = await gateway.post({**PLAIN, **body})
    assert status == 200, answer
    grammar: Grammar | None = gateway.runs.last.order.grammar
    return grammar


async def test_plain_calls_have_no_grammar(qwen: Gateway) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": "none"},
    ]
    for body in cases:
        assert await grammar_of(qwen, **body) is None


async def test_a_schema_is_enforced_whatever_strict_says(qwen: Gateway) -> None:
    grammars = []
    for strict in ({"strict": True}, {"strict": False}, {}):
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, **strict}}
        grammars.append(await grammar_of(qwen, response_format=form))
    assert grammars[0] is not None and grammars[0] == grammars[1] == grammars[2]
    assert allows(grammars[0].source, '{"a": 1}') and not allows(grammars[0].source, '{"a": "1"}')


async def test_a_json_object_is_any_object(qwen: Gateway) -> None:
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
        grammar = await grammar_of(qwen, response_format=form)
        assert grammar is not None
        assert allows(grammar.source, '{"b": [1, {}]}') and not allows(grammar.source, "[1]")


async def test_a_model_that_may_think_may_do_so_first(qwen: Gateway) -> None:
    grammar = await grammar_of(qwen, response_format=FORMAT)
    assert grammar is not None and grammar.after is None
    assert allows(grammar.source, '<think>\nhm\n</think>\n\n{"a": 1}')


async def test_an_open_thought_is_waited_for(gateway: Gateway) -> None:
    serve(gateway, THINKING)
    grammar = await grammar_of(gateway, response_format=FORMAT)
    assert grammar is not None and grammar.after == "</think>"


async def test_a_closed_thought_is_not_opened_again(gateway: Gateway) -> None:
    serve(gateway, THINKING.replace("<think>\\n' }}", "<think>\\n\\n</think>\\n\\n' }}"))
    grammar = await grammar_of(gateway, response_format=FORMAT)
    assert grammar is not None and grammar.after is None
    assert allows(grammar.source, '{"a": 1}') and not allows(grammar.source, '<think></think>{"a": 1}')


async def test_a_model_that_does_not_think_does_not_begin_to(gateway: Gateway) -> None:
    serve(gateway, MISTRAL)
    grammar = await grammar_of(gateway, response_format=FORMAT)
    assert grammar is not None and not allows(grammar.source, '<think></think>{"a": 1}')


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_can_be_demanded(qwen: Gateway, choice: Any) -> None:
    grammar = await grammar_of(qwen, tools=TOOLS, tool_choice=choice)
    assert grammar is not None
    assert allows(grammar.source, WRITTEN) and not allows(grammar.source, "words")


async def test_a_demanded_call_is_written_as_the_template_shows_calls(gateway: Gateway) -> None:
    serve(gateway, XML)
    grammar = await grammar_of(gateway, tools=TOOLS, tool_choice=NAMED)
    assert grammar is not None and "<parameter=path>" in grammar.source
    assert not allows(grammar.source, WRITTEN)


async def test_a_strict_tool_is_held_to_and_text_is_free(qwen: Gateway) -> None:
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    grammar = await grammar_of(qwen, tools=strict)
    assert grammar is not None
    assert allows(grammar.source, "Some words. " + WRITTEN)
    assert not allows(grammar.source, WRITTEN.replace("read_file", "rm"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice.function.name",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"properties": {"x": {"not": {}}}}},
                }
            },
            "response_format.json_schema.schema.properties.x.not",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"if": {}}}}
                ]
            },
            "tools[0].function.parameters.if",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"properties": {"p": {"type": "string", "pattern": "(?=a)"}}},
                        },
                    }
                ]
            },
            "tools[0].function.parameters.properties.p.pattern",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_refused_before_anything_is_sent(
    qwen: Gateway, body: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        status, answer = await qwen.post({**PLAIN, **body, "stream": stream})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "invalid_field")
    assert not qwen.runs.runs


async def test_a_demanded_call_that_is_cut_ends_in_length_and_is_no_whole_call(qwen: Gateway) -> None:
    """Bug 20."""
    for cut in (WRITTEN[:30], CALL[: CALL.index("1.50")]):
        qwen.runs.script = words(cut, reason="length")
        status, answer = await qwen.post({**ASKED, "tool_choice": "required"})
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
        chunks = chunks_of(await qwen.stream({**ASKED, "tool_choice": "required"}))
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"


@pytest.mark.parametrize(("error", "status"), [("grammar_error", 400), ("grammar_dead_end", 500)])
async def test_an_engine_that_cannot_go_on_by_the_grammar_ends_the_call_in_an_error(
    qwen: Gateway, error: str, status: int
) -> None:
    qwen.runs.script = lambda order: [Failed(error=error, message="simplify the schema")]
    got, answer = await qwen.post({**PLAIN, "response_format": FORMAT})
    assert (got, answer["error"]["code"]) == (status, error)


def request_of(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({**PLAIN, **fields}).encode())


@pytest.mark.parametrize(
    ("endpoint", "answer", "tool"),
    [
        ("chat", "response_format.json_schema.schema.not", "tools[0].function.parameters.not"),
        ("responses", "text.format.schema.not", "tools.f.parameters.not"),
        ("messages", "output_config.format.schema.not", "tools.f.input_schema.not"),
    ],
)
def test_each_api_names_its_own_fields(endpoint: Any, answer: str, tool: str) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
    for fields, param in (({"response_format": bad}, answer), ({"tools": tools}, tool)):
        with pytest.raises(InvalidField) as refused:
            wants_of(msgspec.structs.replace(request_of(**fields), endpoint=endpoint))
        assert refused.value.param == param


def test_a_tool_without_parameters_takes_none() -> None:
    wants = wants_of(
        request_of(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required")
    )
    assert wants.tools[0].schema.schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_demanded_call_is_demanded_of_the_first_turn_only() -> None:
    request = request_of(tools=TOOLS, tool_choice=NAMED, response_format=FORMAT)
    later = later_wants_of(request)
    assert wants_of(request).must_call and not later.must_call
    assert later.answer is not None and len(later.tools) == len(TOOLS)
    assert later_wants_of(request_of(tools=TOOLS, tool_choice="required")).is_free
    assert not later_wants_of(request_of(tools=TOOLS, tool_choice="none", response_format=FORMAT)).tools
