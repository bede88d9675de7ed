"""OpenAI's own client on the Responses API: async and sync, streamed and not, tools, schemas, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from gateway.store.store import store_in
from tests.conftest import ValkeyServer
from workers.messages import Failed, Tokens

from .bus_fixture import connected
from .fake_runs import words
from .http_gateway import Gateway, Start
from .responses_api import ARGUMENTS, CALL, TOOL
from .samples import QWEN
from .test_responses import CUSTOM, NAMESPACE
from .test_tool_calls import serve

MODEL = "tiny"
THOUGHT = "<think>\nHm.\n</think>\n\n"


class Answer(BaseModel):
    number: int
    words: list[str]


@pytest.fixture
async def served(start: Start, valkey: ValkeyServer) -> AsyncIterator[Gateway]:
    async with connected(valkey.url) as bus:
        gateway = await start(store=store_in(bus))
        serve(gateway, QWEN)
        yield gateway


@pytest.fixture
async def client(served: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_create_and_its_text(served: Gateway, client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    assert (response.status, response.output_text) == ("completed", "Hello")
    assert response.instructions == "Be brief." and response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + 2
    again = await client.responses.retrieve(response.id)
    assert again == response


async def test_the_sync_client_does_the_same(served: Gateway) -> None:
    def work() -> list[Any]:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(model=MODEL, input="Hi")
            streamed = list(client.responses.create(model=MODEL, input="Hi", stream=True))
            with client.responses.stream(model=MODEL, input="Hi") as stream:
                final = stream.get_final_response()
            items = list(client.responses.input_items.list(whole.id))
            return [whole.output_text, streamed[-1].type, final.output_text, len(items)]

    assert await asyncio.to_thread(work) == ["Hello", "response.completed", "Hello", 1]


async def test_raw_events_have_the_types_of_the_client(served: Gateway, client: openai.AsyncOpenAI) -> None:
    served.runs.script = words(THOUGHT, "Look.\n", CALL)
    tools: Any = [TOOL]
    stream = await client.responses.create(model=MODEL, input="Hi", tools=tools, stream=True)
    events = [event async for event in stream]
    names = {type(event).__name__ for event in events}
    assert names == {
        "ResponseCreatedEvent",
        "ResponseInProgressEvent",
        "ResponseOutputItemAddedEvent",
        "ResponseContentPartAddedEvent",
        "ResponseReasoningTextDeltaEvent",
        "ResponseReasoningTextDoneEvent",
        "ResponseContentPartDoneEvent",
        "ResponseOutputItemDoneEvent",
        "ResponseTextDeltaEvent",
        "ResponseTextDoneEvent",
        "ResponseFunctionCallArgumentsDeltaEvent",
        "ResponseFunctionCallArgumentsDoneEvent",
        "ResponseCompletedEvent",
    }
    for event in events:  # strictly: every field there and of its type
        type(event).model_validate(event.model_dump(by_alias=True, exclude_unset=True), strict=True)


async def test_the_stream_helper_adds_up(served: Gateway, client: openai.AsyncOpenAI) -> None:
    served.runs.script = words(*f"{THOUGHT}Look.\n{CALL}\n{CALL}")
    tools: Any = [TOOL]
    reasoning: Any = {"summary": "auto"}
    async with client.responses.stream(
        model=MODEL, input="Hi", tools=tools, reasoning=reasoning, store=False
    ) as stream:
        texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert texts[-1].strip() == "Look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[2].type == "function_call" and final.output[2].arguments == ARGUMENTS


async def test_a_loop_over_a_tool(served: Gateway, client: openai.AsyncOpenAI) -> None:
    served.runs.script = words(f"{THOUGHT}Look.\n{CALL}")
    conversation: Any = [{"role": "user", "content": "Read it"}]
    tools: Any = [TOOL]
    for _ in range(2):
        response = await client.responses.create(model=MODEL, input=conversation, tools=tools, store=False)
        conversation += [item.model_dump(exclude_unset=True) for item in response.output]
        for item in response.output:
            if item.type == "function_call":
                output = {"type": "function_call_output", "call_id": item.call_id, "output": "text"}
                conversation.append(output)
        served.runs.script = words("It says text.")
    assert response.output_text == "It says text."


async def test_a_conversation_goes_on_by_id(served: Gateway, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="Hi")
    second = await client.responses.create(model=MODEL, input="Ho", previous_response_id=first.id)
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
    assert second.previous_response_id == first.id and [item.type for item in items] == ["message"]


async def test_namespace_and_custom_tools(served: Gateway, client: openai.AsyncOpenAI) -> None:
    patch = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "a\\n"}}\n</tool_call>'
    served.runs.script = words(f"{CALL.replace('read_file', 'multi_agent_v1.spawn_agent')}\n{patch}")
    tools: Any = [NAMESPACE, CUSTOM]
    async with client.responses.stream(model=MODEL, input="Hi", tools=tools) as stream:
        final = await stream.get_final_response()
    function, custom = final.output
    assert function.type == "function_call" and (function.namespace, function.name) == (
        "multi_agent_v1",
        "spawn_agent",
    )
    assert custom.type == "custom_tool_call" and (custom.name, custom.input) == ("apply_patch", "a\n")


async def test_structured_output_is_parsed(served: Gateway, client: openai.AsyncOpenAI) -> None:
    served.runs.script = words('{"number": 7, ', '"words": ["a"]}')
    response = await client.responses.parse(model=MODEL, input="Hi", text_format=Answer)
    assert response.output_parsed == Answer(number=7, words=["a"])
    async with client.responses.stream(model=MODEL, input="Hi", text_format=Answer) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Answer(number=7, words=["a"])


async def test_a_background_response_is_polled_resumed_cancelled_and_deleted(
    served: Gateway, client: openai.AsyncOpenAI
) -> None:
    served.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text="Hel"), 60.0]
    queued = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert (queued.status, queued.background) == ("queued", True)
    assert (await client.responses.retrieve(queued.id)).status == "in_progress"
    cancelled = await client.responses.cancel(queued.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    stream = await client.responses.retrieve(queued.id, stream=True, starting_after=1)
    assert [event.type async for event in stream][-1] == "response.failed"
    await client.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(queued.id)


async def test_keep_alives_disturb_no_client(start: Start) -> None:
    gateway = await start(keepalive_seconds=0.03)
    serve(gateway, QWEN)
    gateway.runs.script = lambda order: [0.1, *words("Hel", "lo")(order)]
    async with (
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model=MODEL, input="Hi", store=False) as stream,
    ):
        names = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "keepalive" in names and final.output_text == "Hello"


async def test_errors_are_the_clients_own(served: Gateway, client: openai.AsyncOpenAI) -> None:
    bad: Any = 7
    with pytest.raises(openai.BadRequestError) as invalid:
        await client.responses.create(model=MODEL, input=bad)
    assert (invalid.value.param, invalid.value.type) == ("input", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as model:
        await client.responses.create(model="absent", input="Hi")
    assert model.value.code == "model_not_found" and model.value.request_id
    with pytest.raises(openai.BadRequestError) as previous:
        await client.responses.create(model=MODEL, input="Hi", previous_response_id=f"resp_{'0' * 32}")
    assert previous.value.code == "previous_response_not_found"
    served.runs.is_full = True
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model=MODEL, input="Hi")
    served.runs.is_full = False
    served.runs.script = lambda order: [Failed(error="engine_lost", message="Gone.", retryable=True)]
    with pytest.raises(openai.InternalServerError) as lost:
        await client.responses.create(model=MODEL, input="Hi")
    assert lost.value.status_code == 503
    events = [event async for event in await client.responses.create(model=MODEL, input="Hi", stream=True)]
    assert events[-1].type == "response.failed" and events[-1].response.error is not None
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as foreign:
        with pytest.raises(openai.AuthenticationError):
            headers = {"X-Forwarded-For": "203.0.113.7"}
            await foreign.responses.create(model=MODEL, input="Hi", extra_headers=headers)
