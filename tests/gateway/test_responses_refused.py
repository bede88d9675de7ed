"""What the Responses API refuses, by name, and what it takes though it has no effect; never a 500."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.http.responses.body import check_body

from .http_gateway import Gateway
from .responses_api import TOOL, ask, refused
from .samples import QWEN
from .test_responses import NAMESPACE
from .test_responses_input import chat_body, output, user
from .test_tool_calls import serve

DEEP_NOT = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": None}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [user("a"), {"role": "user", "content": 7}]}, "input[1].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [output("c", [{"type": "input_image"}])]}, "input[0].output[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": None}]}, "input[0].output"),
        ({"input": [user("a"), {"type": "web_search_call", "id": "ws_1"}]}, "input[1].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": 7}]}, "input[0].type"),
        ({"instructions": 7}, "instructions"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"background": True, "store": False}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": "much"}, "reasoning"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": DEEP_NOT}}},
            "text.format.schema.properties.x.not",
        ),
        (
            {
                "tools": [
                    {"type": "mcp"},
                    {**NAMESPACE, "tools": [{**TOOL, "parameters": DEEP_NOT, "strict": True}]},
                ]
            },
            "tools.multi_agent_v1.read_file.parameters.properties.x.not",
        ),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"chat_template_kwargs": 7}, "chat_template_kwargs"),
    ],
)
async def test_a_bad_field_is_named(gateway: Gateway, body: dict[str, Any], param: str) -> None:
    serve(gateway, QWEN)
    error = await refused(gateway, **body)
    assert error["param"] == param and f"'{param}'" in error["message"]
    assert gateway.runs.runs == {}


async def test_a_prompt_that_is_too_long_is_told_about_the_input(gateway: Gateway) -> None:
    error = await refused(gateway, input="again " * 5000, tools=[])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    "more",
    [
        {"service_tier": "flex"},
        {"truncation": "auto"},
        {"safety_identifier": "s"},
        {"max_tool_calls": 3},
        {"unknown": {"a": 1}},
        {"stream_options": {"include_obfuscation": False}},
        {"include": ["web_search_call.results"]},
        {"user": "u"},
        {"top_p": 0.5},
    ],
)
async def test_fields_that_do_no_harm_are_taken(gateway: Gateway, more: dict[str, Any]) -> None:
    serve(gateway, QWEN)
    assert (await ask(gateway, "Hi", store=False, **more))["status"] == "completed"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WORDS = [
    "type",
    "role",
    "content",
    "text",
    "call_id",
    "output",
    "name",
    "arguments",
    "summary",
    "input",
    "id",
]
ITEMS = st.dictionaries(
    st.sampled_from(WORDS),
    JSON_VALUES
    | st.sampled_from(["message", "function_call", "reasoning", "function_call_output", "user", "assistant"]),
)
FIELDS = [*check_body({}).__struct_fields__]


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES | st.lists(ITEMS, max_size=4), max_size=5))
def test_any_body_is_taken_or_refused_in_words(body: dict[str, Any]) -> None:
    try:
        chat_body({"input": "Hi", **body})
    except GatewayError as error:
        assert error.status == 400 and error.message
