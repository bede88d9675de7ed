"""Who may call: Host, tokens, content types and sizes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from .http_gateway import CHAT, HELLO, JSON, Gateway, Start


async def test_an_unknown_host_is_turned_away_first(start: Start) -> None:
    gateway = await start(allowed_hosts=("Mac.tail1234.ts.net",))
    for host, expected in {
        "localhost": 200, "127.0.0.1:99": 200, "[::1]:5": 200, "LOCALHOST": 200,
        "evil.example": 421, "127.0.0.1.evil.example": 421, "": 421, "localhost.": 421, "[::1": 421,
        "a:b:c": 421,        "mac.tail1234.ts.net": 401, "mac.tail1234.ts.net:443": 401,
    }.items():  # fmt: skip
        status, body = await gateway.get("/v1/models", headers={"Host": host})
        assert status == expected, (host, body)
    status, _ = await gateway.post(b"{}", headers={"Host": "evil.example", **JSON})
    assert status == 421


async def test_the_address_that_was_called_is_a_known_host_but_not_a_local_one(start: Start) -> None:
    gateway = await start(host="0.0.0.0")
    port = gateway.url.rsplit(":", 1)[1]
    for address in ("127.0.0.1", "127.1.2.3"):
        expected = 200 if address == "127.0.0.1" else 401
        async with gateway.http.get(f"http://{address}:{port}/v1/models") as response:
            assert response.status == expected
    async with gateway.http.get(f"http://127.0.0.1:{port}/ready", headers={"Host": "10.0.0.1"}) as response:
        assert response.status == 421


@pytest.mark.parametrize("header", ["X-Forwarded-For", "x-forwarded-proto", "Forwarded", "X-Real-IP", "Via"])
async def test_a_forwarded_call_needs_a_token(gateway: Gateway, header: str) -> None:
    assert (await gateway.get("/v1/models", headers={header: "127.0.0.1"}))[0] == 401
    secret = gateway.tokens.add("phone")
    for name, value in {"Authorization": f"Bearer {secret}", "x-api-key": secret}.items():
        assert (await gateway.get("/v1/models", headers={header: "1.2.3.4", name: value}))[0] == 200
    for wrong in (f"Bearer {secret}x", f"Basic {secret}", "Bearer", "Bearer ü"):
        headers = {header: "1.2.3.4", "Authorization": wrong}
        status, body = await gateway.get("/v1/models", headers=headers)
        assert status == 401 and secret not in json.dumps(body)
    gateway.tokens.revoke("phone")
    headers = {header: "1.2.3.4", "x-api-key": secret}
    assert (await gateway.get("/v1/models", headers=headers))[0] == 401


@pytest.mark.parametrize("name", ["Authorization", "x-api-key"])
async def test_a_local_call_may_bring_any_key_while_there_are_no_tokens(gateway: Gateway, name: str) -> None:
    for dummy in ("Bearer not-needed", "none", "Bearer"):
        assert (await gateway.get("/v1/models", headers={name: dummy}))[0] == 200
    gateway.tokens.add("phone")
    gateway.tokens.revoke("phone")
    assert (await gateway.get("/v1/models", headers={name: "Bearer not-needed"}))[0] == 200


@pytest.mark.parametrize("name", ["Authorization", "x-api-key"])
async def test_a_wrong_token_is_refused_on_this_machine_too(gateway: Gateway, name: str) -> None:
    """Taken for a call without one it would run as somebody else, and nobody would see why."""
    mode = "Bearer " if name == "Authorization" else ""
    secret, gone = gateway.tokens.add("phone"), gateway.tokens.add("gone")
    gateway.tokens.revoke("gone")
    for wrong in (gone, f"{secret}x", "not-needed"):
        status, body = await gateway.get("/v1/models", headers={name: mode + wrong})
        assert (status, body["error"]["code"]) == (401, "unauthorized")
        assert "none of this server's" in body["error"]["message"] and wrong not in json.dumps(body)
    assert (await gateway.get("/v1/models", headers={name: mode + secret}))[0] == 200
    assert (await gateway.get("/v1/models"))[0] == 200


async def test_tenants_do_not_read_each_others_runs(gateway: Gateway) -> None:
    secret = gateway.tokens.add("phone")
    mine = {"Authorization": f"Bearer {secret}"}
    async with gateway.http.post(gateway.url + CHAT, json=HELLO, headers=mine) as response:
        body = await response.json()
    assert gateway.runs.last.order.tenant == "phone"
    assert (await gateway.get(f"{CHAT}/{body['id']}"))[0] == 404
    assert (await gateway.get(f"{CHAT}/{body['id']}", headers=mine))[0] == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", None]
)
async def test_a_body_that_is_not_declared_json_is_refused(gateway: Gateway, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    skip = [] if kind else ["Content-Type"]
    async with gateway.http.post(
        gateway.url + CHAT, data=json.dumps(HELLO).encode(), headers=headers, skip_auto_headers=skip
    ) as response:
        assert response.status == 415
        assert "application/json" in (await response.json())["error"]["message"]


async def test_a_body_over_the_limit_is_413(start: Start) -> None:
    gateway = await start(body_limit_bytes=2048)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 1024

    for data in (b"x" * 65_536, endless()):
        status, body = await gateway.post(data)
        assert status == 413 and "2048" in body["error"]["message"]
    assert (await gateway.post(HELLO))[0] == 200


async def test_every_answer_has_a_request_id(gateway: Gateway) -> None:
    async with gateway.http.get(gateway.url + "/nowhere") as response:
        assert response.headers["x-request-id"].startswith("req-")
    async with gateway.http.post(
        gateway.url + CHAT, json=HELLO, headers={"x-request-id": "mine-1"}
    ) as response:
        assert response.headers["x-request-id"] == "mine-1"
        assert response.headers["x-tetrarch-run"] in gateway.runs.runs


@pytest.mark.parametrize(
    "head",
    [
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost",
        b"GET /v1/models/\xc3\x28%ff HTTP/1.1\r\nHost: localhost",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: \xff\xfe\r\nx-agent: \xff",
        b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost",
        b"GET /v1/models HTTP/1.1",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 3",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json;\r\n"
        b"Content-Length: 0",
        b"BREW /v1/completions HTTP/1.1\r\nHost: localhost",
        b"GET /v1/chat/completions/run-%00 HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 1-1",
        b"\x00\x01\x02",
    ],
)
async def test_odd_requests_get_a_4xx_and_no_incident(
    gateway: Gateway, head: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + b"\r\nConnection: close\r\n\r\nabc")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    status = int(answer.split()[1])
    assert status == 200 or 400 <= status < 500, answer
    output = capsys.readouterr()
    assert "incident" not in output.out + output.err
