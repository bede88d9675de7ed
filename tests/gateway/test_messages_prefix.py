"""A session over the Messages API computes nothing twice: each prompt begins with what the cache holds."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from gateway.text.prompts import Prompts

from .http_gateway import Gateway
from .messages_api import ASKED, COUNT, MESSAGES, TOOL, USER
from .samples import QWEN
from .test_spellings import STRICT
from .test_tool_calls import HERMES_CALL, THINKING, XML, XML_CALL, generating, serve
from .test_written import clumsy

HEADER = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=sdk-cli;"


async def answer(gateway: Gateway, prompts: Prompts, text: str, body: dict[str, Any]) -> tuple[bytes, Any]:
    """The model answers; what its cache holds then, and the message."""
    end = prompts.tokenizer.control.hard["<|im_end|>"]
    ids = array("I", [*(await asyncio.to_thread(clumsy, prompts, text)), end])
    gateway.runs.script = generating(ids, text)
    status, message = await gateway.post(body, MESSAGES)
    assert status == 200, message
    return gateway.runs.last.order.token_ids + ids.tobytes(), message


def results(message: dict[str, Any], content: Any = "text") -> dict[str, Any]:
    uses = [block for block in message["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": use["id"], "content": content} for use in uses]
    return {"role": "user", "content": blocks}


def reused(before: bytes, prompt: bytes) -> float:
    """Which part of what the cache held the next prompt begins with."""
    old, new = array("I", before), array("I", prompt)
    same = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    return same / len(old)


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, f"Let me look.\n{HERMES_CALL}"),
        (QWEN, f"<think>\nHm.\n</think>\n\n{HERMES_CALL}\n{HERMES_CALL}"),
        (THINKING, f"Hm.\n</think>\n\nLook.\n\n{HERMES_CALL}"),
        (XML, f"<think>\nHm.\n</think>\n\n{XML_CALL}"),
    ],
)
async def test_the_turn_after_a_call_starts_with_the_generated_ids(
    gateway: Gateway, template: str, text: str, display: str
) -> None:
    prompts = Prompts(serve(gateway, template))
    body = {**ASKED, "thinking": {"type": "adaptive", "display": display}}
    messages, kept = [USER], b""
    for number in range(3):
        held, message = await answer(
            gateway, prompts, text.replace("Look", f"Look {number}"), {**body, "messages": messages}
        )
        assert held.startswith(kept)
        kept = held
        messages = [*messages, {"role": "assistant", "content": message["content"]}, results(message)]


async def test_an_omitted_thought_is_not_forgotten_when_nothing_was_learned(gateway: Gateway) -> None:
    """As after a restart of the gateway: the signature alone brings the thought back."""
    prompts = Prompts(serve(gateway, QWEN))
    body = {**ASKED, "thinking": {"type": "adaptive", "display": "omitted"}}
    text = f"<think>\nHm.\n</think>\n\n{HERMES_CALL}"
    _, message = await answer(gateway, prompts, text, body)
    said = {"role": "assistant", "content": message["content"]}
    elsewhere = {"user_id": "u_session_00000000-0000-0000-0000-000000000001"}
    follow_up = {**body, "messages": [USER, said, results(message)], "metadata": elsewhere}
    await answer(gateway, prompts, "Done.", follow_up)
    prompt = prompts.tokenizer.decode([*array("I", gateway.runs.last.order.token_ids)])
    assert "<think>\nHm.\n</think>" in prompt


@pytest.mark.parametrize("template", [QWEN, STRICT], ids=["takes late system text", "refuses it"])
async def test_changing_lines_of_claude_code_cost_nothing(gateway: Gateway, template: str) -> None:
    """As Claude Code 2.1 sends it: a header that changes, late system text first as blocks, then not."""
    prompts = Prompts(serve(gateway, template))
    cached = {"cache_control": {"type": "ephemeral"}}
    environment = "# Environment\nIt is Monday."
    late = {"role": "system", "content": [{"type": "text", "text": environment, **cached}]}
    messages: list[dict[str, Any]] = [USER, late]
    held = b""
    for number in range(4):
        system = [
            {"type": "text", "text": HEADER.format(f"b{number}9")},
            {"type": "text", "text": "You are Claude Code.", **cached},
            {"type": "text", "text": "\nBe careful. " * 40, **cached},
        ]
        body = {**ASKED, "system": system, "messages": messages}
        kept, message = await answer(gateway, prompts, f"Look {number}.\n{HERMES_CALL}", body)
        if held:
            assert reused(held, gateway.runs.last.order.token_ids) >= 0.99
        held = kept
        left = {"role": "system", "content": f"<total_tokens>{9000 - number} tokens left</total_tokens>"}
        said = {"role": "assistant", "content": message["content"]}
        messages = [USER, {**late, "content": environment}, *messages[2:], said, results(message), left]


async def test_a_tool_that_is_loaded_later_leaves_the_prompt_as_it_was(gateway: Gateway) -> None:
    prompts = Prompts(serve(gateway, QWEN))
    held, message = await answer(gateway, prompts, HERMES_CALL, ASKED)
    loaded = results(message, [{"type": "tool_reference", "tool_name": "fetch"}])
    fetch = {**TOOL, "name": "fetch", "defer_loading": True}
    said = {"role": "assistant", "content": message["content"]}
    call = HERMES_CALL.replace("read_file", "fetch")
    body = {**ASKED, "tools": [fetch, TOOL], "messages": [USER, said, loaded]}
    _, message = await answer(gateway, prompts, call, body)
    assert gateway.runs.last.order.token_ids.startswith(held)
    assert message["content"][0]["name"] == "fetch"
    count = {name: value for name, value in body.items() if name != "max_tokens"}
    _, counted = await gateway.post(count, COUNT)
    assert counted["input_tokens"] == len(gateway.runs.last.order.token_ids) // 4
