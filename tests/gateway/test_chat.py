"""Chat and text completions: shapes of answers, and what reaches the engine."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest

from workers.messages import (
    RUN_END_ID,
    ChosenLogprob,
    Finished,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)

from .fake_runs import words
from .http_gateway import HELLO, TEXT, Gateway, chunks_of
from .samples import chatml_bundle


async def test_a_chat_answer_has_openais_shape(gateway: Gateway) -> None:
    status, body = await gateway.post({**HELLO, "model": "tiny"})
    assert status == 200
    assert body["id"].startswith("chatcmpl-") and len(body["id"]) == len("chatcmpl-") + 32
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello"},
        "logprobs": None,
        "finish_reason": "stop",
    }
    num_prompt = len(gateway.runs.last.order.token_ids) // 4
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 2,
        "total_tokens": num_prompt + 2,
        "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_has_one_role_one_finish_one_usage_and_done(gateway: Gateway) -> None:
    gateway.runs.script = words("Hel", "", "lo", reason="length")
    events = await gateway.stream({**HELLO, "stream_options": {"include_usage": True}})
    chunks = chunks_of(events)
    assert events[-1]["data"] == "[DONE]" and [e["data"] for e in events].count("[DONE]") == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert all(value is not None for delta in deltas for value in delta.values())
    finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert finishes[-1] == "length" and finishes[:-1] == [None] * (len(finishes) - 1)
    usages = [chunk for chunk in chunks if chunk["usage"] is not None]
    assert usages == [chunks[-1]] and usages[0]["choices"] == []
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
async def test_empty_stream_options_ask_for_nothing(gateway: Gateway, options: Any) -> None:
    events = await gateway.stream({**HELLO, "stream_options": options})
    assert events[-1]["data"] == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks_of(events))


async def test_only_the_last_sse_event_of_a_bus_event_has_the_id(gateway: Gateway) -> None:
    events = await gateway.stream({**HELLO, "stream_options": {"include_usage": True}})
    ids = [event["id"] for event in events]
    assert ids == ["0-1", "1-3", "1-4", None, None, RUN_END_ID]


@pytest.mark.parametrize("prompt", ["Once", ["Once"], [300, 301], [[300, 301]]])
async def test_completions_take_a_prompt_in_each_spelling(gateway: Gateway, prompt: Any) -> None:
    status, body = await gateway.post({"prompt": prompt}, TEXT)
    assert status == 200
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    events = await gateway.stream({"prompt": prompt}, TEXT)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks_of(events)) == "Hello"
    assert chunks_of(events)[-1]["choices"][0]["finish_reason"] == "stop"
    if isinstance(prompt, list) and prompt[0] != "Once":
        assert gateway.runs.last.order.token_ids == array("I", [300, 301]).tobytes()


def scored(*pieces: bytes) -> Any:
    def play(order: Any) -> list[Any]:
        chosen = [TokenLogprob(number, piece, -0.5) for number, piece in enumerate(pieces)]
        top = (TokenLogprob(9, b"x", -math.inf),)
        texts = ["" for _ in pieces[:-1]] + [b"".join(pieces).decode()]
        tokens = [
            Tokens(token_ids=b"", text=text, logprobs=(ChosenLogprob(token, top),))
            for token, text in zip(chosen, texts, strict=True)
        ]
        return [*tokens, Finished(reason="stop", usage=Usage(), timings=Timings())]

    return play


async def test_chat_logprobs_have_openais_shape(gateway: Gateway) -> None:
    gateway.runs.script = scored("🙂".encode()[:2], "🙂".encode()[2:])
    asked = {**HELLO, "logprobs": True, "top_logprobs": 1}
    _, body = await gateway.post(asked)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[240, 159], [153, 130]]
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"] == [{"token": "x", "logprob": -9999.0, "bytes": [120]}]
    streamed = [
        entry
        for chunk in chunks_of(await gateway.stream(asked))
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    assert gateway.runs.last.order.sampling.top_logprobs == 1


async def test_completion_logprobs_have_openais_shape(gateway: Gateway) -> None:
    gateway.runs.script = scored(b"ab", b"c")
    _, body = await gateway.post({"prompt": "x", "logprobs": 1}, TEXT)
    expected = {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"x": -9999.0}, {"x": -9999.0}],
        "text_offset": [0, 2],
    }
    assert body["choices"][0]["logprobs"] == expected
    chunks = chunks_of(await gateway.stream({"prompt": "x", "logprobs": 1}, TEXT))
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks if c["choices"][0]["logprobs"]]
    assert offsets == [[0], [2]]


# What reaches the engine


async def test_fields_reach_the_order(gateway: Gateway) -> None:
    sampling = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": -1, "seed": -1}
    status, _ = await gateway.post(
        {
            **HELLO,
            **sampling,
            "logit_bias": {"5": 2},
            "stop": "x",
            "stop_token_ids": [3],
            "max_completion_tokens": 9,
            "ignore_eos": True,
            "unknown_field": {"a": 1},
            "user": "someone",
        }
    )
    assert status == 200
    order = gateway.runs.last.order
    assert (order.stop, order.stop_token_ids, order.max_tokens, order.ignore_eos) == (("x",), (3,), 9, True)
    assert order.sampling.logit_bias == {5: 2.0}
    assert (order.sampling.temperature, order.sampling.top_k, order.sampling.seed) == (0.0, 7, 2**63 - 1)
    assert order.names.session == "someone"


async def test_null_is_the_default(gateway: Gateway) -> None:
    names = [
        *(
            "model",
            "stream",
            "stream_options",
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
        ),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "n", "user"),
        *("stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "tools", "chat_template_kwargs"),
    ]
    status, _ = await gateway.post({**HELLO, **dict.fromkeys(names)})
    assert status == 200
    order = gateway.runs.last.order
    assert order.max_tokens == 512 - len(order.token_ids) // 4
    assert (order.sampling.temperature, order.sampling.top_logprobs, order.stop) == (1.0, None, ())


async def test_max_tokens_is_capped_to_the_context(gateway: Gateway) -> None:
    for wanted in (10**6, 10**30):
        status, _ = await gateway.post({**HELLO, "max_tokens": wanted})
        assert status == 200
        order = gateway.runs.last.order
        assert order.max_tokens + len(order.token_ids) // 4 == 512


async def test_content_parts_are_joined_in_order(gateway: Gateway) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    await gateway.post({"messages": [{"role": "user", "content": parts}]})
    joined = gateway.runs.last.order.token_ids
    await gateway.post({"messages": [{"role": "user", "content": "abc"}]})
    assert gateway.runs.last.order.token_ids == joined


async def test_an_answer_comes_back_as_its_own_token_ids(gateway: Gateway) -> None:
    from gateway.text.prompts import Prompts

    tokenizer = Prompts(chatml_bundle()).tokenizer
    clumsy = array("I")
    for letter in "fox":
        clumsy.frombytes(await tokenizer.encode_raw(letter, max_tokens=9))
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    gateway.runs.script = lambda order: [
        Tokens(token_ids=clumsy.tobytes(), text="fox"),
        Finished(reason="stop", usage=usage, timings=Timings()),
    ]
    question = {"role": "user", "content": "q"}
    await gateway.stream({"messages": [question]})
    first = gateway.runs.last.order.token_ids
    await gateway.post({"messages": [question, {"role": "assistant", "content": "fox"}, question]})
    assert gateway.runs.last.order.token_ids.startswith(first + clumsy.tobytes())
    other = {
        "messages": [question, {"role": "assistant", "content": "fox"}, question],
        "user": "another agent",
    }
    await gateway.post(other)
    assert not gateway.runs.last.order.token_ids.startswith(first + clumsy.tobytes())
