"""The Responses API's requests: what of them the model is given, and what of them is refused by name."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest

from gateway.dialects.responses.ids import seal_reasoning
from gateway.http.api import ChatRequest
from gateway.http.fields import read_fields
from gateway.http.responses.body import check_body
from gateway.http.responses.chat import Asked, own_words, to_chat
from gateway.text.prompts import Prompts

from .http_gateway import Gateway
from .responses_api import RESPONSES, SCHEMA, TOOL, ask, prompt_text, stream
from .samples import QWEN
from .test_responses import CUSTOM, NAMESPACE
from .test_tool_calls import HERMES_CALL, THINKING, XML, XML_CALL, generating, serve
from .test_written import clumsy


def chat(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the template is given of a body's items."""
    return chat_body(body).raw_messages


def chat_body(body: dict[str, Any]) -> ChatRequest:
    fields = read_fields(json.dumps(body).encode())
    asked = Asked(fields, check_body(fields))
    with own_words():
        return to_chat(asked, asked.request.items, is_stored=False)


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def output(call_id: str, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def call(
    call_id: str, name: str = "read_file", arguments: str = '{"path": "a"}', **more: Any
) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def chat_call(call_id: str, name: str = "read_file", arguments: str = '{"path": "a"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# Items


def test_a_string_is_what_the_user_says() -> None:
    assert chat({"input": "Hi"}) == [{"role": "user", "content": "Hi"}]


def test_instructions_come_first_and_systems_that_follow_join_them() -> None:
    """Codex sends two developer messages; templates take one system message, at the start."""
    developers = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": t}]} for t in "AB"
    ]
    assert chat({"instructions": "I", "input": [*developers, user("Hi")]}) == [
        {"role": "system", "content": "I\n\nA\n\nB"},
        {"role": "user", "content": "Hi"},
    ]


def test_systems_in_the_middle_stay_in_place() -> None:
    told = {"role": "system", "content": "9 tokens left"}
    messages = chat({"input": [{"role": "system", "content": "S"}, user("Hi"), told, user("Ho")]})
    assert [message["content"] for message in messages] == ["S", "Hi", "9 tokens left", "Ho"]
    assert messages[2]["role"] == "system"


def test_no_text_part_is_lost() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "input_text", "text": "c"},
    ]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert chat({"input": [{"role": "user", "content": parts}, refusal]}) == [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": "No."},
    ]


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        user("Hi"),
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        call("c1"),
        call("c2"),
        output("c1", "one"),
        output("c2", [{"type": "input_text", "text": "t"}, {"type": "input_text", "text": "wo"}]),
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "So."}],
            "encrypted_content": None,
        },
        {"type": "message", "role": "assistant", "content": "Done."},
    ]
    assert chat({"input": items}) == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Look.",
            "tool_calls": [chat_call("c1"), chat_call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "reasoning_content": "So.", "content": "Done."},
    ]


def test_answers_that_follow_each_other_stay_two() -> None:
    say = {"role": "assistant", "content": "x"}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("Hm.")}
    messages = chat({"input": [say, say, call("c1"), thought, call("c2"), say]})
    assert [sorted(message) for message in messages] == [
        ["content", "role"],
        ["content", "role", "tool_calls"],
        ["reasoning_content", "role", "tool_calls"],
        ["content", "role"],
    ]


def test_sealed_reasoning_goes_before_what_clients_make_of_it() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    sealed = {"type": "reasoning", "summary": summary, "encrypted_content": seal_reasoning("long")}
    foreign = {"type": "reasoning", "summary": summary, "encrypted_content": "gAAAAAB"}
    assert chat({"input": [sealed]})[0]["reasoning_content"] == "long"
    assert chat({"input": [foreign]})[0]["reasoning_content"] == "short"


def test_calls_of_namespaces_and_custom_tools_read_as_the_model_wrote_them() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": 'a "ü"\n'}
    result = {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"}
    items = [call("c1", "spawn_agent", namespace="multi_agent_v1"), custom, output("c1", "x"), result]
    [assistant, _, answer] = chat({"input": items})
    first, second = assistant["tool_calls"]
    assert first == chat_call("c1", "multi_agent_v1.spawn_agent")
    assert json.loads(second["function"]["arguments"]) == {"input": 'a "ü"\n'}
    assert answer == {"role": "tool", "tool_call_id": "c2", "content": "ok"}


# Tools


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in chat_body({"input": "Hi", **body}).raw_tools or ()]


def test_namespace_tools_are_not_dropped_and_hosted_tools_are() -> None:
    hosted = [
        {"type": kind} for kind in ("web_search", "file_search", "mcp", "local_shell", "image_generation")
    ]
    found = tools_of({"tools": [TOOL, NAMESPACE, *hosted, CUSTOM]})
    assert [tool["name"] for tool in found] == [
        "read_file",
        "multi_agent_v1.spawn_agent",
        "multi_agent_v1.wait_agent",
        "apply_patch",
    ]
    assert found[0] == {"name": "read_file", "description": "Reads a file.", "parameters": SCHEMA}
    assert found[1]["description"] == "Tools for sub-agents.\nReads a file."
    assert found[2]["description"] == "Reads a file."
    assert 'start: "*** Begin Patch"' in found[3]["description"]


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", "auto", ["read_file", "apply_patch"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]},
            "auto",
            ["apply_patch"],
        ),
    ],
)
def test_a_tool_choice_is_the_chat_calls(choice: Any, expected: Any, names: list[str]) -> None:
    body = {"tools": [TOOL, CUSTOM], "tool_choice": choice}
    assert chat_body({"input": "Hi", **body}).tool_choice == expected
    assert [tool["name"] for tool in tools_of(body)] == names


# The prompt


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, f"Let me look.\n{HERMES_CALL}"),
        (QWEN, f"{HERMES_CALL}\n{HERMES_CALL}"),
        (QWEN, f"<think>\nHm.\n</think>\n\n{HERMES_CALL}"),
        (THINKING, f"Hm.\n</think>\n\nLook.\n\n{HERMES_CALL}"),
        (XML, f"Let me look.\n\n{XML_CALL}"),
        (XML, f"<think>\nHm.\n</think>\n\n{XML_CALL}"),
    ],
)
@pytest.mark.parametrize("reasoning", [{}, {"summary": "auto"}], ids=["as text", "as summary"])
async def test_the_next_prompt_starts_with_the_generated_ids(
    gateway: Gateway, template: str, text: str, reasoning: dict[str, str]
) -> None:
    """As Codex goes on: the items that were done, their ids left out, then the outputs."""
    prompts = Prompts(serve(gateway, template))
    end = prompts.tokenizer.control.hard["<|im_end|>"]
    items, kept = [user("Read /tmp/a.txt")], b""
    asked: dict[str, Any] = {
        "store": False,
        "reasoning": reasoning,
        "include": ["reasoning.encrypted_content"],
    }
    for number in range(3):
        answer = text.replace("Look", f"Look {number}")
        ids = array("I", [*(await asyncio.to_thread(clumsy, prompts, answer)), end])
        gateway.runs.script = generating(ids, answer)
        events = await stream(gateway, **asked, input=items)
        prompt = gateway.runs.last.order.token_ids
        assert prompt.startswith(kept)
        kept = prompt + ids.tobytes()
        done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
        calls = [item for item in done if item["type"] == "function_call"]
        items += [{name: value for name, value in item.items() if name != "id"} for item in done]
        items += [output(item["call_id"], "text") for item in calls]
    assert calls and all(item["arguments"] for item in calls)


async def test_the_model_is_told_of_flattened_tools_and_instructions(gateway: Gateway) -> None:
    bundle = serve(gateway, QWEN)
    await ask(gateway, "Hi", instructions="Be <|im_end|> brief.", tools=[NAMESPACE])
    prompt = prompt_text(gateway)
    assert prompt.startswith("<|im_start|>system\nBe ") and '"multi_agent_v1.wait_agent"' in prompt
    end = Prompts(bundle).tokenizer.control.hard["<|im_end|>"]
    assert [*array("I", gateway.runs.last.order.token_ids)].count(end) == 2  # the caller's own is text


async def test_effort_reaches_the_template(gateway: Gateway) -> None:
    serve(gateway, QWEN.replace("{%- if add", "{{- reasoning_effort }}{%- if add"))
    await ask(gateway, "Hi", reasoning={"effort": "high"})
    assert "high<|im_start|>assistant\n" in prompt_text(gateway)
    await ask(gateway, "Hi", reasoning={"effort": "none"})
    assert prompt_text(gateway).endswith("<think>\n\n</think>\n\n")


# What Codex sends (its fields by shape, reference/gateway.md R2)


async def test_a_request_of_codex_with_all_its_fields(gateway: Gateway) -> None:
    serve(gateway, QWEN)
    developer = {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "You are Codex."}],
    }
    hi = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    strict = {**TOOL, "strict": False}
    body = {
        "model": "tiny",
        "input": [developer, developer, hi],
        "tools": [strict, NAMESPACE, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01999999-aaaa-bbbb-cccc-000000000001",
        "client_metadata": {"x-codex-installation-id": "i"},
        "text": {"verbosity": "low"},
        "service_tier": None,
    }
    headers = {"session-id": "s1", "thread-id": "t1", "x-codex-parent-thread-id": "t0"}
    async with gateway.http.post(gateway.url + RESPONSES, json=body, headers=headers) as response:
        text = await response.text()
    assert response.status == 200 and "response.completed" in text
    names = gateway.runs.last.order.names
    assert (names.session, names.agent, names.parent) == ("s1", "t1", "t0")
