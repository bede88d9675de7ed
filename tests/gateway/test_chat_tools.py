"""What chat completions take beside plain functions: custom tools, a choice among allowed ones, efforts.

What was before tools is refused by name.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gateway.dialects.custom_calls import custom_input

from .fake_runs import words
from .http_gateway import Gateway, chunks_of
from .responses_api import prompt_text
from .samples import QWEN, TOOLS
from .test_tool_calls import THINKING, USER, ask, qwen, serve

__all__ = ["qwen"]

PATCH = '*** Begin\n+"ü"\n'
CUSTOM: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Patches files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x+/"}},
    },
}
OTHER = {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object"}}}
ASKED: dict[str, Any] = {"messages": [USER], "tools": [*TOOLS, CUSTOM, OTHER]}


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def refused(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    status, body = await gateway.post({**ASKED, **fields})
    assert status == 400, body
    assert not gateway.runs.runs
    return dict(body["error"])


# Custom tools


async def test_custom_tools_are_called_with_text(qwen: Gateway) -> None:
    text = f"{call('apply_patch', {'input': PATCH})}\n{call('read_file', {'path': '/a'})}"
    choice = await ask(qwen, text, **ASKED)
    custom, function = choice["message"]["tool_calls"]
    assert custom == {
        "id": custom["id"],
        "type": "custom",
        "custom": {"name": "apply_patch", "input": PATCH},
    }
    assert function["type"] == "function" and function["function"]["name"] == "read_file"
    assert choice["finish_reason"] == "tool_calls"
    prompt = prompt_text(qwen)
    assert "Patches files." in prompt and "start: /x+/" in prompt


async def test_a_streamed_custom_call_adds_up_to_the_whole_one(qwen: Gateway) -> None:
    text = f"{call('apply_patch', {'input': PATCH})}\n{call('read_file', {'path': '/a'})}"
    whole = (await ask(qwen, text, **ASKED))["message"]["tool_calls"]
    for pieces in ([text], [*text]):
        qwen.runs.script = words(*pieces)
        calls: list[dict[str, Any]] = []
        for chunk in chunks_of(await qwen.stream(ASKED)):
            for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
                if part["index"] == len(calls):
                    calls.append({name: value for name, value in part.items() if name != "index"})
                else:
                    assert part["index"] == len(calls) - 1
                    (kind,) = part.keys() - {"index"}
                    for name, value in part[kind].items():
                        calls[-1][kind][name] += value
        assert [{**one, "id": ""} for one in calls] == [{**one, "id": ""} for one in whole]


async def test_a_custom_call_that_is_cut_off_has_no_input(qwen: Gateway) -> None:
    choice = await ask(qwen, call("apply_patch", {"input": PATCH})[:70], reason="length", **ASKED)
    assert choice["message"]["tool_calls"][0]["custom"] == {"name": "apply_patch", "input": ""}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("text", ['{"input": 5}', "[1]", '"a"', "{", '{"input": "\ud800"}'])
def test_a_custom_call_of_another_shape_is_its_text(text: str) -> None:
    assert custom_input(text) == text


async def test_a_custom_call_comes_back_as_the_model_wrote_it(qwen: Gateway) -> None:
    made = (await ask(qwen, call("apply_patch", {"input": "a"}), **ASKED))["message"]
    (asked,) = made["tool_calls"]
    result = {"role": "tool", "tool_call_id": asked["id"], "content": "ok"}
    await ask(qwen, "Done.", **ASKED | {"messages": [USER, {"role": "assistant", **made}, result]})
    assert '{"name": "apply_patch", "arguments": {"input": "a"}}' in prompt_text(qwen)


async def test_the_official_client_reads_custom_calls(qwen: Gateway) -> None:
    text = call("apply_patch", {"input": PATCH})
    async with openai.AsyncOpenAI(base_url=f"{qwen.url}/v1", api_key="x") as client:
        qwen.runs.script = words(text)
        answer = await client.chat.completions.create(model="tiny", **ASKED)
        (made,) = answer.choices[0].message.tool_calls or [None]
        assert made is not None and made.type == "custom"
        assert (made.custom.name, made.custom.input) == ("apply_patch", PATCH)
        qwen.runs.script = words(*text)
        async for chunk in await client.chat.completions.create(model="tiny", stream=True, **ASKED):
            last = chunk
        assert last.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": "x"}, "tools[0].custom"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": 5}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "a", "format": 5}}, "tools[0].custom.format"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}, "tools[0].custom.format"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": []}}}, "tools[0].custom.format"),
        ({"type": "other", "custom": {"name": "a"}}, "tools[0].type"),
    ],
)
async def test_a_custom_tool_that_is_none_is_refused_by_name(qwen: Gateway, tool: Any, param: str) -> None:
    assert (await refused(qwen, tools=[tool]))["param"] == param


# Which of them may be called


def allowed(*tools: Any, mode: Any = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


READ = {"type": "function", "function": {"name": "read_file"}}
APPLY = {"type": "custom", "custom": {"name": "apply_patch"}}


async def test_only_allowed_tools_are_offered(qwen: Gateway) -> None:
    await ask(qwen, "x", **ASKED, tool_choice=allowed(READ, APPLY))
    prompt = prompt_text(qwen)
    assert "read_file" in prompt and "apply_patch" in prompt and "write_file" not in prompt
    assert not qwen.runs.last.order.grammar
    await ask(qwen, "x", **ASKED, tool_choice=allowed(READ, mode="required"))
    grammar = qwen.runs.last.order.grammar
    assert "read_file" in str(grammar) and "write_file" not in str(grammar)


async def test_a_custom_tool_can_be_chosen(qwen: Gateway) -> None:
    await ask(qwen, call("apply_patch", {"input": "a"}), **ASKED, tool_choice=APPLY)
    grammar = qwen.runs.last.order.grammar
    assert "apply_patch" in str(grammar) and "read_file" not in str(grammar)


@pytest.mark.parametrize(
    "choice",
    [
        allowed({"type": "function", "function": {"name": "none"}}),
        allowed(5),
        allowed(READ, mode="never"),
        allowed(READ, mode=[]),
        allowed(mode="required"),
        {"type": "allowed_tools"},
        {"type": "custom", "custom": {"name": "read_file"}},
        {"type": "custom", "custom": {"name": []}},
        {"type": "custom"},
    ],
)
async def test_a_choice_that_cannot_be_is_refused_by_name(qwen: Gateway, choice: Any) -> None:
    assert (await refused(qwen, tool_choice=choice))["param"].startswith("tool_choice")


async def test_a_bad_schema_of_an_allowed_tool_is_named_by_its_place_in_the_body(qwen: Gateway) -> None:
    strict = {"type": "function", "function": {"name": "bad", "strict": True, "parameters": {"type": "x"}}}
    chosen = allowed({"type": "function", "function": {"name": "bad"}}, mode="required")
    error = await refused(qwen, tools=[*TOOLS, strict], tool_choice=chosen)
    assert error["param"].startswith("tools[1].function.parameters")


# What was before tools


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("functions", [{"name": "read_file", "parameters": {}}], "'tools'"),
        ("functions", [], "'tools'"),
        ("function_call", "auto", "'tool_choice'"),
        ("function_call", {"name": "read_file"}, "'tool_choice'"),
    ],
)
async def test_functions_of_the_old_kind_are_refused_and_not_dropped(
    qwen: Gateway, name: str, value: Any, remedy: str
) -> None:
    error = await refused(qwen, **{name: value})
    assert error["param"] == name and remedy in error["message"]


async def test_a_call_of_the_old_kind_in_a_message_is_refused_and_not_dropped(qwen: Gateway) -> None:
    said = {"role": "assistant", "content": None, "function_call": {"name": "a", "arguments": "{}"}}
    error = await refused(qwen, messages=[USER, said, USER])
    assert error["param"] == "messages[1].function_call" and "'tool_calls'" in error["message"]
    absent = {"role": "assistant", "content": "Hm.", "function_call": None}
    await ask(qwen, "x", messages=[USER, absent, USER], functions=None, function_call=None)


# Efforts and thoughts


async def test_effort_reaches_the_template(gateway: Gateway) -> None:
    serve(gateway, QWEN.replace("{%- if add", "{{- reasoning_effort }}{%- if add"))
    await ask(gateway, "Hi", reasoning_effort="high")
    assert "high<|im_start|>assistant\n" in prompt_text(gateway)
    await ask(gateway, "Hi", reasoning_effort="none")
    assert prompt_text(gateway).endswith("<think>\n\n</think>\n\n")
    await ask(gateway, "Hi", reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert "low<|im_start|>assistant\n" in prompt_text(gateway), "what is said to the template itself holds"


async def test_an_effort_that_is_no_word_is_refused_by_name(qwen: Gateway) -> None:
    assert (await refused(qwen, reasoning_effort=5))["param"] == "reasoning_effort"


async def test_usage_tells_how_many_tokens_were_thought(gateway: Gateway) -> None:
    serve(gateway, THINKING)
    gateway.runs.script = words("Hm", ". ", "So.", "\n</think>\n\n", "Yes", ".")
    status, body = await gateway.post({"messages": [USER]})
    assert status == 200
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    asked = {"messages": [USER], "stream_options": {"include_usage": True}}
    assert chunks_of(await gateway.stream(asked))[-1]["usage"] == body["usage"]
