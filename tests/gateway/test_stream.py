"""Keep-alives, leaving clients and resumed streams."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from gateway.dialects.answer import Answer
from gateway.dialects.openai import ChatTeller
from gateway.http.middleware import tell_errors
from gateway.http.stream import STREAM_KEY, SseStream
from workers.messages import (
    RUN_END_ID,
    Progress,
    Tokens,
)

from .fake_runs import words
from .http_gateway import CHAT, HELLO, TEXT, Gateway, Start, chunks_of, events_of, until


async def test_a_silent_stream_is_kept_alive_with_its_progress(start: Start) -> None:
    gateway = await start(keepalive_seconds=0.05)
    gateway.runs.script = lambda order: [
        Progress(processed_tokens=5, prompt_tokens=9), 0.18, *words("x")(order),
    ]  # fmt: skip
    events = await gateway.stream(HELLO)
    comments = [event["comment"] for event in events if "comment" in event]
    num_prompt = len(gateway.runs.last.order.token_ids) // 4
    assert 2 <= len(comments) <= 4 and set(comments) == {f": keepalive 5/{num_prompt}"}
    empty = [c for c in chunks_of(events)[1:] if c["choices"] and c["choices"][0]["delta"] == {"content": ""}]
    assert len(empty) == len(comments)
    texts = await gateway.stream({"prompt": "x"}, TEXT)
    assert any("comment" in event for event in texts)


async def test_no_keep_alive_behind_an_event_id_breaks_the_official_client(start: Start) -> None:
    gateway = await start(keepalive_seconds=0.05)
    said_slowly = words("Hel", "lo")
    gateway.runs.script = lambda order: [
        0.12, *said_slowly(order)[:1], 0.12, *said_slowly(order)[1:],
    ]  # fmt: skip
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        said = [chunk.choices[0].delta.content async for chunk in chat if chunk.choices]
        text = await client.completions.create(model="tiny", prompt="Hi", stream=True)
        continued = [chunk.choices[0].text async for chunk in text if chunk.choices]
    assert "".join(filter(None, said)) == "".join(continued) == "Hello"
    assert len(said) > 5, "no keep-alive came"


async def test_a_talking_stream_gets_no_keepalives(start: Start) -> None:
    gateway = await start(keepalive_seconds=0.2)
    gateway.runs.script = lambda order: (
        [item for text in "abcdefgh" for item in (0.05, Tokens(token_ids=b"", text=text))]
        + list(words()(order))
    )
    events = await gateway.stream(HELLO)
    assert not any("comment" in event for event in events)


@pytest.mark.parametrize("usage", [True, False])
async def test_nothing_follows_the_finish_of_a_stream_that_was_silent(start: Start, usage: bool) -> None:
    gateway = await start(keepalive_seconds=0.05)
    gateway.runs.script = lambda order: [*words("x")(order), 0.18]
    events = await gateway.stream({**HELLO, "stream_options": {"include_usage": usage}})
    assert [event for event in events if "comment" in event]
    chunks = chunks_of(events)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert reasons.count("stop") == 1 and reasons[-1] == "stop"
    assert [chunk["choices"] for chunk in chunks[len(reasons) :]] == ([[]] if usage else [])
    assert events[-1]["data"] == "[DONE]"


async def test_an_answer_with_missing_tokens_is_an_error(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [words("a", "b")(order)[0], words("a", "b")(order)[-1]]
    status, body = await gateway.post(HELLO)
    assert (status, body["error"]["code"]) == (503, "gap")
    assert "Of 2 generated tokens 1 arrived" in body["error"]["message"]
    events = await gateway.stream(HELLO)
    assert events[-1]["data"]["error"]["code"] == "gap"
    assert all(not chunk["choices"][0]["finish_reason"] for chunk in chunks_of(events[:-1]))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
async def test_a_leaving_client_takes_its_run_along(gateway: Gateway, stream: bool, phase: str) -> None:
    before: dict[str, list[Any]] = {
        "queued": [],
        "prefilling": [Progress(processed_tokens=1, prompt_tokens=9)],
        "decoding": [Tokens(token_ids=b"", text="x")] * 3,
    }
    gateway.runs.script = lambda order: [*before[phase], 60.0]
    asking = asyncio.create_task(gateway.post({**HELLO, "stream": stream}))
    await until(lambda: bool(gateway.runs.runs) and len(gateway.runs.last.events) >= 3 + len(before[phase]))
    await asyncio.sleep(0.02)
    asking.cancel()
    await until(lambda: len(gateway.runs.cancelled) == 1)
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_client_that_leaves_in_line_is_not_forgotten(gateway: Gateway) -> None:
    gateway.runs.start_seconds = 0.1
    gateway.runs.script = lambda order: [60.0]
    asking = asyncio.create_task(gateway.post(HELLO))
    await until(lambda: gateway.runs.num_starting == 1)
    asking.cancel()
    await until(lambda: len(gateway.runs.cancelled) == 1)
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_client_that_leaves_before_the_first_event_takes_its_run_along(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [60.0]
    gateway.runs.read_seconds = 5.0
    asking = asyncio.create_task(gateway.post(HELLO))
    await until(lambda: bool(gateway.runs.runs))
    await asyncio.sleep(0.02)
    asking.cancel()
    await until(lambda: len(gateway.runs.cancelled) == 1)
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("is_open", [True, False], ids=["in a stream", "before it"])
async def test_a_client_that_leaves_in_a_write_is_nobodys_fault(
    caplog: pytest.LogCaptureFixture, is_open: bool
) -> None:
    """The transport closes before the handler is cancelled: the write in between fails."""
    failed = asyncio.Event()

    async def write(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if is_open:
            await response.prepare(request)
            request[STREAM_KEY] = SseStream(response, ChatTeller(Answer("run-1")), 5.0)
        assert request.transport is not None
        request.transport.abort()
        try:
            await response.prepare(request)
            await response.write(b"late")
        except ConnectionError:
            failed.set()
            raise
        return response

    app = web.Application(middlewares=[tell_errors])
    app.router.add_get("/", write)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientError):
                async with http.get(f"http://{host}:{port}/") as response:
                    await response.read()
        await failed.wait()
        await asyncio.sleep(0.05)
    finally:
        await runner.cleanup()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/v1/responses"])
async def test_clients_that_leave_streams_at_any_moment_are_nobodys_fault(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    gateway.runs.script = words(*["x" * 5000] * 300)
    asked: dict[str, dict[str, Any]] = {
        TEXT: {"prompt": "Hi"},
        "/v1/messages": {**HELLO, "max_tokens": 9},
        "/v1/responses": {"input": "Hi"},
    }
    body = json.dumps({"model": "tiny", **asked.get(path, HELLO), "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    port = int(gateway.url.rpartition(":")[2])
    for num_bytes in (0, 1, 3000, 200_000, 600_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        if num_bytes:
            await reader.readexactly(num_bytes)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no goodbye
        writer.transport.abort()
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_finished_run_is_not_cancelled(gateway: Gateway) -> None:
    await gateway.post(HELLO)
    await gateway.stream(HELLO)
    await asyncio.sleep(0.02)
    assert gateway.runs.cancelled == []


async def test_a_stream_resumes_after_an_event_id(gateway: Gateway) -> None:
    whole = await gateway.stream({**HELLO, "stream_options": {"include_usage": True}})
    path = f"{CHAT}/{chunks_of(whole)[0]['id']}"
    for position, event in enumerate(whole):
        if event["id"] is None:
            continue
        headers = {"Last-Event-ID": event["id"]}
        async with gateway.http.get(gateway.url + path, headers=headers) as response:
            assert response.status == (204 if event["id"] == RUN_END_ID else 200)
            rest = events_of(await response.text())
        assert rest == whole[position + 1 :]
        async with gateway.http.get(f"{gateway.url}{path}?after={event['id']}") as response:
            assert events_of(await response.text()) == rest
    async with gateway.http.get(gateway.url + path) as response:
        assert events_of(await response.text()) == whole


async def test_a_whole_answer_can_be_read_again(gateway: Gateway) -> None:
    _, body = await gateway.post(HELLO)
    assert await gateway.get(f"{CHAT}/{body['id']}") == (200, body)


async def test_a_second_reader_keeps_the_run_alive(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [Tokens(token_ids=b"", text="x"), 0.2, *words("y")(order)]
    first = await gateway.http.post(gateway.url + CHAT, json={**HELLO, "stream": True})
    run_id = first.headers["x-tetrarch-run"]
    second = await gateway.http.get(f"{gateway.url}{CHAT}/{run_id}")
    first.close()
    events = events_of(await second.text())
    assert events[-1]["data"] == "[DONE]" and gateway.runs.cancelled == []


@pytest.mark.parametrize("run_id", ["nonsense", f"run-{'0' * 32}", f"chatcmpl-{'a' * 32}", "run-%00"])
async def test_an_unknown_run_is_404(gateway: Gateway, run_id: str) -> None:
    status, body = await gateway.get(f"{CHAT}/{run_id}")
    assert (status, body["error"]["code"]) == (404, "run_not_found")


async def test_a_bad_event_id_is_400(gateway: Gateway) -> None:
    _, body = await gateway.post(HELLO)
    status, answer = await gateway.get(f"{CHAT}/{body['id']}", headers={"Last-Event-ID": "x"})
    assert (status, answer["error"]["param"]) == (400, "after")
