"""servers.md bug 34's kind: no field of the native API, however wrong, drops a socket or is a 500."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.http.api import ChatRequest
from gateway.native import structs
from tests.conftest import ValkeyServer

from .native_gateway import Native, native_gateway

WRONG: list[Any] = [None, "", "\ud800", "x" * 5000, -1, 10**30, float("nan"), True, [None], {"x": {"y": []}}]
QUERIES = ("session", "status", "before", "limit", "after", "ids")
TEXTS = ("", "%00", "%ff", "%ed%a0%80", "-1", "1.0.run-1", "9" * 400)
VERBS: dict[str, type[msgspec.Struct]] = {
    "cancel": structs.CancelRequest,
    "pause": structs.PauseRequest,
    "resume": structs.EmptyRequest,
    "steer": structs.SteerRequest,
    "respond": structs.RespondRequest,
    "heartbeat": structs.EmptyRequest,
    "fork": structs.ForkRequest,
}


@pytest.fixture
async def native(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[Native]:
    async with native_gateway(valkey.url, tmp_path) as gateway:
        yield gateway


def names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


async def check(native: Native, path: str, body: Any) -> None:
    status, told = await native.call("POST", path, json.dumps(body).encode())
    assert status in (200, 202, 400, 404, 409), (path, body, told)
    assert status < 400 or told["error"]["message"]


async def test_no_field_of_a_run_breaks_the_server(native: Native) -> None:
    own = set(names(structs.RunRequest)) - set(names(ChatRequest))  # theirs: test_api.py
    for name in sorted(own | {"messages", "metadata"}):
        for value in WRONG:
            await check(native, "/v1/runs", {"input": "x"} | {name: value})


async def test_no_field_of_a_verb_breaks_the_server(native: Native) -> None:
    run_id = await native.create()
    needed = {"steer": {"text": "x"}, "fork": {"input": "x"}, "respond": {"text": "x"}}
    for verb, kind in VERBS.items():
        for name in ["at", "x"] if verb == "fork" else [*names(kind), "x"]:
            for value in WRONG:
                await check(native, f"/v1/runs/{run_id}/{verb}", needed.get(verb, {}) | {name: value})


async def test_no_field_of_a_batch_or_a_wait_breaks_the_server(native: Native) -> None:
    run_id = await native.create()
    await native.verbs.end(run_id)  # or a wait without a time would take its usual one
    for value in WRONG:
        for runs in (value, [value], [{"input": value}]):
            await check(native, "/v1/runs/batch", {"runs": runs})
        for name in names(structs.WaitRequest):
            await check(native, "/v1/runs/wait", {"ids": [run_id], "timeout_ms": 0} | {name: value})


async def test_no_query_breaks_the_server(native: Native) -> None:
    run_id = await native.create(session="s")
    paths = ("/v1/runs", "/v1/runs/wait", "/v1/sessions/s/tree", "/v1/sessions/x%00/tree")
    streams = (f"/v1/runs/{run_id}/events", "/v1/sessions/s/events")
    for query in QUERIES:
        for value in TEXTS:
            for path in (*paths, *streams):
                asked = f"{native.url}{path}?timeout_ms=0&follow=false&{query}={value}"
                async with native.http.get(asked) as response:
                    assert response.status in (200, 400, 404), (asked, await response.text())
                    await response.read()
