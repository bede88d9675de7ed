"""Bad input ends in OpenAI's error shape that names the field, and the server lives on."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from typing import Any

import msgspec
import pytest

from gateway.errors import NoEngine, Overloaded
from workers.messages import (
    Failed,
    Tokens,
)

from .fake_runs import engine_view
from .http_gateway import CHAT, HELLO, TEXT, Gateway
from .samples import CHATML, QWEN, bundle_of, byte_level_tokenizer

BAD_FIELDS: dict[str, list[Any]] = {
    "temperature": ["hot", -1, 2.1, True, 10**400],
    "top_p": [5, 0, []],
    "top_k": [-1, 1.5],
    "min_p": [1.1, "x"],
    "repetition_penalty": [0, -1],
    "presence_penalty": [3],
    "frequency_penalty": ["x"],
    "max_tokens": [-1, 0, 1.5, "7"],
    "n": [0, 2, "1"],
    "stop": [7, "", [""], ["a"] * 17, [None], {"a": 1}],
    "seed": [1.5, 2**64, -(2**63) - 1, "x", 10**400],
    "logit_bias": ["x", [], {"x": 1}, {"600": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"²": 1}],
    "stream": ["yes", 1],
    "stream_options": [5, {"include_usage": 3}],
    "user": [7],
    "model": [7],
    "stop_token_ids": ["x", [-1], [600], [10**30]],
    "ignore_eos": ["x"],
}
BAD_CHAT_FIELDS: dict[str, list[Any]] = {
    "max_completion_tokens": [0],
    "messages": [
        "x",
        [],
        None,
        [7],
        {},
        [{}],
        [{"role": "wizard", "content": "x"}],
        [{"role": 7, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 7}]}],
        [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": 7}}]}],
        [{"role": "assistant", "tool_calls": "x"}],
    ],
    "logprobs": [3, "x"],
    "top_logprobs": [21, -1, 1],
    "tool_choice": ["required", 7, {}],
    "parallel_tool_calls": ["x", 1],
    "tools": [{}, [7], [{"type": "function"}], [{"function": {"name": 7}}]],
    "chat_template_kwargs": ["x", {"messages": []}, {"tools": 1}],
    "response_format": [
        "x",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": 7}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
        {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(?=a)"}},
        },
    ],
}
BAD_TEXT_FIELDS: dict[str, list[Any]] = {
    "prompt": [
        None,
        7,
        [],
        "",
        ["a", "b"],
        [600],
        [-1],
        [10**30],
        [1.5],
        [[1], [2]],
        {"a": 1},
        [1, "a"],
        [[]],
    ],
    "logprobs": [6, -1, True],
    "echo": [True, "x"],
    "suffix": ["x"],
    "best_of": [2],
}


async def check_refused(gateway: Gateway, path: str, good: dict[str, Any], name: str, value: Any) -> None:
    status, body = await gateway.post({**good, name: value}, path)
    assert status == 400, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] and error["param"].startswith(name)
    assert name in error["message"] and len(error["message"]) < 400
    assert not gateway.runs.runs


async def test_a_bad_field_is_named(gateway: Gateway) -> None:
    for path, good, own in ((CHAT, HELLO, BAD_CHAT_FIELDS), (TEXT, {"prompt": "x"}, BAD_TEXT_FIELDS)):
        for table in (BAD_FIELDS, own):
            for name, values in table.items():
                for value in values:
                    await check_refused(gateway, path, good, name, value)
    assert (await gateway.post(HELLO))[0] == 200


HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    "",
    "x" * 10_000,
    [],
    [None],
    {},
    {"": None},
    [[[[]]]],
    [{}],
    "\x00",
]


async def test_no_value_in_any_field_brings_the_server_down(gateway: Gateway) -> None:
    from gateway.http.api import ChatRequest, CompletionRequest

    targets: list[tuple[str, dict[str, Any], Any]] = [
        (CHAT, HELLO, ChatRequest),
        (TEXT, {"prompt": "x"}, CompletionRequest),
    ]
    for path, good, struct in targets:
        for name in struct.__struct_fields__:
            for value in HOSTILE:
                async with gateway.http.post(gateway.url + path, json={**good, name: value}) as response:
                    assert response.status in (200, 400, 404), (name, value, await response.text())
                    if response.status != 200:
                        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 6000])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "seed", "max_tokens", "logit_bias", "stop", "messages"]
)
async def test_numbers_that_json_lacks_name_their_field(gateway: Gateway, name: str, number: str) -> None:
    value = f'{{"5": {number}}}' if name == "logit_bias" else number
    status, body = await gateway.post(
        f'{{"messages": [{{"role": "user", "content": "x"}}], "{name}": {value}}}'
    )
    if name == "max_tokens" and number[0] == "1" and "e" not in number:
        assert status in (200, 400)
        return
    assert status == 400
    assert body["error"]["param"] in (name, None)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": ',
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages":' * 2000,
        b"{}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": "a", "messages": []}',
        b'{"\\ud800": NaN}',
        b'{"a": ' + b"[" * 900 + b"NaN" + b"]" * 900 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b"[" * 500 + b"]" * 500 + b"}]}",
    ],
)
async def test_a_broken_body_is_400(gateway: Gateway, body: bytes) -> None:
    status, answer = await gateway.post(body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert (await gateway.post(HELLO))[0] == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_prompt_over_the_context_names_both_numbers(gateway: Gateway, path: str) -> None:
    for words_of in (600, 200_000):
        text = "fox " * words_of
        body = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
        status, answer = await gateway.post(body, path)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "512" in answer["error"]["message"]
        numbers = [int(n) for n in answer["error"]["message"].replace(",", "").split() if n.isdigit()]
        assert max(numbers) > 512
    status, answer = await gateway.post({"prompt": [300] * 512}, TEXT)
    assert status == 400 and "512" in answer["error"]["message"]
    assert (await gateway.post({"prompt": [300] * 511}, TEXT))[0] == 200
    assert gateway.runs.last.order.max_tokens == 1


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', '{"a": ' * 1000 + "1" + "}" * 1000, '{"a": NaN}', "{", "[]", "", '{"a": 1}'],
    ids=["lone surrogate", "deep", "no number", "cut off", "list", "empty", "object"],
)
async def test_what_a_model_wrote_as_arguments_never_breaks_a_call(gateway: Gateway, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for template in (CHATML, QWEN):
        view = engine_view(bundle_of(byte_level_tokenizer(), template), context_length=1 << 17)
        info = msgspec.structs.replace(view.info, digest=template)
        gateway.directory.views = [dataclasses.replace(view, info=info)]
        status, body = await gateway.post({"messages": asked})
        assert status == 200, body


async def test_a_full_line_refuses_before_it_prepares(gateway: Gateway) -> None:
    gateway.runs.is_full = True
    unusable = {"messages": [{"role": "tool", "content": "x"}], "stop_token_ids": [10**6]}
    assert (await gateway.post(unusable))[0] == 429
    gateway.runs.is_full = False
    assert (await gateway.post(unusable))[0] == 400
    assert (await gateway.post(HELLO))[0] == 200
    assert gateway.runs.num_reserved == 0


async def test_a_body_of_many_values_is_answered_while_others_are(gateway: Gateway) -> None:
    """3 MB of token ids, and of stop ids: refused, and the loop is never away for long."""
    numbers = ",".join(["300"] * 750_000)
    for body in (f'{{"prompt": [{numbers}]}}', f'{{"prompt": "x", "stop_token_ids": [{numbers}]}}'):
        refused = asyncio.create_task(gateway.post(io.BytesIO(body.encode()), TEXT))
        num_ticks = 0
        while not refused.done():
            await asyncio.sleep(0.001)
            num_ticks += 1
        assert (await refused)[0] == 400
        assert num_ticks > 10  # parsed on the loop it would be a handful


async def test_an_unknown_model_is_404(gateway: Gateway) -> None:
    status, body = await gateway.post({**HELLO, "model": "no-such-model"})
    assert status == 404
    assert body["error"]["code"] == "model_not_found" and "tiny" in body["error"]["message"]
    for name in (None, "default", "tiny", ""):
        assert (await gateway.post({**HELLO, "model": name}))[0] == 200


async def test_refused_admission_has_no_stream(gateway: Gateway) -> None:
    for stream in (False, True):
        gateway.runs.refuse = Overloaded(7.4)
        async with gateway.http.post(gateway.url + CHAT, json={**HELLO, "stream": stream}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "7"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        gateway.runs.refuse = NoEngine("none")
        assert (await gateway.post({**HELLO, "stream": stream}))[0] == 503


async def test_a_failed_turn_is_an_error_not_an_answer(gateway: Gateway) -> None:
    failed = Failed(error="engine_lost", message="The engine ended.", retryable=True)
    gateway.runs.script = lambda order: [Tokens(token_ids=b"", text="Hel"), failed]
    status, body = await gateway.post(HELLO)
    assert (status, body["error"]["code"]) == (503, "engine_lost")
    events = await gateway.stream(HELLO)
    assert events[-1]["data"]["error"]["message"] == "The engine ended."
    assert all(event["data"] != "[DONE]" for event in events)
    gateway.runs.script = lambda order: [Failed(error="fault", message="NaN in the row.")]
    assert (await gateway.post(HELLO))[0] == 500


@pytest.mark.parametrize(
    ("failure", "status", "should_retry", "retry_after"),
    [
        (Failed(error="engine_lost", message="x", retryable=True), 503, "true", "1"),
        (Failed(error="server_stopping", message="x", retryable=True), 503, "true", "1"),
        (Failed(error="step_failed", message="x", retryable=True), 503, "true", "1"),
        (Failed(error="queue_timeout", message="x", retryable=True, retry_after=42), 503, "true", "42"),
        (Failed(error="row_fault", message="x"), 500, "false", None),
        (Failed(error="out_of_pages", message="x"), 500, "false", None),
        (Failed(error="engine_lost", message="x"), 500, "false", None),
        (Overloaded(7), 429, "true", "7"),
        (NoEngine("none"), 503, "true", "2"),
        (RuntimeError("x"), 500, "false", None),
    ],
)
async def test_a_client_is_told_whether_another_try_may_help(
    gateway: Gateway, failure: Any, status: int, should_retry: str, retry_after: str | None
) -> None:
    if isinstance(failure, Failed):
        gateway.runs.script = lambda order: [failure]
    else:
        gateway.runs.refuse = failure
    async with gateway.http.post(gateway.url + CHAT, json=HELLO) as response:
        assert response.status == status
        assert response.headers["x-should-retry"] == should_retry
        assert response.headers.get("Retry-After") == retry_after
    async with gateway.http.post(gateway.url + CHAT, json={}) as response:
        assert (response.status, response.headers["x-should-retry"]) == (400, "false")


async def test_an_unforeseen_exception_is_an_incident_without_its_text(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.runs.refuse = RuntimeError("secret prompt text")
    status, body = await gateway.post(HELLO)
    assert status == 500 and body["error"]["code"] == "internal_error"
    gateway.runs.refuse = None

    def broken(order: Any) -> list[Any]:
        return [Tokens(token_ids=b"123", text="x")]  # not whole uint32

    gateway.runs.script = broken
    events = await gateway.stream(HELLO)
    assert events[-1]["data"]["error"]["code"] == "internal_error"
    logged = capsys.readouterr()
    assert "incident" in logged.out + logged.err
    assert "secret prompt text" not in logged.out + logged.err


async def test_other_paths_and_methods_answer_in_json(gateway: Gateway) -> None:
    status, body = await gateway.get("/api/v1/tags")
    assert status == 404 and body["error"]["code"] == "not_found"
    status, body = await gateway.get(TEXT)
    assert status == 405 and "POST" in body["error"]["message"]
    async with gateway.http.options(
        gateway.url + CHAT, headers={"Origin": "http://evil.example"}
    ) as response:
        assert response.status == 403
        assert not any(name.lower().startswith("access-control") for name in response.headers)
