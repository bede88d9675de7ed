"""Every operation of the API's own description, asked as it says and as it does not: nothing breaks or leaks.

Half of the calls aim at live things. Real runs on a real Valkey; only the engine is a fake. What is well
formed may still be refused (a schema cannot tell of templates and contexts), so that alone is not checked.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.http.openapi import document
from gateway.http.routes import ROUTES
from tests.conftest import Logged, ValkeyServer

from .fuzz_seeds import CHATS, MESSAGES, RESPONSES, SEEDS, TEXTS
from .fuzz_world import FAULTS, SECONDS, HoldingEngine, Record, World
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
NUM_EXAMPLES, NUM_EXAMPLES_SLOW = 3, 300


@pytest.fixture
async def world(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[World]:
    async with HoldingEngine(valkey.url), serving(valkey.url, tmp_path) as client:
        started = World(client.url)
        yield started
        started.close()


def aimed(case: Case[Any], kind: str | None, world: World) -> Case[Any]:
    """The same call at a live thing of this kind, and none that waits for what never comes."""
    if kind is not None and case.path_parameters:
        case.path_parameters = dict.fromkeys(case.path_parameters, world.of(kind))
    query: dict[str, Any] = dict(case.query or {})
    if case.path.endswith("/events"):
        case.query = query | {"follow": "false"}
    elif case.path.endswith("/wait"):
        case.query = query | ({"timeout_ms": 10} if case.method == "GET" else {})
        body: Any = case.body
        if isinstance(body, dict) and isinstance(body.get("timeout_ms"), int | float):
            body["timeout_ms"] = min(body["timeout_ms"], 10)
    return case


def ask_all(world: World, label: str, num_examples: int, answers: Counter[str]) -> None:
    """Asks one operation so many times: by its description and against it."""
    operation = OPERATIONS[label]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in GenerationMode])
    aims = [aim for seed in SEEDS[label] for aim in seed.aims if not aim.startswith("live")]
    kinds = st.sampled_from([None, *aims])

    @settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=num_examples == NUM_EXAMPLES,  # only a soak looks for news
        phases=[Phase.generate, Phase.shrink],
    )
    @given(case=cases, kind=kinds)
    def ask(case: Case[Any], kind: str | None) -> None:
        response = aimed(case, kind, world).call(base_url=world.url, timeout=SECONDS)
        answers[str(response.status_code)] += 1
        assert response.status_code != 500, (case.as_curl_command(), response.text)
        case.validate_response(response, checks=CHECKS)

    ask()


def ask_and_look(world: World, labels: list[str], num_examples: int, record: Record) -> None:
    for label in labels:
        answers = Counter[str]()
        ask_all(world, label, num_examples, answers)
        record(label, dict(sorted(answers.items())))
    world.clear()


def test_every_route_is_asked() -> None:
    assert len(OPERATIONS) == len(ROUTES)


STREAMED: list[tuple[str, str, str, Any]] = [
    ("/v1/chat/completions", "POST", "", CHATS[2]),
    ("/v1/completions", "POST", "", TEXTS[1]),
    ("/v1/responses", "POST", "", RESPONSES[1]),
    ("/v1/messages", "POST", "", MESSAGES[2]),
    ("/v1/runs/{id}/events", "GET", "ended", None),
    ("/v1/sessions/{session}/events", "GET", "session", None),
]


def ask_for_stream(world: World, schema: BaseSchema, path: str, method: str, kind: str, body: Any) -> None:
    """Raises FailureGroup for events that are not as the schema tells."""
    operation = schema[path][method]
    given = {"body": body, "media_type": "application/json"} if body is not None else {}
    if kind:
        given |= {"path_parameters": {path.split("{")[1].split("}")[0]: world.of(kind)}}
        given |= {"query": {"follow": "false"}}
    case = operation.Case(**given)
    response = case.call(base_url=world.url, timeout=SECONDS)
    assert response.headers["content-type"][0].startswith("text/event-stream")
    assert response.content.count(b"data: ") > 2
    case.validate_response(response, checks=CHECKS)


def with_a_field_that_no_event_has(path: str, method: str) -> BaseSchema:
    """The description, wrong in one point."""
    told = copy.deepcopy(document(ROUTES))
    content = told["paths"][path][method.lower()]["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    data = data.get("anyOf", [data])[-1]
    data["contentSchema"] = {"allOf": [data["contentSchema"], {"required": ["never"]}]}
    return schemathesis.openapi.from_dict(told)


async def test_each_event_of_a_stream_is_held_to_the_description(world: World) -> None:
    for path, method, kind, body in STREAMED:
        await asyncio.to_thread(ask_for_stream, world, SCHEMA, path, method, kind, body)
        wrong = with_a_field_that_no_event_has(path, method)
        with pytest.raises(FailureGroup, match="SSE event"):
            await asyncio.to_thread(ask_for_stream, world, wrong, path, method, kind, body)
    await asyncio.to_thread(world.clear)


async def test_nothing_that_is_asked_breaks_the_server(
    world: World, logged: Logged, record_testsuite_property: Record
) -> None:
    await asyncio.to_thread(ask_and_look, world, [*OPERATIONS], NUM_EXAMPLES, record_testsuite_property)
    assert not logged.lines(*FAULTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("label", OPERATIONS)
async def test_nothing_that_is_asked_for_long_breaks_the_server(
    world: World, logged: Logged, label: str, record_testsuite_property: Record
) -> None:
    await asyncio.to_thread(ask_and_look, world, [label], NUM_EXAMPLES_SLOW, record_testsuite_property)
    assert not logged.lines(*FAULTS)
