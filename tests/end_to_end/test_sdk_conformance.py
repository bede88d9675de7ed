"""The official clients of OpenAI and Anthropic, sync and async, against real processes and the default model.

The model calls no tool of its own accord: a demanded call or a schema makes it. What a test asks, it asks of
both clients at once, as an orchestrator does. Slow: some 300 tokens at the model's pace on a CPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from workers.fetch import cache_dir, fetch_default_model

from .sdk_calls import Clients, both, call, events, streamed
from .served import Client, Served

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.timeout(300)]


class Weather(pydantic.BaseModel):
    """What a tool takes, and an answer is held to."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]


SCHEMA = Weather.model_json_schema()
WORDS = "What is the weather in Rome?"
USER: Any = {"role": "user", "content": WORDS}
LIMIT, CALL_LIMIT = 6, 64
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": LIMIT, "temperature": 0}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
CHAT_CALL: dict[str, Any] = {
    **CHAT,
    "max_tokens": CALL_LIMIT,
    "tools": CHAT_TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
RESPONSE: dict[str, Any] = {"input": WORDS, "max_output_tokens": LIMIT, "temperature": 0}
RESPONSE_CALL: dict[str, Any] = {
    **RESPONSE,
    "max_output_tokens": CALL_LIMIT,
    "tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
GREEDY = {"temperature": 0}  # Anthropic's client has no word for it any more
MESSAGE: dict[str, Any] = {
    "model": "claude-any",
    "messages": [USER],
    "max_tokens": LIMIT,
    "extra_body": GREEDY,
}
MESSAGE_TOOLS: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
MESSAGE_CALL: dict[str, Any] = {
    **MESSAGE,
    "max_tokens": CALL_LIMIT,
    "tools": MESSAGE_TOOLS,
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = fetch_default_model(cache_dir(os.environ))
    served = Served(tmp_path_factory.mktemp("clients") / "home", folder, "--context", "2048")
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


@pytest.fixture
async def gpt(served: Served) -> AsyncIterator[Clients]:
    """OpenAI's."""
    told: Any = {"base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**told) as sync:
        async with openai.AsyncOpenAI(**told) as other:
            yield sync, other


@pytest.fixture
async def claude(served: Served) -> AsyncIterator[Clients]:
    """Anthropic's."""
    told: Any = {"base_url": served.url, "api_key": "none", "max_retries": 0}
    with anthropic.Anthropic(**told) as sync:
        async with anthropic.AsyncAnthropic(**told) as other:
            yield sync, other


@pytest.fixture
async def model(gpt: Clients) -> str:
    one, other = await both(call, gpt, "models.list")
    assert [found.id for found in one.data] == [found.id for found in other.data]
    return str(one.data[0].id)


async def test_a_chat_is_the_same_whole_and_streamed(gpt: Clients, model: str) -> None:
    asked = {**CHAT, "model": model}
    create = "chat.completions.create"
    wholes, streams = await asyncio.gather(
        both(call, gpt, create, **asked),
        both(events, gpt, create, **asked, stream_options={"include_usage": True}),
    )
    text = wholes[0].choices[0].message.content
    assert text
    for whole in wholes:
        assert whole.choices[0].message.content == text and whole.model == model
        assert whole.usage.completion_tokens <= LIMIT
    for *told, last in streams:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == text
        finishes = [chunk.choices[0].finish_reason for chunk in told]
        assert finishes[-1] == wholes[0].choices[0].finish_reason and not any(finishes[:-1])
        assert not last.choices and last.usage.total_tokens == wholes[0].usage.total_tokens
        assert {chunk.id for chunk in told} == {last.id}


async def test_a_text_is_the_same_whole_and_streamed(gpt: Clients, model: str) -> None:
    asked = {"model": model, "prompt": "Once upon a", "max_tokens": LIMIT, "temperature": 0}
    wholes, streams = await asyncio.gather(
        both(call, gpt, "completions.create", **asked), both(events, gpt, "completions.create", **asked)
    )
    texts = [whole.choices[0].text for whole in wholes]
    texts += ["".join(chunk.choices[0].text for chunk in told) for told in streams]
    assert texts[0] and texts == texts[:1] * 4


async def test_a_chats_demanded_call_is_the_same_whole_and_streamed(gpt: Clients, model: str) -> None:
    asked = {**CHAT_CALL, "model": model}
    wholes, finals = await asyncio.gather(
        both(call, gpt, "chat.completions.create", **asked),
        both(streamed, gpt, "chat.completions.stream", "get_final_completion", **asked),
    )
    made = [answer.choices[0].message.tool_calls for answer in (*wholes, *finals)]
    assert {answer.choices[0].finish_reason for answer in (*wholes, *finals)} == {"tool_calls"}
    assert [(one.type, one.function.name) for (one,) in made] == [("function", "get_weather")] * 4
    (arguments,) = {one.function.arguments for (one,) in made}
    assert Weather.model_validate_json(arguments)
    assert len({one.id for (one,) in made}) == 4
    result = {"role": "tool", "tool_call_id": made[0][0].id, "content": "Sunny."}
    history = [USER, wholes[0].choices[0].message.model_dump(exclude_none=True), result]
    further = {**CHAT, "model": model, "messages": history, "tools": CHAT_TOOLS, "tool_choice": "none"}
    for answer in await both(call, gpt, "chat.completions.create", **further):
        assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


async def test_a_chats_answer_is_parsed_whole_and_streamed(gpt: Clients, model: str) -> None:
    asked = {**CHAT, "model": model, "max_tokens": CALL_LIMIT, "response_format": Weather}
    wholes, finals = await asyncio.gather(
        both(call, gpt, "chat.completions.parse", **asked),
        both(streamed, gpt, "chat.completions.stream", "get_final_completion", **asked),
    )
    parsed = [answer.choices[0].message.parsed for answer in (*wholes, *finals)]
    assert isinstance(parsed[0], Weather) and parsed == parsed[:1] * 4


async def test_a_response_is_the_same_whole_streamed_and_kept(gpt: Clients, model: str) -> None:
    asked = {**RESPONSE, "model": model}
    wholes, streams = await asyncio.gather(
        both(call, gpt, "responses.create", **asked), both(events, gpt, "responses.create", **asked)
    )
    text = wholes[0].output_text
    assert text and wholes[1].output_text == text
    for told in streams:
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert [told[0].type, told[-1].type] == ["response.created", f"response.{wholes[0].status}"]
        assert text == "".join(event.delta for event in told if event.type == "response.output_text.delta")
        assert told[-1].response.output_text == text
    for client, whole in zip(gpt, wholes, strict=True):
        assert await call(client, "responses.retrieve", whole.id) == whole
        await call(client, "responses.delete", whole.id)
        with pytest.raises(openai.NotFoundError):
            await call(client, "responses.retrieve", whole.id)


async def test_a_responses_demanded_call_is_made_and_gone_on_from(gpt: Clients, model: str) -> None:
    asked = {**RESPONSE_CALL, "model": model}
    wholes, finals = await asyncio.gather(
        both(call, gpt, "responses.create", **asked),
        both(streamed, gpt, "responses.stream", "get_final_response", **asked),
    )
    made = [answer.output for answer in (*wholes, *finals)]
    assert [(one.type, one.name) for (one,) in made] == [("function_call", "get_weather")] * 4
    (arguments,) = {one.arguments for (one,) in made}
    assert Weather.model_validate_json(arguments)
    further = {
        "model": model,
        "input": [{"type": "function_call_output", "call_id": made[0][0].call_id, "output": "Sunny."}],
        "previous_response_id": wholes[0].id,
        "max_output_tokens": 16,  # with the usual temperature, but no less than OpenAI's client takes
    }
    for answer in await both(call, gpt, "responses.create", **further):
        assert answer.previous_response_id == wholes[0].id and answer.status in ("completed", "incomplete")


async def test_a_responses_answer_is_parsed_whole_and_streamed(gpt: Clients, model: str) -> None:
    asked = {**RESPONSE, "model": model, "max_output_tokens": CALL_LIMIT, "text_format": Weather}
    wholes, finals = await asyncio.gather(
        both(call, gpt, "responses.parse", **asked),
        both(streamed, gpt, "responses.stream", "get_final_response", **asked),
    )
    parsed = [answer.output_parsed for answer in (*wholes, *finals)]
    assert isinstance(parsed[0], Weather) and parsed == parsed[:1] * 4


async def test_openais_errors_are_typed_before_a_stream_too(gpt: Clients, model: str) -> None:
    long = {**CHAT, "model": model, "messages": [{"role": "user", "content": "word " * 3000}]}
    for client in gpt:
        for method, asked in (("chat.completions.create", CHAT), ("responses.create", RESPONSE)):
            for ask in (call, events):
                with pytest.raises(openai.NotFoundError) as gone:
                    await ask(client, method, **{**asked, "model": "gone"})
                assert gone.value.code == "model_not_found" and gone.value.request_id
            with pytest.raises(openai.BadRequestError) as wrong:
                await call(client, method, **{**asked, "model": model, "top_p": 7})
            assert (wrong.value.param, wrong.value.type) == ("top_p", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as over:
            await call(client, "chat.completions.create", **long)
        assert over.value.code == "context_length_exceeded"
        for method in ("responses.retrieve", "models.retrieve"):
            with pytest.raises(openai.NotFoundError):
                await call(client, method, "gone")


async def test_a_message_is_the_same_whole_streamed_and_counted(claude: Clients) -> None:
    asked = {**MESSAGE, "system": "Be brief."}
    counted = {name: asked[name] for name in ("model", "messages", "system")}
    wholes, finals, streams, counts = await asyncio.gather(
        both(call, claude, "messages.create", **asked),
        both(streamed, claude, "messages.stream", "get_final_message", **asked),
        both(events, claude, "messages.create", **asked),
        both(call, claude, "messages.count_tokens", **counted),
    )
    text = wholes[0].content[0].text
    assert text and counts[0] == counts[1]
    for answer in (*wholes, *finals):
        (block,), usage = answer.content, answer.usage
        assert (block.type, block.text, answer.stop_reason) == ("text", text, wholes[0].stop_reason)
        cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert usage.input_tokens + cached == counts[0].input_tokens > 0
    for told in streams:
        assert text == "".join(event.delta.text for event in told if event.type == "content_block_delta")
        assert [told[0].type, told[-1].type] == ["message_start", "message_stop"]
    for found in await both(call, claude, "models.retrieve", wholes[0].model):
        assert (found.id, found.type) == (wholes[0].model, "model")


async def test_a_demanded_use_of_a_tool_is_the_same_whole_and_streamed(claude: Clients) -> None:
    wholes, finals = await asyncio.gather(
        both(call, claude, "messages.create", **MESSAGE_CALL),
        both(streamed, claude, "messages.stream", "get_final_message", **MESSAGE_CALL),
    )
    made = [answer.content for answer in (*wholes, *finals)]
    assert {answer.stop_reason for answer in (*wholes, *finals)} == {"tool_use"}
    assert [(one.type, one.name) for (one,) in made] == [("tool_use", "get_weather")] * 4
    inputs = [one.input for (one,) in made]
    assert Weather.model_validate(inputs[0]) and inputs == inputs[:1] * 4
    assert len({one.id for (one,) in made}) == 4
    result = {"type": "tool_result", "tool_use_id": made[0][0].id, "content": "Sunny."}
    history = [USER, wholes[0].to_param(), {"role": "user", "content": [result]}]
    further = {**MESSAGE, "messages": history, "tools": MESSAGE_TOOLS}
    for answer in await both(call, claude, "messages.create", **further):
        assert answer.role == "assistant" and answer.stop_reason in ("end_turn", "max_tokens")


async def test_a_messages_answer_is_parsed_whole_and_streamed(claude: Clients) -> None:
    asked = {**MESSAGE, "max_tokens": CALL_LIMIT, "output_format": Weather}
    wholes, finals = await asyncio.gather(
        both(call, claude, "messages.parse", **asked),
        both(streamed, claude, "messages.stream", "get_final_message", **asked),
    )
    parsed = [answer.parsed_output for answer in (*wholes, *finals)]
    assert isinstance(parsed[0], Weather) and parsed == parsed[:1] * 4


async def test_anthropics_errors_are_typed_before_a_stream_too(claude: Clients) -> None:
    wrong: dict[str, Any] = {
        "temperature": {"extra_body": {"temperature": 7}},
        "max_tokens": {"max_tokens": -1},
    }
    for client in claude:
        for ask in (call, events):
            with pytest.raises(anthropic.NotFoundError) as gone:
                await ask(client, "messages.create", **{**MESSAGE, "model": "gone"})
            assert gone.value.type == "not_found_error" and gone.value.request_id
        for name, fields in wrong.items():
            with pytest.raises(anthropic.BadRequestError) as bad:
                await call(client, "messages.create", **{**MESSAGE, **fields})
            assert bad.value.type == "invalid_request_error" and name in str(bad.value)
        with pytest.raises(anthropic.NotFoundError):
            await call(client, "models.retrieve", "gone")


async def test_nothing_is_left_of_what_was_answered(served: Served) -> None:
    async with Client(served.url) as client:
        await client.until_idle()
