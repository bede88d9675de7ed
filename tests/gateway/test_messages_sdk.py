"""Anthropic's own Python client against a gateway's socket: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import msgspec
import pydantic
import pytest
from anthropic import AsyncAnthropic

from gateway.errors import NoEngine
from workers.messages import Failed, Timings, Tokens, Usage

from .fake_runs import words
from .http_gateway import Gateway, Start
from .messages_api import CALL, INPUT, SCHEMA
from .samples import QWEN
from .test_tool_calls import serve

TEXT = f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}"
TOOLS: Any = [{"name": "read_file", "description": "Reads.", "input_schema": SCHEMA}]
ASKED: Any = {
    "model": "tiny",
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "Read /tmp/a.txt"}],
}
THINKING: Any = {"type": "adaptive"}


@pytest.fixture
async def qwen(gateway: Gateway) -> Gateway:
    serve(gateway, QWEN)
    return gateway


@pytest.fixture
async def client(qwen: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=qwen.url, api_key="none", max_retries=0) as client:
        yield client


class City(pydantic.BaseModel):
    """An answer with a shape."""

    name: str
    people: int


async def test_create_answers_with_a_message(qwen: Gateway, client: AsyncAnthropic) -> None:
    qwen.runs.script = words(TEXT)
    message = await client.messages.create(
        **ASKED, tools=TOOLS, thinking=THINKING, system="Be brief.", stop_sequences=["END"]
    )
    thought, said, use = message.content
    assert thought.type == "thinking" and thought.thinking == "Hm." and thought.signature
    assert said.type == "text" and said.text == "Let me look."
    assert use.type == "tool_use" and (use.name, use.input) == ("read_file", INPUT)
    assert (message.stop_reason, message.role, message.model) == ("tool_use", "assistant", "tiny")
    usage = message.usage
    assert usage.cache_read_input_tokens is not None and usage.cache_creation_input_tokens is not None
    num_inputs = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert num_inputs == len(qwen.runs.last.order.token_ids) // 4
    assert message._request_id


async def test_a_stream_of_events_ends_in_the_same_message(qwen: Gateway, client: AsyncAnthropic) -> None:
    qwen.runs.script = words(*TEXT)
    async with client.messages.stream(**ASKED, tools=TOOLS, thinking=THINKING) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "ping" not in kinds
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    qwen.runs.script = words(TEXT)
    whole = await client.messages.create(**ASKED, tools=TOOLS, thinking=THINKING)
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    use = final.content[-1]
    assert use.type == "tool_use" and use.input == INPUT
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    assert final.usage.output_tokens == len(TEXT)


async def test_text_alone_can_be_streamed(qwen: Gateway, client: AsyncAnthropic) -> None:
    qwen.runs.script = words("Once ", "upon ", "a time.")
    async with client.messages.stream(**ASKED) as stream:
        assert [text async for text in stream.text_stream] == ["Once ", "upon ", "a time."]
        assert await stream.get_final_text() == "Once upon a time."


async def in_thread(qwen: Gateway) -> tuple[Any, Any, Any, Any]:
    """The sync client's answers, got beside the event loop that serves them."""

    def call() -> tuple[Any, Any, Any, Any]:
        with anthropic.Anthropic(base_url=qwen.url, auth_token="none", max_retries=0) as client:
            whole = client.messages.create(**ASKED, tools=TOOLS, thinking=THINKING)
            with client.messages.stream(**ASKED, tools=TOOLS, thinking=THINKING) as stream:
                final = stream.get_final_message()
            events = [*client.messages.create(**ASKED, stream=True)]
            count = client.messages.count_tokens(model="tiny", messages=ASKED["messages"])
            return whole, final, events, count

    return await asyncio.to_thread(call)


async def test_the_sync_client_gets_what_the_async_one_gets(qwen: Gateway) -> None:
    qwen.runs.script = words(TEXT)
    whole, final, events, count = await in_thread(qwen)
    assert [block.type for block in whole.content] == [block.type for block in final.content]
    assert whole.content[-1].input == final.content[-1].input == INPUT
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    assert count.input_tokens == len(qwen.runs.last.order.token_ids) // 4


async def test_a_loop_of_tools_comes_to_its_end(qwen: Gateway, client: AsyncAnthropic) -> None:
    messages: list[Any] = [*ASKED["messages"]]
    qwen.runs.script = words(TEXT)
    for _ in range(3):
        message = await client.messages.create(**{**ASKED, "messages": messages}, tools=TOOLS)
        messages.append(message.to_param())
        uses = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason != "tool_use":
            break
        results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "text"} for use in uses]
        messages.append({"role": "user", "content": results})
        qwen.runs.script = words("It says text.")
    assert message.stop_reason == "end_turn" and len(messages) == 4


async def test_the_tool_runner_runs_tools(qwen: Gateway, client: AsyncAnthropic) -> None:
    @anthropic.beta_async_tool
    async def read_file(path: str, n: float) -> str:
        """Reads a file."""
        qwen.runs.script = words(f"It says {path} {n}.")
        return "text"

    qwen.runs.script = words(TEXT)
    runner = client.beta.messages.tool_runner(**ASKED, tools=[read_file])
    final = await runner.until_done()
    assert final.content[0].type == "text" and final.content[0].text == "It says ü </tool_call> 1.5."


async def test_an_answer_is_held_to_a_schema(qwen: Gateway, client: AsyncAnthropic) -> None:
    qwen.runs.script = words('{"name": "Ulm", "people": 129942}')
    message = await client.messages.parse(**ASKED, output_format=City)
    assert message.parsed_output == City(name="Ulm", people=129942)
    async with client.messages.stream(**ASKED, output_format=City) as stream:
        final = await stream.get_final_message()
    assert final.parsed_output == City(name="Ulm", people=129942)
    assert qwen.runs.last.order.grammar is not None


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "read_file"}], ids=["any", "tool"]
)
async def test_a_call_can_be_demanded(qwen: Gateway, client: AsyncAnthropic, choice: Any) -> None:
    qwen.runs.script = words(CALL)
    message = await client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
    assert message.stop_reason == "tool_use" and qwen.runs.last.order.grammar is not None


async def test_models_are_listed_and_found(client: AsyncAnthropic) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert (await client.models.retrieve("tiny")).display_name == "tiny"


async def test_a_model_that_is_not_there_is_told_in_the_words_of_whose_client_asks(
    qwen: Gateway, client: AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.models.retrieve("gone")
    body = caught.value.body
    assert isinstance(body, dict) and body["type"] == "error"
    assert body["error"]["type"] == "not_found_error" and "'gone'" in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id
    for path in ("/v1/models/gone", "/v1/chat/completions/gone"):
        _, told = await qwen.get(
            path, headers={} if "models" in path else {"anthropic-version": "2023-06-01"}
        )
        assert told["error"].keys() == {"message", "type", "param", "code"}


async def test_claudes_names_are_taken(client: AsyncAnthropic) -> None:
    message = await client.messages.create(**{**ASKED, "model": "claude-fable-9"})
    assert message.model == "tiny"


async def test_the_beta_road_is_the_same(qwen: Gateway, client: AsyncAnthropic) -> None:
    qwen.runs.script = words("Yes.")
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    message = await client.beta.messages.create(
        **ASKED, betas=["context-management-2025-06-27"], context_management=edits
    )
    assert message.content[0].type == "text" and message.content[0].text == "Yes."
    counted = await client.beta.messages.count_tokens(model="tiny", messages=ASKED["messages"])
    assert counted.input_tokens > 0


# Errors


async def test_errors_are_the_clients_own(qwen: Gateway, client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(**ASKED, extra_body={"temperature": 7})
    assert bad.value.type == "invalid_request_error" and "'temperature'" in str(bad.value.api_message)
    assert bad.value.request_id and bad.value.request_id == msgspec.to_builtins(bad.value.body)["request_id"]
    with pytest.raises(anthropic.NotFoundError) as gone:
        await client.messages.create(**{**ASKED, "model": "gone"})
    assert gone.value.type == "not_found_error"
    qwen.runs.is_full = True
    with pytest.raises(anthropic.RateLimitError) as full:
        await client.messages.create(**ASKED)
    assert full.value.type == "rate_limit_error" and full.value.response.headers["retry-after"] == "3"
    qwen.runs.is_full = False
    qwen.runs.refuse = NoEngine("Starting.")
    with pytest.raises(anthropic.ServiceUnavailableError) as away:
        await client.messages.create(**ASKED)
    assert away.value.type == "overloaded_error"


async def test_a_bad_token_from_elsewhere_is_an_authentication_error(start: Start) -> None:
    gateway = await start()
    headers = {"X-Forwarded-For": "10.0.0.1"}
    async with AsyncAnthropic(
        base_url=gateway.url, api_key="wrong", default_headers=headers, max_retries=0
    ) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client.messages.create(**ASKED)
    assert refused.value.type == "authentication_error"


async def test_a_failure_within_a_stream_is_raised(qwen: Gateway, client: AsyncAnthropic) -> None:
    qwen.runs.script = lambda order: [
        Tokens(token_ids=b"", text="Hel"),
        Failed(error="engine_lost", message="Gone.", retryable=True, usage=Usage(), timings=Timings()),
    ]
    with pytest.raises(anthropic.APIStatusError) as failed:
        async with client.messages.stream(**ASKED) as stream:
            async for _ in stream:
                pass
    assert failed.value.type == "overloaded_error"


async def test_what_may_work_later_is_tried_again(qwen: Gateway) -> None:
    qwen.runs.refuse = NoEngine("Starting.", retry_after=0.1)
    async with AsyncAnthropic(base_url=qwen.url, api_key="none", max_retries=2) as client:
        calling = asyncio.ensure_future(client.messages.create(**ASKED))
        await asyncio.sleep(0.3)
        qwen.runs.refuse = None
        assert (await calling).stop_reason == "end_turn"


async def test_a_call_that_is_cut_off_reads_as_cut_off(qwen: Gateway, client: AsyncAnthropic) -> None:
    qwen.runs.script = words(*CALL[: CALL.index("1.50")], reason="length")
    async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
        final = await stream.get_final_message()
    assert (final.stop_reason, final.content) == ("max_tokens", [])
    qwen.runs.script = words(CALL[: CALL.index("1.50")], reason="length")
    whole = await client.messages.create(**ASKED, tools=TOOLS)
    assert (whole.stop_reason, json.loads(whole.model_dump_json())["content"]) == ("max_tokens", [])


@pytest.mark.parametrize("arguments", ['{"path": }', "{path: 1}", '{"path": "\\x"}'])
async def test_arguments_that_are_no_json_do_not_break_the_client(
    qwen: Gateway, client: AsyncAnthropic, arguments: str
) -> None:
    broken = f'<tool_call>{{"name": "read_file", "arguments": {arguments}}}</tool_call>'
    qwen.runs.script = words(*broken)
    async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
        final = await stream.get_final_message()
    [block] = final.content
    assert block.type == "text" and block.text == f"read_file {arguments}"
    assert final.stop_reason == "end_turn"
    whole = await client.messages.create(**ASKED, tools=TOOLS)
    assert json.loads(whole.model_dump_json())["content"] == [
        {"type": "text", "text": block.text, "citations": None}
    ]
