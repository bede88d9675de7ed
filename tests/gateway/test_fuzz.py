"""Every operation of the API's own description, asked as it says and as it does not: nothing breaks or leaks.

Real runs on a real Valkey; only the engine is a fake, which answers at once. What is well formed may still
be refused (a schema cannot tell of templates and contexts), so that alone is not checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.http.openapi import document
from gateway.http.routes import ROUTES
from tests.conftest import ValkeyServer

from .native_client import NativeClient
from .talking_engine import TalkingEngine
from .test_native_real import serving

load_all_checks()
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SCHEMA = schemathesis.openapi.from_dict(document(ROUTES))
OPERATIONS: dict[str, Any] = {
    found.ok().label: found.ok() for found in SCHEMA.get_all_operations() if isinstance(found, Ok)
}
SECONDS = 10.0
"""A call that takes longer hangs."""

NUM_EXAMPLES, NUM_EXAMPLES_SLOW = 5, 300


@pytest.fixture
async def client(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[NativeClient]:
    async with TalkingEngine(valkey.url, lambda prompt: "Yes."), serving(valkey.url, tmp_path) as started:
        yield started


def bounded(case: Case[Any]) -> Case[Any]:
    """The same call, but none that waits for what never comes, as the caller asked."""
    query: dict[str, Any] = dict(case.query or {})
    if case.path.endswith("/events"):
        case.query = query | {"follow": "false"}
    elif case.path.endswith("/wait"):
        case.query = query | ({"timeout_ms": 10} if case.method == "GET" else {})
        body: Any = case.body
        if isinstance(body, dict) and isinstance(body.get("timeout_ms"), int | float):
            body["timeout_ms"] = min(body["timeout_ms"], 10)
    return case


def ask_all(url: str, label: str, num_examples: int) -> None:
    """Asks one operation so many times: by its description and against it."""
    operation = OPERATIONS[label]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in GenerationMode])

    @settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=num_examples == NUM_EXAMPLES,  # only a soak looks for news
    )
    @given(case=cases)
    def ask(case: Case[Any]) -> None:
        response = bounded(case).call(base_url=url, timeout=SECONDS)
        assert response.status_code != 500, (case.as_curl_command(), response.text)
        case.validate_response(response, checks=CHECKS)

    ask()


async def ask_and_look(client: NativeClient, labels: list[str], num_examples: int) -> None:
    for label in labels:
        await asyncio.to_thread(ask_all, client.url, label, num_examples)
    async with asyncio.timeout(SECONDS):
        while not await is_idle(client):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)


async def is_idle(client: NativeClient) -> bool:
    """No run is left, and no place in line is taken."""
    status, told = await client.call("GET", "/health")
    assert status == 200
    return not told["gateway"]["runs_live"] and not told["gateway"]["runs_waiting"]


def test_every_route_is_asked() -> None:
    assert len(OPERATIONS) == len(ROUTES)


async def test_nothing_that_is_asked_breaks_the_server(client: NativeClient) -> None:
    await ask_and_look(client, list(OPERATIONS), NUM_EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("label", OPERATIONS)
async def test_nothing_that_is_asked_for_long_breaks_the_server(client: NativeClient, label: str) -> None:
    await ask_and_look(client, [label], NUM_EXAMPLES_SLOW)
