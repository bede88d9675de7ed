"""What an agent's turn generated comes back as its own ids: the turn after a tool call misses nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.text.parsing import Reading
from gateway.text.prompts import Conversation, EncodedPrompt, Prompts
from gateway.text.tokenizer import unpack_token_ids
from gateway.text.written import WrittenCalls, restore, said_links

from .samples import CHATML, QWEN, TOOLS, bundle_of, byte_level_tokenizer

USER = {"role": "user", "content": "Read /tmp/a.txt"}
RESULT = {"role": "tool", "content": "text", "tool_call_id": "c1"}
WRITTEN = (
    'Let me look.\n<tool_call>\n{"name": "read_file", "arguments": {"b": [1, 2.5], "a": "ü x"}}\n</tool_call>'
)
SCOPE = b"agent"
HOW = Reading(calls="tagged")


@pytest.fixture
def qwen() -> Prompts:
    return Prompts(bundle_of(byte_level_tokenizer(), QWEN))


def encode(prompts: Prompts, messages: list[dict[str, Any]], scope: bytes = SCOPE) -> EncodedPrompt:
    conversation = Conversation(messages, TOOLS)
    return asyncio.run(prompts.encode(conversation, max_tokens=1 << 20, scope=scope))


def clumsy(prompts: Prompts, text: str) -> list[int]:
    """Ids that read `text` as sampling may pick them: another split than encoding would choose."""
    pieces = (
        text.replace("<tool_call>", "\0<tool_call>\0").replace("</tool_call>", "\0</tool_call>\0").split("\0")
    )
    token_ids: list[int] = []
    for piece in pieces:
        letters = [piece] if piece.startswith(("<tool", "</tool")) else list(piece)
        for letter in letters:
            token_ids += unpack_token_ids(asyncio.run(prompts.tokenizer.encode_raw(letter, max_tokens=99)))
    return token_ids


def generated(prompts: Prompts, prompt: EncodedPrompt, text: str, scope: bytes = SCOPE) -> list[int]:
    """The model answers the prompt; what its cache holds afterwards."""
    token_ids = clumsy(prompts, text)
    end = prompts.tokenizer.control.hard["<|im_end|>"]
    asyncio.run(prompts.learn(prompt.place, [*token_ids, end], text, scope=scope))
    return [*unpack_token_ids(prompt.token_ids), *token_ids, end]


def called(
    arguments: dict[str, Any] | str, content: str | None = "Let me look.", **more: Any
) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def extends(prompt: EncodedPrompt, kept: Sequence[int]) -> bool:
    return list(unpack_token_ids(prompt.token_ids))[: len(kept)] == list(kept)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": WRITTEN},
        called({"b": [1, 2.5], "a": "ü x"}),
        called({"a": "ü x", "b": [1, 2.5]}),
        called({"a": "ü x", "b": [1, 2.5]}, content="Let me look.\n"),
    ],
    ids=["as text", "as calls", "keys in another order", "blank end"],
)
def test_the_turn_after_a_tool_call_misses_nothing(qwen: Prompts, message: dict[str, Any]) -> None:
    kept = generated(qwen, encode(qwen, [USER]), WRITTEN)
    following = encode(qwen, [USER, message, RESULT])
    assert extends(following, kept)
    text = qwen.tokenizer.decode(list(unpack_token_ids(following.token_ids)))
    assert WRITTEN + "<|im_end|>" in text


@pytest.mark.parametrize(
    "message",
    [
        called({"a": "ü x", "b": [1, 2]}),
        called({"a": "ü x", "b": [1, 2.5], "c": None}),
        called({"a": "ü x", "b": [1, 2.5]}, content="I looked."),
        called({"a": "ü x", "b": [1, 2.5]}, content=None),
        called({"a": "ü x", "b": [1, 2.5]}, reasoning_content="hm"),
        called("not an object"),
    ],
    ids=["value", "further key", "words", "no words", "reasoning", "text"],
)
def test_calls_that_say_something_else_are_encoded_as_they_say(
    qwen: Prompts, message: dict[str, Any]
) -> None:
    usual = encode(qwen, [USER, message, RESULT]).token_ids
    generated(qwen, encode(qwen, [USER]), WRITTEN)
    assert encode(qwen, [USER, message, RESULT]).token_ids == usual


def test_another_agents_calls_are_encoded_as_they_say(qwen: Prompts) -> None:
    message = called({"a": "ü x", "b": [1, 2.5]})
    usual = encode(qwen, [USER, message], b"other").token_ids
    generated(qwen, encode(qwen, [USER]), WRITTEN)
    assert encode(qwen, [USER, message], b"other").token_ids == usual


def test_a_template_that_drops_what_was_written_gets_the_callers_message() -> None:
    template = CHATML.replace("message['content']", "message['content'] | replace('look', 'see')")
    prompts = Prompts(bundle_of(byte_level_tokenizer(), template))
    message = called({"a": "ü x", "b": [1, 2.5]})
    usual = encode(prompts, [USER, message]).token_ids
    generated(prompts, encode(prompts, [USER]), WRITTEN)
    assert encode(prompts, [USER, message]).token_ids == usual


def test_each_of_several_equal_answers_comes_back_with_its_own_ids(qwen: Prompts) -> None:
    """A later "OK" in other tokens must not rewrite an earlier one: the whole cache would be missed."""
    messages, kept = [USER], list[int]()
    end = qwen.tokenizer.control.hard["<|im_end|>"]
    usual = list(unpack_token_ids(asyncio.run(qwen.tokenizer.encode_raw("again fox", max_tokens=99))))
    for answer in (clumsy(qwen, "again fox"), usual, clumsy(qwen, "again fox")):
        prompt = encode(qwen, messages)
        assert extends(prompt, kept)
        asyncio.run(qwen.learn(prompt.place, [*answer, end], "again fox", scope=SCOPE))
        kept = [*unpack_token_ids(prompt.token_ids), *answer, end]
        messages = [*messages, {"role": "assistant", "content": "again fox"}, USER]
    assert usual != clumsy(qwen, "again fox")
    assert extends(encode(qwen, messages), kept)


def test_five_rounds_of_calls_miss_nothing(qwen: Prompts) -> None:
    messages, kept = [USER], list[int]()
    for number in range(5):
        prompt = encode(qwen, messages)
        assert extends(prompt, kept)
        arguments = {"z": number, "a": "x"}
        call = json.dumps({"name": "read_file", "arguments": arguments})
        kept = generated(qwen, prompt, f"<tool_call>\n{call}\n</tool_call>")
        messages = [*messages, called(dict(sorted(arguments.items())), content=None), RESULT]


def test_a_template_that_looks_back_at_calls_gets_the_callers_message() -> None:
    """The answer alone would be as written, but the tool's result would lose its name."""
    template = CHATML.replace(
        "'<|im_start|>' + message['role']",
        "'<|im_start|>' + message['role'] + (' ' + messages[loop.index0 - 1].tool_calls[0].function.name"
        " if not loop.first and messages[loop.index0 - 1].tool_calls else '')",
    )
    prompts = Prompts(bundle_of(byte_level_tokenizer(), template))
    messages = [USER, called({"a": "ü x", "b": [1, 2.5]}), RESULT]
    usual = encode(prompts, messages).token_ids
    assert "tool read_file" in prompts.tokenizer.decode(list(unpack_token_ids(usual)))
    generated(prompts, encode(prompts, [USER]), WRITTEN)
    assert encode(prompts, messages).token_ids == usual


def test_memory_of_calls_is_bounded() -> None:
    written = WrittenCalls(max_chars=10 * len("p" + WRITTEN))
    for number in range(1000, 1100):
        written.learn("p", WRITTEN.replace("2.5", str(number)), HOW, scope=SCOPE)
        written.learn("p", WRITTEN.replace("2.5", str(number)), HOW, scope=SCOPE)
        oldest = [called({"b": [1, 1000], "a": "ü x"})]
        assert written.remembered(oldest, said_links(oldest), scope=SCOPE)  # used, so not forgotten
    assert len(written) == 9
    old = [called({"b": [1, 1050], "a": "ü x"})]
    assert not written.remembered(old, said_links(old), scope=SCOPE)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        WRITTEN + " and words",
        WRITTEN + "<tool_call>",
        "<tool_call>{broken}</tool_call>",
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {',
        '<tool_call>{"a":' * 3000,
        "<tool_call>{" * 5461,
        "<tool_call>{}" + "\n" * 60_000,
        "<tool_call>{}\n" * 4000 + "x",
    ],
)
def test_what_is_not_calls_to_its_end_is_left_alone_at_once(text: str) -> None:
    written = WrittenCalls()
    started = time.process_time()
    written.learn("p", text, HOW, scope=SCOPE)
    assert time.process_time() - started < 0.5
    assert len(written) == 0


def test_a_call_may_hold_the_mark_that_ends_calls() -> None:
    text = '<tool_call>{"name": "read_file", "arguments": {"a": "{}</tool_call>"}}</tool_call>'
    written = WrittenCalls()
    written.learn("p", text, HOW, scope=SCOPE)
    messages = [called({"a": "{}</tool_call>"}, content=None)]
    restored = restore(messages, written.remembered(messages, said_links(messages), scope=SCOPE))
    assert restored is not None and restored.messages[0]["content"] == text


ONE_WAY = '<tool_call>\n{"name": "poll", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OTHER_WAY = '<tool_call>\n{"name": "poll", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "texts",
    [
        (ONE_WAY, OTHER_WAY, ONE_WAY),
        (f"<think>\nfirst\n</think>\n\n{ONE_WAY}", f"<think>\nother\n</think>\n\n{ONE_WAY}", OTHER_WAY),
    ],
    ids=["keys in another order", "another thought"],
)
def test_each_of_several_equal_calls_comes_back_as_it_was_written(
    qwen: Prompts, texts: Sequence[str]
) -> None:
    """An agent that asks the same again must not rewrite what it asked before."""
    call = {"id": "c1", "type": "function", "function": {"name": "poll", "arguments": {"a": 1, "b": 2}}}
    messages: list[dict[str, Any]] = [USER]
    kept = list[int]()
    for text in texts:
        prompt = encode(qwen, messages)
        assert extends(prompt, kept)
        kept = generated(qwen, prompt, text)
        messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]
    assert extends(encode(qwen, messages), kept)
