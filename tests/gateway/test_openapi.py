"""The description of the API: valid, complete, and true of what is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from gateway.bus import BusLost
from gateway.http.openapi import document, public_path
from gateway.http.routes import ROUTES
from gateway.native.streaming import SessionVoice
from gateway.native.telling import failure_frames

from .fake_runs import words
from .http_gateway import CHAT, HELLO, TEXT, Gateway, chunks_of

DOCUMENT: dict[str, Any] = json.loads(json.dumps(document(ROUTES)))
WITH_LOGPROBS = {**HELLO, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}


def check(value: Any, path: str, method: str = "get", status: str = "200", *, is_event: bool = False) -> None:
    """The answer has the shape that its route tells."""
    content = DOCUMENT["paths"][path][method]["responses"][status]["content"]
    shape = content["text/event-stream" if is_event else "application/json"]["schema"]
    if is_event:
        data = shape["properties"]["data"]
        shape = data.get("anyOf", [data])[-1]["contentSchema"]
    Draft202012Validator({**shape, "components": DOCUMENT["components"]}).validate(value)


def test_the_document_is_valid_openapi() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"].startswith("3.1.")


def test_every_route_is_described() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, public_path(route)) for route in ROUTES}
    ids = [
        operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()
    ]
    assert len(set(ids)) == len(ids) == len(ROUTES)


def test_every_post_tells_its_body_and_every_answer_its_shape() -> None:
    for route in ROUTES:
        operation = DOCUMENT["paths"][public_path(route)][route.method.lower()]
        assert ("requestBody" in operation) == (route.body is not None), route.path
        assert any(status.startswith("2") for status in operation["responses"]), route.path
        assert "4XX" in operation["responses"] and "5XX" in operation["responses"]


def test_what_the_server_fills_in_is_no_field_of_a_body() -> None:
    for name in ("ChatRequest", "CompletionRequest"):
        fields = DOCUMENT["components"]["schemas"][name]["properties"]
        assert "model" in fields and not any(field.startswith("raw_") for field in fields)


@pytest.mark.parametrize("name", ["ChatRequest", "RunRequest", "ForkRequest"])
def test_custom_tools_and_their_calls_are_as_described(name: str) -> None:
    shape = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    function = {"function": {"name": "look"}}
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    calls = [function, {"type": "custom", "id": "c", "custom": {"name": "patch", "input": "x"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = {"messages": [message], "tools": [function, custom]}
    Draft202012Validator(shape).validate(whole)
    for bad in ({"type": "custom"}, {"type": "custom", **function}, {"custom": custom["custom"]}):
        assert not Draft202012Validator(shape).is_valid({**whole, "tools": [bad]})
        assert not Draft202012Validator(shape).is_valid({"messages": [{**message, "tool_calls": [bad]}]})


async def test_whoever_has_the_document_is_told_so(gateway: Gateway) -> None:
    url = gateway.url + "/openapi.json"
    async with gateway.http.get(url) as response:
        assert response.status == 200 and await response.json() == DOCUMENT
        tag = response.headers["ETag"]
    for known, status in ((tag, 304), (f'W/"x", {tag}', 304), ('"x"', 200)):
        async with gateway.http.get(url, headers={"If-None-Match": known}) as response:
            assert response.status == status and response.headers["ETag"] == tag


async def test_answers_are_as_described(gateway: Gateway) -> None:
    for path in ("/health", "/ready", "/v1/models", "/api/v1/models"):
        check((await gateway.get(path))[1], path)
    model = (await gateway.get("/v1/models"))[1]["data"][0]["id"]
    check((await gateway.get(f"/v1/models/{model}"))[1], "/v1/models/{model}")
    cancel = "/v1/sessions/{session}/cancel"
    check((await gateway.post(b"{}", cancel.format(session="s")))[1], cancel, "post")
    gateway.bus["up"] = False
    status, body = await gateway.get("/ready")
    assert status == 503
    check(body, "/ready", status="503")


@pytest.mark.parametrize("asked", [HELLO, {**WITH_LOGPROBS, "stream": True}])
async def test_chats_are_as_described(gateway: Gateway, asked: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    gateway.runs.script = words("On it. ", '<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    if asked.get("stream"):
        chunks = chunks_of(await gateway.stream({**asked, "tools": tools}))
        assert len(chunks) > 3
        for chunk in chunks:
            check(chunk, CHAT, "post", is_event=True)
        return
    status, body = await gateway.post({**asked, "tools": tools})
    assert status == 200
    check(body, CHAT, "post")
    check((await gateway.get(f"{CHAT}/{body['id']}"))[1], CHAT + "/{id}")


async def test_texts_are_as_described(gateway: Gateway) -> None:
    status, body = await gateway.post({"prompt": "Once", "logprobs": 2}, TEXT)
    assert status == 200
    check(body, TEXT, "post")
    for chunk in chunks_of(await gateway.stream({"prompt": "Once"}, TEXT)):
        check(chunk, TEXT, "post", is_event=True)


async def test_errors_are_as_described(gateway: Gateway) -> None:
    for body in (b"{", b"{}", b'{"messages": [], "n": 2}'):
        status, error = await gateway.post(body)
        assert status == 400
        check(error, CHAT, "post", status="4XX")


def test_what_streams_say_of_themselves_is_as_described() -> None:
    run, session = "/v1/runs/{id}/events", "/v1/sessions/{session}/events"
    failed = [frame.data for frame in failure_frames(BusLost())]
    for path in (run, session):
        for data in failed:
            check(data, path, is_event=True)
    for frame in SessionVoice().silence().frames:
        check(frame.data, session, is_event=True)
    check(BusLost().body(), CHAT, "post", is_event=True)
