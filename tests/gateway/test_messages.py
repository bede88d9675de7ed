"""The Messages API: what answers and streams are, byte for byte."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import NoEngine, Overloaded
from workers.messages import Derail, Derailed, Failed, Finished, Timings, Tokens, Usage

from .fake_runs import words
from .http_gateway import CHAT, Gateway, Start, until
from .messages_api import (
    ASKED,
    CALL,
    COUNT,
    HELLO,
    INPUT,
    MESSAGES,
    ask,
    assembled,
    sse_events,
    stream,
    with_inputs,
    without_ids,
)
from .samples import QWEN
from .test_tool_calls import THINKING, serve

TEXT = f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"


@pytest.fixture
def qwen(gateway: Gateway) -> Gateway:
    serve(gateway, QWEN)
    return gateway


async def test_an_answer_has_anthropics_shape(gateway: Gateway) -> None:
    status, body = await gateway.post(HELLO, MESSAGES)
    assert status == 200, body
    num_prompt = len(gateway.runs.last.order.token_ids) // 4
    [run_id] = gateway.runs.runs
    assert body == {
        "id": f"msg_{run_id.removeprefix('run-')}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - num_prompt // 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_prompt // 2,
            "output_tokens": 2,
        },
    }


async def test_a_stream_is_told_in_anthropics_events(qwen: Gateway) -> None:
    qwen.runs.script = words("<think>\nHm.", "\n</think>\n\nOh.", CALL)
    events = await stream(qwen, ASKED)
    [run_id] = qwen.runs.runs
    num_prompt = len(qwen.runs.last.order.token_ids) // 4
    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    message: dict[str, Any] = {
        "id": f"msg_{run_id.removeprefix('run-')}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": num_prompt, **usage},
    }
    thought, call = events[2].data["content_block"], events[9].data["content_block"]
    assert thought == {"type": "thinking", "thinking": "", "signature": ""}
    assert call == {"type": "tool_use", "id": call["id"], "name": "read_file", "input": {}}
    assert call["id"].startswith("toolu_") and len(call["id"]) == 30
    shown = [
        {name: value for name, value in event.data.items() if name not in ("type", "content_block")}
        for event in events
    ]
    signature = shown[4]["delta"]["signature"]
    assert [event.name for event in events] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert shown == [
        {"message": message},
        {},
        {"index": 0},
        {"index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"index": 0, "delta": {"type": "signature_delta", "signature": signature}},
        {"index": 0},
        {"index": 1},
        {"index": 1, "delta": {"type": "text_delta", "text": "Oh."}},
        {"index": 1},
        {"index": 2},
        {
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": '{"path": "ü </tool_call>", "n": 1.50}'},
        },
        {"index": 2},
        {
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {
                **usage,
                "input_tokens": num_prompt - num_prompt // 2,
                "cache_read_input_tokens": num_prompt // 2,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 1},
            },
        },
        {},
    ]


async def test_a_stream_reads_as_the_whole_answer_however_it_is_cut(qwen: Gateway) -> None:
    whole = without_ids(await ask(qwen, TEXT))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    cuts = [[TEXT], list(TEXT), *([TEXT[:position], TEXT[position:]] for position in range(5, len(TEXT), 9))]
    for pieces in cuts:
        qwen.runs.script = words(*pieces)
        assert without_ids(with_inputs(assembled(await stream(qwen, ASKED)))) == whole


async def test_words_between_and_behind_calls_keep_their_place(qwen: Gateway) -> None:
    text = f"One.{CALL}Two.{CALL}Three."
    whole = await ask(qwen, text)
    assert [block.get("text", block["type"]) for block in whole["content"]] == [
        *("One.", "tool_use", "Two.", "tool_use", "Three.")
    ]
    qwen.runs.script = words(*text)
    assert without_ids(with_inputs(assembled(await stream(qwen, ASKED)))) == without_ids(whole)


async def test_parallel_calls_have_an_id_each_which_lasts(qwen: Gateway) -> None:
    whole = await ask(qwen, CALL * 3)
    ids = [block["id"] for block in whole["content"]]
    assert len(set(ids)) == 3 and [block["input"] for block in whole["content"]] == [INPUT] * 3
    [run_id] = qwen.runs.runs
    _, again = await qwen.get(f"{CHAT}/{run_id}")
    assert again == whole


async def test_a_resumed_stream_tells_the_same(qwen: Gateway) -> None:
    qwen.runs.script = words(*(TEXT[start : start + 7] for start in range(0, len(TEXT), 7)))
    events = await stream(qwen, ASKED)
    [run_id] = qwen.runs.runs
    for position, event in enumerate(events[:-1]):
        if event.id is not None:
            async with qwen.http.get(f"{qwen.url}{CHAT}/{run_id}?after={event.id}") as response:
                assert sse_events(await response.text()) == events[position + 1 :]


# How answers end


async def test_a_call_that_is_cut_off_is_never_told_as_whole(qwen: Gateway) -> None:
    for num_chars in range(CALL.index('"arguments'), len(CALL) - len("}\n</tool_call>")):
        whole = await ask(qwen, CALL[:num_chars], reason="length")
        assert whole["stop_reason"] == "max_tokens"
        assert all(block["type"] != "tool_use" for block in whole["content"])
        qwen.runs.script = words(CALL[:num_chars], reason="length")
        assert without_ids(assembled(await stream(qwen, ASKED))) == without_ids(whole)


@pytest.mark.parametrize("arguments", ['{"path": }', "{path: 1}", '{"a": "\\ud800"}', '{"a": 01}'])
async def test_a_call_that_nobody_can_read_is_told_as_text(qwen: Gateway, arguments: str) -> None:
    broken = f'<tool_call>{{"name": "read_file", "arguments": {arguments}}}</tool_call>'
    whole = await ask(qwen, f"Look.\n{broken}\nSo.")
    assert [block.get("text") for block in whole["content"]][:2] == ["Look.", f"read_file {arguments}"]
    assert {block["type"] for block in whole["content"]} == {"text"}
    assert whole["stop_reason"] == "end_turn"
    for text in ([f"Look.\n{broken}\nSo."], [*f"Look.\n{broken}\nSo."]):
        qwen.runs.script = words(*text)
        assert without_ids(assembled(await stream(qwen, ASKED))) == without_ids(whole)


async def test_an_answer_that_says_nothing_has_no_blocks(qwen: Gateway) -> None:
    assert (await ask(qwen, ""))["content"] == []


@pytest.mark.parametrize("streams", [True, False])
async def test_a_stop_sequence_is_told(qwen: Gateway, streams: bool) -> None:
    qwen.runs.script = lambda order: [
        Tokens(token_ids=b"", text="One, "),
        Finished(reason="stop", usage=Usage(), timings=Timings(), stop_text="two"),
    ]
    asked = {**HELLO, "stop_sequences": ["two", "three"]}
    message = assembled(await stream(qwen, asked)) if streams else (await qwen.post(asked, MESSAGES))[1]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")
    assert qwen.runs.last.order.stop == ("two", "three")


async def test_a_derailed_answer_says_so(qwen: Gateway) -> None:
    derail = Derail(derail="token_cycle", first_token=1)
    qwen.runs.script = lambda order: [
        Tokens(token_ids=b"", text="la la"),
        Derailed(what=derail),
        Finished(reason="derailed", usage=Usage(), timings=Timings()),
    ]
    _, body = await qwen.post(HELLO, MESSAGES)
    events = await stream(qwen, HELLO)
    assert body["stop_reason"] == events[-2].data["delta"]["stop_reason"] == "max_tokens"
    assert body["tetrarch"] == events[-2].data["tetrarch"]
    assert body["tetrarch"]["derail"]["kind"] == "token_cycle"


@pytest.mark.parametrize("streams", [True, False])
async def test_one_call_at_a_time_is_kept_to(qwen: Gateway, streams: bool) -> None:
    asked = {**ASKED, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    qwen.runs.script = words(*(CALL * 2))
    message = (
        with_inputs(assembled(await stream(qwen, asked)))
        if streams
        else (await qwen.post(asked, MESSAGES))[1]
    )
    assert [block["input"] for block in message["content"]] == [INPUT]
    assert message["stop_reason"] == "tool_use"


# Thinking


@pytest.mark.parametrize(
    ("template", "text", "thinking", "content"),
    [
        (QWEN, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (QWEN, "Yes. </think>", None, "Yes. </think>"),
        (THINKING, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (THINKING, "Hm", "Hm", None),
    ],
)
async def test_thinking_is_told_apart_by_what_the_prompt_opened(
    gateway: Gateway, template: str, text: str, thinking: str | None, content: str | None
) -> None:
    serve(gateway, template)
    blocks = (await ask(gateway, text))["content"]
    found = {block["type"]: block.get("thinking", block.get("text")) for block in blocks}
    expected = {"thinking": thinking, "text": content}
    assert found == {kind: words for kind, words in expected.items() if words is not None}


async def test_thoughts_that_shall_be_omitted_are_counted_and_carried(qwen: Gateway) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    whole = await ask(qwen, [*"<think>\nHm, so.\n</think>\n\nYes."], thinking=thinking)
    assert whole["content"][0] == {
        "type": "thinking",
        "thinking": "",
        "signature": whole["content"][0]["signature"],
    }
    assert whole["content"][1]["text"] == "Yes."
    qwen.runs.script = words(*"<think>\nHm, so.\n</think>\n\nYes.")
    events = await stream(qwen, {**ASKED, "thinking": thinking})
    deltas = [event.data["delta"] for event in events if event.name == "content_block_delta"]
    hidden = [delta for delta in deltas if delta["type"] == "thinking_delta"]
    assert {delta["thinking"] for delta in hidden} == {""}
    assert len("Hm, so.") - 1 <= sum(delta["estimated_tokens"] for delta in hidden) <= len("Hm, so.")
    assert without_ids(assembled(events)) == without_ids(whole)


# Silence, failures, leaving


@pytest.mark.parametrize("phase", ["prompt", "call"])
async def test_a_silent_stream_is_kept_alive_with_pings(start: Start, phase: str) -> None:
    gateway = await start(keepalive_seconds=0.05)
    serve(gateway, QWEN)
    tokens = [Tokens(token_ids=b"", text=CALL[:-30])] if phase == "call" else []
    gateway.runs.script = lambda order: [*tokens, 0.2, *words(CALL[-30:] if tokens else "Yes.")(order)]
    events = await stream(gateway, ASKED)
    pings = [event for event in events[2:] if event.name == "ping"]
    assert len(pings) >= 2 and all(ping.data == {"type": "ping"} and ping.id is None for ping in pings)
    assert assembled(events)["stop_reason"] == ("tool_use" if tokens else "end_turn")


async def test_the_start_is_told_before_the_prompt_is_read(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [60.0]
    async with gateway.http.post(gateway.url + MESSAGES, json={**HELLO, "stream": True}) as response:
        line = await asyncio.wait_for(response.content.readline(), 2)
        assert line == b"id: 0-1\n" or line == b"event: message_start\n"


@pytest.mark.parametrize(
    ("retryable", "kind"), [(True, "overloaded_error"), (False, "api_error")], ids=["lost", "fault"]
)
async def test_a_failure_in_a_stream_is_its_last_event(gateway: Gateway, retryable: bool, kind: str) -> None:
    gateway.runs.script = lambda order: [
        Tokens(token_ids=b"", text="Hel"),
        Failed(error="row_fault", message="It broke.", retryable=retryable, usage=Usage(), timings=Timings()),
    ]
    events = await stream(gateway, HELLO)
    assert events[-1].data == {"type": "error", "error": {"type": kind, "message": "It broke."}}
    assert "message_stop" not in [event.name for event in events]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_leaving_client_takes_its_run_along(gateway: Gateway, streams: bool) -> None:
    gateway.runs.script = lambda order: [Tokens(token_ids=b"", text="Hel"), 60.0]
    post = asyncio.ensure_future(gateway.http.post(gateway.url + MESSAGES, json={**HELLO, "stream": streams}))
    await until(lambda: bool(gateway.runs.runs))
    if streams:
        (await post).close()
    else:
        post.cancel()
    await until(lambda: bool(gateway.runs.cancelled))


async def test_errors_are_worded_as_anthropic_words_them(gateway: Gateway) -> None:
    async def told(body: Any, path: str = MESSAGES) -> tuple[int, str, str]:
        async with gateway.http.post(gateway.url + path, json=body) as response:
            error = await response.json()
            assert error.keys() == {"type", "error", "request_id"} and error["type"] == "error"
            assert error["request_id"] == response.headers["request-id"]
            return response.status, error["error"]["type"], error["error"]["message"]

    assert (await told({**HELLO, "max_tokens": 0}))[:2] == (400, "invalid_request_error")
    status, kind, message = await told({**HELLO, "model": "gone"})
    assert (status, kind) == (404, "not_found_error") and "'gone'" in message
    assert (await told(HELLO, f"{MESSAGES}/batches"))[:2] == (404, "not_found_error")
    gateway.runs.is_full = True
    assert (await told(HELLO))[:2] == (429, "rate_limit_error")
    assert (await told({**HELLO, "messages": []}, COUNT))[:2] == (400, "invalid_request_error")
    gateway.runs.is_full = False
    gateway.runs.refuse = NoEngine("Starting.")
    assert (await told(HELLO)) == (503, "overloaded_error", "Starting.")
    gateway.runs.refuse = Overloaded(7)
    assert (await told(HELLO))[:2] == (429, "rate_limit_error")


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"7", b"{", b"\xff", b'{"messages": NaN}', b'{"max_tokens": 1e999}', b"[" * 9999),
        *(b'{"messages": [' + b'{"role": "user", "content": ' * 200, b'{"max_tokens": ' + b"9" * 5000 + b"}"),
        b'{"max_tokens": -1, "messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
async def test_bodies_that_are_none_are_refused_in_words(gateway: Gateway, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with gateway.http.post(gateway.url + path, data=body, headers=headers) as response:
        error = await response.json()
        assert (response.status, error["error"]["type"]) == (400, "invalid_request_error")
        assert len(error["error"]["message"]) < 400


async def test_a_call_without_a_token_from_elsewhere_is_told_so(start: Start) -> None:
    gateway = await start()
    headers = {"X-Forwarded-For": "10.0.0.1"}
    async with gateway.http.post(gateway.url + MESSAGES, json=HELLO, headers=headers) as response:
        body = await response.json()
        assert (response.status, body["error"]["type"]) == (401, "authentication_error")
    secret = gateway.tokens.add("laptop")
    for header in ({"x-api-key": secret}, {"Authorization": f"Bearer {secret}"}):
        async with gateway.http.post(
            gateway.url + MESSAGES + "?beta=true", json=HELLO, headers={**headers, **header}
        ) as response:
            assert response.status == 200


# Counting


async def test_counting_counts_what_a_call_has(qwen: Gateway) -> None:
    await ask(qwen, "x", system="Be brief.")
    prompt = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    status, body = await qwen.post({**prompt, "system": "Be brief."}, COUNT)
    assert (status, body) == (200, {"input_tokens": len(qwen.runs.last.order.token_ids) // 4})
    _, without_tools = await qwen.post({**prompt, "system": "Be brief.", "tools": []}, COUNT)
    _, without_system = await qwen.post(prompt, COUNT)
    assert without_tools["input_tokens"] + 20 < body["input_tokens"] > without_system["input_tokens"]


async def test_counting_needs_no_place_and_no_room(gateway: Gateway) -> None:
    gateway.runs.is_full = True
    long = {"messages": [{"role": "user", "content": "a b " * 1000}]}
    status, body = await gateway.post(long, COUNT)
    assert status == 200 and body["input_tokens"] > 512  # the fake engine's context
    assert gateway.runs.num_reserved == 0 and not gateway.runs.runs


async def test_a_burst_of_counts_is_answered(gateway: Gateway) -> None:
    bodies = [{"messages": [{"role": "user", "content": f"{index} words " * 50}]} for index in range(100)]
    answers = await asyncio.gather(*(gateway.post(body, COUNT) for body in bodies))
    assert {status for status, _ in answers} == {200}
