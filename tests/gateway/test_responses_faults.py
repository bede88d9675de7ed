"""Responses that do not come to their end as planned: failures, silence, clients that leave, steers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from workers.messages import Dispatched, Failed, Finished, Timings, Tokens, Usage

from .fake_runs import words
from .http_gateway import Gateway, until
from .responses_api import ASKED, CALL, RESPONSES, assembled, sse_events, stream
from .samples import QWEN
from .test_tool_calls import serve


@pytest.fixture(autouse=True)
def qwen(gateway: Gateway) -> None:
    serve(gateway, QWEN)


async def test_a_failure_in_the_stream_is_told_and_the_stream_closes(gateway: Gateway) -> None:
    failed = Failed(error="engine_lost", message="The engine stopped.", retryable=True)
    gateway.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text="Hel"), failed]
    events = await stream(gateway)
    final = events[-1].data["response"]
    assert events[-1].name == "response.failed" and final["status"] == "failed"
    assert final["error"] == {
        "code": "server_error",
        "message": "The engine stopped.",
        "type": "engine_lost",
    }
    assert final["output"][0]["status"] == "incomplete" and assembled(events) == final["output"]
    assert [event.data["sequence_number"] for event in events] == [*range(len(events))]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("context_exceeded", "context_length_exceeded"),
        ("context_length_exceeded", "context_length_exceeded"),
        ("grammar_error", "invalid_prompt"),
        ("invalid_request", "invalid_prompt"),
        ("overloaded", "rate_limit_exceeded"),
        ("budget_exceeded", "invalid_prompt"),
        ("cancelled", "invalid_prompt"),
        ("grammar_dead_end", "invalid_prompt"),
        ("out_of_pages", "invalid_prompt"),
        ("row_fault", "invalid_prompt"),
        ("upgrade_engine", "invalid_prompt"),
        ("queue_timeout", "server_error"),
        ("engine_lost", "server_error"),
        ("internal_error", "server_error"),
        ("of_a_newer_engine", "server_error"),
    ],
)
async def test_a_failed_response_has_the_code_by_which_clients_send_again_or_do_not(
    gateway: Gateway, kind: str, code: str
) -> None:
    failed = Failed(error=kind, message="So it is.")
    gateway.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text="Hel"), failed]
    final = (await stream(gateway))[-1].data["response"]
    assert final["error"] == {"code": code, "message": "So it is.", "type": kind}


async def test_a_failure_inside_a_call_leaves_the_call_out(gateway: Gateway) -> None:
    failed = Failed(error="engine_lost", message="The engine stopped.", retryable=True)
    gateway.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text=CALL[:60]), failed]
    final = (await stream(gateway))[-1].data["response"]
    assert (final["status"], final["output"]) == ("failed", [])


async def test_a_failure_before_any_stream_is_an_http_error(gateway: Gateway) -> None:
    failed = Failed(error="engine_lost", message="The engine stopped.", retryable=True)
    gateway.runs.script = lambda order: [failed]
    status, body = await gateway.post(ASKED, RESPONSES)
    assert (status, body["error"]["code"]) == (503, "engine_lost")


async def test_an_incident_in_an_open_stream_ends_it_with_response_failed(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0", text="torn ids")]
    events = await stream(gateway)
    assert [event.name for event in events if "response" in event.data] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    assert events[-1].data["response"]["error"]["type"] == "internal_error"


async def test_a_silent_stream_is_kept_alive_by_data_and_not_by_comments(start: Any) -> None:
    """Codex's idle timer does not see comments."""
    gateway = await start(keepalive_seconds=0.05)
    serve(gateway, QWEN)
    gateway.runs.script = lambda order: [
        0.2,
        *words("Hel")(order)[:1],
        0.2,
        *words("lo", "x")(order)[:1],
        *words("", "")(order)[-1:],
    ]
    events = await stream(gateway)
    alive = [event.data for event in events if event.name == "keepalive"]
    assert len(alive) >= 4 and all(event.keys() == {"type", "sequence_number"} for event in alive)
    numbers = [event.data["sequence_number"] for event in events]
    assert numbers == sorted(numbers)
    own = [event.data["sequence_number"] for event in events if event.name != "keepalive"]
    assert own == [*range(len(own))]


async def test_a_client_that_leaves_a_stream_ends_its_run(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text="x"), 60.0]
    response = await gateway.http.post(gateway.url + RESPONSES, json={**ASKED, "stream": True})
    await response.content.readany()
    response.close()
    await until(lambda: bool(gateway.runs.cancelled))


async def test_a_client_that_leaves_without_a_stream_ends_its_run_too(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text="x"), 60.0]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await gateway.post(ASKED, RESPONSES)
    await until(lambda: bool(gateway.runs.cancelled))


async def test_turns_of_a_steered_run_are_one_output(gateway: Gateway) -> None:
    """But for a call that one of them left open: clients would run it."""
    usage = Usage(prompt_tokens=3, completion_tokens=1)

    def play(order: Any) -> list[Any]:
        return [
            Tokens(token_ids=b"\1\0\0\0", text=f"Look.\n{CALL[:60]}"),
            Finished(reason="stop", usage=usage, timings=Timings()),
            Dispatched(engine_id="e", incarnation=1, turn=2),
            Tokens(token_ids=b"\1\0\0\0", text="Better."),
            Finished(reason="stop", usage=usage, timings=Timings()),
        ]

    gateway.runs.script = play
    events = await stream(gateway)
    final = events[-1].data["response"]
    assert [(item["type"], item["status"]) for item in final["output"]] == [
        ("message", "completed"),
        ("message", "completed"),
    ]
    assert assembled(events) == final["output"]
    assert final["usage"]["total_tokens"] == 8


async def test_arguments_that_are_no_json_are_told_as_written_in_bodies_and_streams(gateway: Gateway) -> None:
    """Here they are a string: the client tells its model what is wrong with it."""
    broken = '<tool_call>{"name": "read_file", "arguments": {"path": }}</tool_call>'
    gateway.runs.script = words(*broken)
    events = await stream(gateway)
    [told] = assembled(events)
    assert [told] == events[-1].data["response"]["output"]
    _, body = await gateway.post(ASKED, RESPONSES)
    [whole] = body["output"]
    for item in (told, whole):
        assert (item["type"], item["arguments"], item["status"]) == (
            *("function_call", '{"path": }', "completed"),
        )


def test_events_of_a_stream_name_their_type() -> None:
    assert sse_events('event: a\ndata: {"type":"a"}\n\n')[0].name == "a"
