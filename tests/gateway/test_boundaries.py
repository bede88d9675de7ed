"""Boundaries equal the longest common prefix of the token ids of renderings that differ only after them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.flow.router import common_prefix_tokens
from gateway.text.boundaries import PROBE, Frame, Frames, common_length
from gateway.text.prompts import Conversation, EncodedPrompt, Prompts
from gateway.text.tokenizer import unpack_token_ids

from .samples import (
    CHATML,
    LLAMA3,
    MISTRAL,
    QWEN,
    TOOLS,
    bundle_of,
    byte_level_tokenizer,
    metaspace_tokenizer,
)

SYSTEM = {"role": "system", "content": "You read files. Be <b>brief</b>."}
USER = {"role": "user", "content": "Read /tmp/a.txt"}
ANSWER = {"role": "assistant", "content": "It says 12345."}
AGAIN = {"role": "user", "content": "\nAgain"}
BY_SPAN = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN}


def prompts_of(template: str) -> Prompts:
    return Prompts(bundle_of(byte_level_tokenizer(), template))


def encode(prompts: Prompts, messages: list[dict[str, Any]], **more: Any) -> EncodedPrompt:
    return asyncio.run(prompts.encode(Conversation(messages, **more), max_tokens=1 << 20))


def least_common(prompts: Prompts, conversations: list[list[dict[str, Any]]], **more: Any) -> int:
    first, *others = [encode(prompts, messages, **more).token_ids for messages in conversations]
    return min(common_prefix_tokens(first, other) for other in others)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("system", [[SYSTEM], []], ids=["system", "none"])
@pytest.mark.parametrize("name", BY_SPAN)
def test_the_system_part_ends_where_prompts_of_other_users_part(
    name: str, system: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    prompts = prompts_of(BY_SPAN[name])
    others = [[*system, {"role": "user", "content": text}] for text in ("x", "\n", "漢字", "<|im_end|>")]
    common = least_common(prompts, others, tools=tools)
    for messages in ([*system, USER], [*system, USER, ANSWER, AGAIN]):
        prompt = encode(prompts, messages, tools=tools)
        ids = list(unpack_token_ids(prompt.token_ids))
        has_system = bool(system or tools or name != "qwen")  # the others write one of their own
        assert has_system == (prompt.system_tokens > 0)
        assert prompt.system_tokens <= common
        # Exact up to the words that open the next message ("user\n"): they may join the user's own.
        opening = prompts.tokenizer.decode(ids[prompt.system_tokens : common])
        assert prompts.tokenizer.control.hard_pattern.sub("", opening).strip() in ("", "user")


@pytest.mark.parametrize("name", BY_SPAN)
def test_the_turn_ends_where_the_prompt_without_a_generation_prompt_does(name: str) -> None:
    prompts = prompts_of(BY_SPAN[name])
    for messages in ([USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, AGAIN]):
        prompt = encode(prompts, messages)
        bare = encode(prompts, messages, variables={"add_generation_prompt": False})
        assert 4 * prompt.turn_tokens == len(bare.token_ids)
        assert prompt.token_ids.startswith(bare.token_ids)
        assert prompt.turn_tokens < len(prompt.token_ids) // 4
        assert bare.turn_tokens == 0


def test_a_turn_that_ends_with_a_tools_result_has_its_boundary_too() -> None:
    prompts = prompts_of(QWEN)
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": {"path": "a"}}}
    messages: list[dict[str, Any]] = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "text", "tool_call_id": "c1"},
    ]
    prompt = encode(prompts, messages, tools=TOOLS)
    bare = encode(prompts, messages, tools=TOOLS, variables={"add_generation_prompt": False})
    assert 4 * prompt.turn_tokens == len(bare.token_ids)


def test_a_generation_prompt_that_depends_on_variables_is_seen() -> None:
    prompts = prompts_of(QWEN)
    for variables in ({"enable_thinking": False}, {"enable_thinking": True}, {}):
        prompt = encode(prompts, [SYSTEM, USER], variables=variables)
        bare = encode(prompts, [SYSTEM, USER], variables={**variables, "add_generation_prompt": False})
        assert 4 * prompt.turn_tokens == len(bare.token_ids)


def test_a_template_without_a_generation_prompt_has_the_whole_prompt() -> None:
    assert encode(prompts_of(MISTRAL), [USER]).turn_tokens == 0


def test_a_system_text_inside_the_users_span_is_not_told() -> None:
    template = "<|im_start|>{% for message in messages %}{{ message['content'] }}\n{% endfor %}<|im_end|>"
    assert encode(prompts_of(template), [SYSTEM, USER]).system_tokens == 0


def test_a_generation_prompt_inside_a_span_is_not_told() -> None:
    template = (
        "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}Answer:{% endif %}"
    )
    prompt = encode(prompts_of(template), [USER])
    assert (prompt.system_tokens, prompt.turn_tokens) == (0, 0)


def test_a_template_that_refuses_the_probe_tells_nothing() -> None:
    template = (
        "{% for message in messages %}{% if '" + PROBE + "' in message['content'] %}"
        "{{ raise_exception('no') }}{% endif %}{{ message['content'] }}<|im_end|>{% endfor %}"
    )
    prompt = encode(prompts_of(template), [USER])
    assert (prompt.system_tokens, prompt.turn_tokens) == (0, 0)


def test_tokenizers_that_look_left_tell_nothing() -> None:
    prompts = Prompts(bundle_of(metaspace_tokenizer("first"), CHATML))
    prompt = encode(prompts, [SYSTEM, USER])
    assert (prompt.system_tokens, prompt.turn_tokens) == (0, 0)


def test_a_system_part_is_rendered_apart_once() -> None:
    num_rendered = 0

    class Counting(Prompts):
        def render(self, conversation: Conversation) -> Any:
            nonlocal num_rendered
            num_rendered += 1
            return super().render(conversation)

    prompts = Counting(bundle_of(byte_level_tokenizer(), QWEN))
    for number in range(10):
        encode(prompts, [SYSTEM, {"role": "user", "content": str(number)}], tools=TOOLS)
    assert num_rendered == 10 + 2


def test_frames_are_bounded() -> None:
    frames = Frames(max_frames=3)
    for number in range(10):
        frames.put(bytes([number]), Frame())
    assert [number for number in range(10) if frames.get(bytes([number])) is not None] == [7, 8, 9]
    assert Frame.of([b"a"] * 10_000, [b"a"] * 9_999) == Frame()
    assert common_length([b"a", b"b"], [b"a", b"c"]) == 1
    assert common_length([b"a"], [b"a", b"c"]) == 1
