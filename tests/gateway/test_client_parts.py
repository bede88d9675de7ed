"""The client's parts that need no server: events out of bytes, patience, errors, fields of runs."""

from __future__ import annotations

from itertools import pairwise
from typing import get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client import (
    Budget,
    Busy,
    Client,
    InvalidRequest,
    Patience,
    RunFields,
    RunUsage,
    ServerFault,
    Unreachable,
)
from gateway.client.budgets import budget_use
from gateway.client.errors import REMEDIES, TetrarchError, refused, told_error
from gateway.client.fields import encode_body
from gateway.client.patience import Tries
from gateway.client.sse import Sse, SseReader
from gateway.errors import KINDS
from gateway.http.api import HIDDEN
from gateway.native.structs import CHAT_ONLY, RunRequest

STREAM = (
    b": a comment\n\n"
    b'event: token\nid: 1-2\ndata: {"a":1}\n\n'
    b"data: two\r\ndata: lines\r\n\r\n"
    b"retry: 10\n\n"
    b"id: 1-3\ndata:no space\n\n"
    b"event: cut\ndata: never ended\n"
)
EVENTS = [Sse(b'{"a":1}', "token", "1-2"), Sse(b"two\nlines"), Sse(b"no space", "", "1-3")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_are_the_same_however_their_bytes_are_cut(cuts: list[int]) -> None:
    reader, borders = SseReader(), [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[start:end] for start, end in pairwise(borders)]
    assert [event for part in parts for event in reader.feed(part)] == EVENTS


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tries(patience: Patience, draw: float = 1.0) -> tuple[Tries, Clock]:
    clock = Clock()
    return Tries(patience, clock, lambda: draw), clock


def test_tries_become_rarer_and_end() -> None:
    trying, clock = tries(Patience(seconds=20, first_seconds=1, most_seconds=5))
    delays = []
    while (delay := trying.delay(Unreachable("http://x", "gone"))) is not None:
        delays.append(delay)
        clock.now += delay
    assert delays == [1, 2, 4, 5, 5]
    trying.succeeded()
    assert trying.delay(None) == 1


def test_tries_of_many_do_not_come_together() -> None:
    assert tries(Patience(), 0.0)[0].delay(None) == 0.05
    busy = refused(429, b"{}", "8")
    assert tries(Patience(), 0.0)[0].delay(busy) == 8
    assert tries(Patience(), 1.0)[0].delay(busy) == 10


def test_a_retry_after_beyond_all_patience_is_told_at_once() -> None:
    assert tries(Patience(seconds=5))[0].delay(refused(503, b"{}", "30")) is None


def test_what_would_fail_again_is_not_tried_again() -> None:
    assert tries(Patience())[0].delay(refused(400, b"{}")) is None
    assert tries(Patience())[0].delay(refused(503, b"{}", should_retry="false")) is None


def test_errors_tell_kind_field_and_remedy() -> None:
    body = {"error": {"message": "'at' is 7, but must be ...", "code": "invalid_field", "param": "at"}}
    error = refused(400, msgspec.json.encode(body))
    assert isinstance(error, InvalidRequest) and not error.is_retryable
    assert (error.kind, error.param, error.status, str(error)) == ("invalid_field", "at", 400, error.message)
    busy = told_error({"message": "Too many calls are waiting.", "code": "overloaded", "param": None})
    assert isinstance(busy, Busy) and busy.is_retryable
    assert busy.remedy in str(busy)
    assert set(REMEDIES) <= set(KINDS)


@pytest.mark.parametrize("body", [b"", b"<html>Bad", b"\xff\xfe", b'{"error": "text"}', b"[]", b"null"])
def test_an_error_that_is_not_the_servers_is_told_by_its_status(body: bytes) -> None:
    error = refused(502, body)
    assert (error.kind, isinstance(error, Busy)) == ("http_502", True)
    assert isinstance(refused(500, body), ServerFault)
    assert isinstance(told_error({}), TetrarchError)


def test_a_run_may_be_asked_for_all_that_the_server_takes() -> None:
    names = {field.name for field in msgspec.structs.fields(RunRequest)} - {*CHAT_ONLY, *HIDDEN, "fork"}
    assert set(get_type_hints(RunFields)) == names
    body = encode_body({"flow_class": "bulk", "budget": Budget(output_tokens=5), "label": None})
    assert msgspec.json.decode(body, type=RunRequest).flow_class == "bulk"
    assert b"label" not in body


@pytest.mark.parametrize("url", ["127.0.0.1:8114", "", "ftp://x"])
def test_an_address_without_a_scheme_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="must begin with http"):
        Client(url)


def test_a_budget_tells_what_is_left_of_what_is_limited() -> None:
    usage = RunUsage(prompt_tokens=9, completion_tokens=30)
    use = budget_use(Budget(output_tokens=20, wall_ms=5000), usage, 2000)
    assert use.left == Budget(output_tokens=0, wall_ms=3000)
    assert (use.used.prompt_tokens, use.used.wall_ms) == (9, 2000)
