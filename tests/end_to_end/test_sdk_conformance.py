"""The official clients of OpenAI and Anthropic against real processes with the default model.

Slow: each client has turns of its own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from workers.fetch import cache_dir, fetch_default_model

from .served import Served

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow, pytest.mark.timeout(300)]

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
USER: Any = {"role": "user", "content": "What is the weather in Rome?"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 8, "seed": 1}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
TOOL_CALL: dict[str, Any] = {
    **CHAT,
    "max_tokens": 120,
    "tools": CHAT_TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
RESPONSE: dict[str, Any] = {"input": "What is the weather in Rome?", "max_output_tokens": 8}
RESPONSE_TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}]
MESSAGE: dict[str, Any] = {"messages": [USER], "max_tokens": 8}
MESSAGE_TOOLS: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
MESSAGE_CALL: dict[str, Any] = {
    **MESSAGE,
    "max_tokens": 120,
    "tools": MESSAGE_TOOLS,
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


class Weather(pydantic.BaseModel):
    """What the model is asked to answer with."""

    city: str = pydantic.Field(max_length=12)
    days: int = pydantic.Field(ge=0, le=9)


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
def openai_sync(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def openai_async(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_sync(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_async(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(openai_sync: openai.OpenAI) -> str:
    (found,) = openai_sync.models.list().data
    return found.id


# OpenAI, chat


def test_chat_is_answered_and_streamed_the_same(openai_sync: openai.OpenAI, model: str) -> None:
    asked: Any = {**CHAT, "model": model, "temperature": 0}
    whole = openai_sync.chat.completions.create(**asked)
    assert whole.usage is not None and whole.usage.completion_tokens <= 8
    chunks = list(
        openai_sync.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in finishes if reason] == [whole.choices[0].finish_reason]


async def test_chat_is_answered_and_streamed_to_the_async_client(
    openai_async: openai.AsyncOpenAI, model: str
) -> None:
    asked: Any = {**CHAT, "model": model, "temperature": 0}
    whole = await openai_async.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await openai_async.chat.completions.create(**asked, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_demanded_call_is_made(openai_sync: openai.OpenAI, model: str) -> None:
    asked: Any = {**TOOL_CALL, "model": model}
    choice = openai_sync.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert Weather.model_validate_json(call.function.arguments)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    history: Any = [USER, choice.message.model_dump(exclude_none=True), result]
    further: Any = {**CHAT, "model": model, "messages": history, "tools": CHAT_TOOLS, "tool_choice": "none"}
    assert openai_sync.chat.completions.create(**further).choices[0].message.role == "assistant"


async def test_a_demanded_call_is_streamed(openai_async: openai.AsyncOpenAI, model: str) -> None:
    asked: Any = {**TOOL_CALL, "model": model}
    async with openai_async.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert final.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather" and Weather.model_validate_json(call.function.arguments)


def test_a_chats_answer_is_parsed(openai_sync: openai.OpenAI, model: str) -> None:
    asked: Any = {**CHAT, "model": model, "max_tokens": 120}
    parsed = openai_sync.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


async def test_a_chats_answer_is_parsed_by_the_async_client(
    openai_async: openai.AsyncOpenAI, model: str
) -> None:
    asked: Any = {**CHAT, "model": model, "max_tokens": 120}
    parsed = await openai_async.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


# OpenAI, responses


def test_a_response_is_created_and_streamed(openai_sync: openai.OpenAI, model: str) -> None:
    asked: Any = {**RESPONSE, "model": model, "temperature": 0}
    whole = openai_sync.responses.create(**asked)
    assert whole.output_text and whole.usage is not None
    with openai_sync.responses.stream(**asked) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert openai_sync.responses.retrieve(whole.id).output_text == whole.output_text


async def test_a_response_is_created_streamed_and_parsed_by_the_async_client(
    openai_async: openai.AsyncOpenAI, model: str
) -> None:
    asked: Any = {**RESPONSE, "model": model, "temperature": 0}
    whole = await openai_async.responses.create(**asked)
    raw = [event async for event in await openai_async.responses.create(**asked, stream=True)]
    text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert text == whole.output_text and raw[0].type == "response.created"
    longer: Any = {**asked, "max_output_tokens": 120}
    parsed = await openai_async.responses.parse(**longer, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)


def test_a_response_is_parsed_and_calls(openai_sync: openai.OpenAI, model: str) -> None:
    asked: Any = {**RESPONSE, "model": model, "max_output_tokens": 120}
    assert isinstance(openai_sync.responses.parse(**asked, text_format=Weather).output_parsed, Weather)
    called = openai_sync.responses.create(
        **asked, tools=RESPONSE_TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert Weather.model_validate_json(call.arguments)
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}]
    asked = {"model": model, "input": output, "previous_response_id": called.id, "max_output_tokens": 16}
    assert openai_sync.responses.create(**asked).status in ("completed", "incomplete")


# OpenAI, errors


def test_openais_errors_are_typed(openai_sync: openai.OpenAI, model: str) -> None:
    asked: Any = {**CHAT, "model": "gone"}
    with pytest.raises(openai.NotFoundError) as gone:
        openai_sync.chat.completions.create(**asked)
    assert gone.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        openai_sync.responses.retrieve("resp_gone")
    asked = {**CHAT, "model": model, "temperature": 7}
    with pytest.raises(openai.BadRequestError) as wrong:
        openai_sync.chat.completions.create(**asked)
    assert wrong.value.param == "temperature"


async def test_openais_errors_are_typed_for_the_async_client(
    openai_async: openai.AsyncOpenAI, model: str
) -> None:
    asked: Any = {**RESPONSE, "model": "gone"}
    with pytest.raises(openai.NotFoundError):
        await openai_async.responses.create(**asked, stream=True)
    asked = {**RESPONSE, "model": model, "top_p": 7}
    with pytest.raises(openai.BadRequestError) as wrong:
        await openai_async.responses.create(**asked)
    assert wrong.value.param == "top_p"


# Anthropic


def test_a_message_is_created_streamed_and_counted(anthropic_sync: anthropic.Anthropic, model: str) -> None:
    asked: Any = {**MESSAGE, "model": model, "extra_body": {"temperature": 0}}
    whole = anthropic_sync.messages.create(**asked)
    with anthropic_sync.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    (said,), (streamed,) = whole.content, final.content
    assert said.type == streamed.type == "text" and said.text == streamed.text != ""
    assert final.stop_reason == whole.stop_reason
    counted = anthropic_sync.messages.count_tokens(model=model, messages=[USER])
    usage = whole.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached > 0


async def test_a_message_is_created_and_streamed_to_the_async_client(
    anthropic_async: anthropic.AsyncAnthropic, model: str
) -> None:
    asked: Any = {**MESSAGE, "model": model, "extra_body": {"temperature": 0}}
    whole = await anthropic_async.messages.create(**asked)
    async with anthropic_async.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
    assert whole.content[0].type == "text" and whole.content[0].text == text
    counted = await anthropic_async.messages.count_tokens(model=model, messages=[USER])
    assert counted.input_tokens > 0


def test_a_tools_use_is_demanded(anthropic_sync: anthropic.Anthropic, model: str) -> None:
    asked: Any = {**MESSAGE_CALL, "model": model}
    message = anthropic_sync.messages.create(**asked)
    (use,) = message.content
    assert message.stop_reason == "tool_use" and use.type == "tool_use" and use.name == "get_weather"
    assert Weather.model_validate(use.input)
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}
    history: Any = [USER, message.to_param(), {"role": "user", "content": [result]}]
    asked = {**MESSAGE, "model": model, "messages": history, "tools": MESSAGE_TOOLS}
    assert anthropic_sync.messages.create(**asked).role == "assistant"


async def test_a_tools_use_is_streamed(anthropic_async: anthropic.AsyncAnthropic, model: str) -> None:
    asked: Any = {**MESSAGE_CALL, "model": model}
    async with anthropic_async.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    (use,) = final.content
    assert final.stop_reason == "tool_use" and use.type == "tool_use"
    assert Weather.model_validate(use.input)


def test_anthropics_errors_are_typed(anthropic_sync: anthropic.Anthropic, model: str) -> None:
    asked: Any = {**MESSAGE, "model": "gone"}
    with pytest.raises(anthropic.NotFoundError) as gone:
        anthropic_sync.messages.create(**asked)
    assert gone.value.type == "not_found_error"
    asked = {**MESSAGE, "model": model, "extra_body": {"temperature": 7}}
    with pytest.raises(anthropic.BadRequestError) as wrong:
        anthropic_sync.messages.create(**asked)
    assert wrong.value.type == "invalid_request_error" and "temperature" in str(wrong.value)


async def test_anthropics_errors_are_typed_for_the_async_client(
    anthropic_async: anthropic.AsyncAnthropic, model: str
) -> None:
    asked: Any = {**MESSAGE, "model": "gone"}
    with pytest.raises(anthropic.NotFoundError):
        await anthropic_async.messages.create(**asked, stream=True)
    asked = {**MESSAGE, "model": model, "max_tokens": -1}
    with pytest.raises(anthropic.BadRequestError):
        await anthropic_async.messages.create(**asked)
