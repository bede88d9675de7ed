"""What callers may do: scopes, groups, rates, pages of other origins, and the audit of control verbs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.bus import Bus
from gateway.callers.scopes import SCOPES, Access, Scope, namespace_of
from gateway.callers.tokens import Grant, TokenStore
from gateway.errors import KINDS
from gateway.http.app import Parts, build_app
from gateway.http.route import JSON as JSON_MEDIA
from gateway.http.routes import ROUTES
from gateway.settings import GatewaySettings
from gateway.store.store import store_in
from metrics.instruments import Instruments

from .fake_runs import FakeDirectory, FakeRuns, engine_view, words
from .http_gateway import CHAT, HELLO, JSON, Gateway, Start
from .samples import chatml_bundle

CANCEL = "/v1/sessions/s/cancel"


def bearer(gateway: Gateway, name: str, **grant: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {gateway.tokens.add(name, Grant(**grant))}"}


def test_every_route_has_a_scope_and_every_control_is_audited() -> None:
    assert ROUTES
    for route in ROUTES:
        assert route.scope in SCOPES, route.path
        assert route.scope == "read" or route.method != "GET", route.path
        if route.method == "DELETE" or "cancel" in route.path:
            assert route.verb, route.path
        assert not route.verb or route.scope != "read", route.path
        assert route.summary.endswith("."), route.path


def test_the_table_is_all_that_the_application_serves(tmp_path: Path) -> None:
    runs, directory = FakeRuns(words()), FakeDirectory(engine_view(chatml_bundle()))
    tokens = TokenStore(tmp_path / "tokens.json")
    store = store_in(Bus("unix:///nowhere/bus.sock", "g"))
    app = build_app(GatewaySettings(), Parts(runs, directory, tokens, Instruments(), store))
    served = [(route.method, route.handler) for route in app.router.routes() if route.method != "HEAD"]
    assert served == [(route.method, route.call) for route in ROUTES]


@pytest.mark.parametrize(
    ("scopes", "statuses"),
    [
        (("read",), (200, 403, 403)),
        (("control",), (403, 200, 200)),
        (("approve",), (403, 403, 403)),
        (("admin",), (200, 200, 200)),
        ((), (403, 403, 403)),
    ],
)
async def test_a_token_without_the_scope_is_refused_by_name(
    gateway: Gateway, scopes: tuple[Scope, ...], statuses: tuple[int, int, int]
) -> None:
    headers = bearer(gateway, "phone", scopes=scopes)
    answers = [
        await gateway.get("/v1/models", headers=headers),
        await gateway.post(json.dumps(HELLO).encode(), headers=headers | JSON),
        await gateway.post(b"{}", CANCEL, headers=headers | JSON),
    ]
    assert tuple(status for status, _ in answers) == statuses
    for (status, body), scope in zip(answers, ("read", "control", "control"), strict=True):
        if status == 403:
            error = body["error"]
            assert error["code"] == "forbidden" and error["type"] == "permission_error"
            assert f"'{scope}'" in error["message"] and "phone" in error["message"]


async def test_local_calls_have_the_scopes_that_settings_give(start: Start) -> None:
    gateway = await start(local_scopes=("read",))
    assert (await gateway.get("/v1/models"))[0] == 200
    status, body = await gateway.post(HELLO)
    assert status == 403 and "without a token" in body["error"]["message"]
    secret = bearer(gateway, "orchestrator")
    assert (await gateway.post(json.dumps(HELLO).encode(), headers=secret | JSON))[0] == 200


async def test_a_group_shares_runs_and_only_an_admin_sees_those_of_others(gateway: Gateway) -> None:
    mine, mate = bearer(gateway, "a", group="team"), bearer(gateway, "b", group="team")
    other, admin = bearer(gateway, "c"), bearer(gateway, "root", scopes=("admin",))
    async with gateway.http.post(gateway.url + CHAT, json=HELLO, headers=mine) as response:
        run = (await response.json())["id"]
    assert gateway.runs.last.order.tenant == "team"
    for headers, status in ((mine, 200), (mate, 200), (admin, 200), (other, 404), ({}, 404)):
        assert (await gateway.get(f"{CHAT}/{run}", headers=headers))[0] == status


async def test_an_admin_that_looks_on_and_leaves_takes_no_run_along(gateway: Gateway) -> None:
    mine, admin = bearer(gateway, "a"), bearer(gateway, "root", scopes=("admin",))
    await gateway.post(json.dumps(HELLO).encode(), headers=mine | JSON)
    order = gateway.runs.last.order
    gateway.runs.script = lambda order: [30.0, *words("late")(order)]
    run_id = await gateway.runs.start(order)
    for headers, cancelled in ((admin, []), (mine, [run_id])):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await gateway.get(f"{CHAT}/{run_id}", headers=headers)
        await asyncio.sleep(0.1)
        assert gateway.runs.cancelled == cancelled


async def test_tenants_share_prefixes_only_where_settings_say(start: Start) -> None:
    gateway = await start(shared_prefixes=("a", "b", "local"))
    told = {}
    for name in ("a", "b", "c"):
        headers = bearer(gateway, name)
        await gateway.post(json.dumps(HELLO).encode(), headers=headers | JSON)
        told[gateway.runs.last.order.tenant] = gateway.runs.last.order.namespace
    await gateway.post(HELLO)
    told[gateway.runs.last.order.tenant] = gateway.runs.last.order.namespace
    assert told["a"] == told["b"] == told[""] and told["c"] == ""
    assert "\0" in told["a"]  # no token can have that name


def test_a_namespace_is_the_same_in_whatever_order_it_is_told() -> None:
    assert namespace_of("a", ["b", "a"]) == namespace_of("b", ["a", "b", "b"]) != ""
    assert namespace_of("", ["a"]) == namespace_of("c", ["a", "local"]) == ""
    assert Access().may("read") is False


async def test_calls_beyond_a_tokens_rate_are_told_when_to_come_back(start: Start) -> None:
    gateway = await start(calls_per_minute=2)
    usual, own = bearer(gateway, "usual"), bearer(gateway, "own", calls_per_minute=3)
    free = bearer(gateway, "free", calls_per_minute=0)
    for headers, num_taken in ((usual, 2), (own, 3)):
        for _ in range(num_taken):
            assert (await gateway.get("/v1/models", headers=headers))[0] == 200
        async with gateway.http.get(gateway.url + "/v1/models", headers=headers) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["Retry-After"]) <= 30
            assert response.headers["x-should-retry"] == "true"
            assert (await response.json())["error"]["code"] == "rate_limited"
        for path in ("/health", "/ready", "/metrics"):
            async with gateway.http.get(gateway.url + path, headers=headers) as response:
                assert response.status == 200
    for headers in (free, {}):
        assert [(await gateway.get("/v1/models", headers=headers))[0] for _ in range(5)] == [200] * 5


ORIGINS = {
    "http://evil.example": 403,
    "null": 403,
    "": 403,
    "http://localhost:3000": 403,
    "http://127.0.0.1.evil.example": 403,
    "HTTPS://Phone.example": 200,
    "https://phone.example:444": 403,
}


@pytest.mark.parametrize("origin", ORIGINS)
async def test_a_page_of_another_origin_is_refused_without_cors(start: Start, origin: str) -> None:
    gateway = await start(allowed_origins=("https://phone.example",))
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    upgrade = headers | {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    for method, path, sent in (
        ("GET", "/v1/models", headers),
        ("POST", CHAT, headers),
        ("OPTIONS", CHAT, headers),
        ("GET", "/v1/models", upgrade),
    ):
        data = json.dumps(HELLO).encode() if method == "POST" else None
        kind = JSON if method == "POST" else {}
        async with gateway.http.request(
            method, gateway.url + path, headers=sent | kind, data=data
        ) as response:
            expected = 405 if method == "OPTIONS" and ORIGINS[origin] == 200 else ORIGINS[origin]
            assert response.status == expected
            assert not any(name.lower().startswith("access-control") for name in response.headers)
            if expected == 403:
                assert (await response.json())["error"]["code"] == "origin_not_allowed"


async def test_the_servers_own_pages_may_call(gateway: Gateway) -> None:
    host = gateway.url.removeprefix("http://")
    for origin in (f"http://{host}", f"https://{host.upper()}"):
        assert (await gateway.get("/v1/models", headers={"Origin": origin}))[0] == 200
    assert (await gateway.get("/v1/models", headers={"Origin": "http://localhost"}))[0] == 403


async def test_options_is_no_way_in(gateway: Gateway) -> None:
    async with gateway.http.options(gateway.url + CHAT) as response:
        assert response.status == 405 and response.headers["Allow"] == "POST"
        assert not any(name.lower().startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.method == "POST"], ids=lambda r: r.path)
async def test_every_post_wants_json_of_bounded_size(start: Start, route: Any) -> None:
    gateway = await start(body_limit_bytes=2048)
    path = gateway.url + "/".join("x" if "{" in part else part for part in route.path.split("/"))
    async with gateway.http.post(path, data=b"{}", headers={"Content-Type": "text/plain"}) as response:
        assert response.status == 415
    async with gateway.http.post(path, data=b" " * 4096, headers=JSON) as response:
        assert response.status == 413
    async with gateway.http.post(path, data=b"{", headers=JSON) as response:
        assert response.status in ((400, 404) if "{id}" in route.path else (400,))
        assert response.content_type == JSON_MEDIA
        assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_streams_and_errors_carry_their_ids(gateway: Gateway) -> None:
    async with gateway.http.post(gateway.url + CHAT, json={**HELLO, "stream": True}) as response:
        assert response.headers["request-id"].startswith("req-")
        assert response.headers["x-tetrarch-run"] == response.headers["x-tetrarch-run"] != ""
    async with gateway.http.post(gateway.url + CHAT, json={}) as response:
        assert response.status == 400 and response.headers["request-id"]


def lines(home: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (home / "audit.jsonl").read_text().splitlines()]


async def written(home: Path, num_lines: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(5):
        while not (home / "audit.jsonl").exists() or len(lines(home)) < num_lines:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return lines(home)


async def test_every_control_verb_is_noted_refused_ones_too(start: Start, tmp_path: Path) -> None:
    gateway = await start(home=tmp_path)
    control, watcher = bearer(gateway, "phone"), bearer(gateway, "watcher", scopes=("read",))
    private = json.dumps({"agent": "the secret words"}).encode()
    asks: list[dict[str, str]] = [
        control,
        watcher,
        {"X-Forwarded-For": "1.2.3.4"},
        {"Origin": "http://x.example"},
    ]
    for headers in asks:
        await gateway.post(private, "/v1/sessions/night%0Ashift/cancel", headers=headers | JSON)
    await gateway.get("/v1/models", headers=control)
    await gateway.post(HELLO)
    noted = await written(tmp_path, 4)
    assert [(entry["status"], entry["error"], entry["token"]) for entry in noted] == [
        (200, "", "phone"),
        (403, "forbidden", "watcher"),
        (401, "unauthorized", ""),
        (403, "origin_not_allowed", ""),
    ]
    for entry in noted:
        assert entry["verb"] == "cancel_session" and entry["ids"] == {"session": "nightshift"}
        assert entry["request_id"].startswith("req-") and entry["peer"] == "127.0.0.1"
    assert "secret words" not in (tmp_path / "audit.jsonl").read_text()


async def test_the_audit_names_the_tenant_whose_session_an_admin_ends(start: Start, tmp_path: Path) -> None:
    gateway = await start(home=tmp_path)
    root = bearer(gateway, "root", scopes=("admin",))
    await gateway.post(b"{}", f"{CANCEL}?tenant=phone", headers=root | JSON)
    [noted] = await written(tmp_path, 1)
    assert (noted["status"], noted["ids"]) == (200, {"session": "s", "tenant": "phone"})


async def test_an_audit_that_cannot_be_written_breaks_no_call(start: Start, tmp_path: Path) -> None:
    gateway = await start(home=tmp_path / "gone")
    assert (await gateway.post(b"{}", CANCEL))[0] == 200


async def test_a_client_that_leaves_is_noted_as_gone(start: Start, tmp_path: Path) -> None:
    gateway = await start(home=tmp_path)
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {CANCEL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n".encode())
    writer.write(b"Content-Type: application/json\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    (entry,) = await written(tmp_path, 1)
    assert entry["status"] in (400, 499)


def test_kinds_of_refusal_are_told_by_their_status() -> None:
    assert {KINDS[kind].status for kind in ("forbidden", "origin_not_allowed")} == {403}
    assert KINDS["rate_limited"].status == 429 and KINDS["rate_limited"].retryable


async def test_both_sdks_read_the_models(gateway: Gateway) -> None:
    status, body = await gateway.get("/v1/models")
    assert status == 200 and body["has_more"] is False
    (model,) = body["data"]
    assert body["first_id"] == body["last_id"] == model["id"]
    assert model["object"] == model["type"] == "model" and model["created_at"].endswith("Z")
    assert model["tetrarch"]["context_length"] == model["context_length"]
    for name in (model["id"], "claude-sonnet-4-5", "default"):
        assert (await gateway.get(f"/v1/models/{name}"))[1] == model
    assert (await gateway.get("/v1/models/llama"))[0] == 404


async def test_hermes_probe_reads_the_context_length_in_lm_studios_words(gateway: Gateway) -> None:
    status, body = await gateway.get("/api/v1/models")
    (model,) = body["models"]
    served = (await gateway.get("/v1/models"))[1]["data"][0]
    assert status == 200 and model["key"] == served["id"]
    assert model["loaded_instances"][0]["config"]["context_length"] == served["context_length"]


async def test_another_models_name_is_answered_under_the_real_one(gateway: Gateway) -> None:
    gateway.runs.script = words("Hi")
    served = (await gateway.get("/v1/models"))[1]["data"][0]["id"]
    for name in ("claude-opus-4", "gpt-5.1"):
        status, body = await gateway.post({**HELLO, "model": name})
        assert status == 200 and body["model"] == served
    status, body = await gateway.post({**HELLO, "model": "llama-3"})
    assert status == 404 and "llama-3" in body["error"]["message"]
