"""Requests that no HTTP client would send: whatever comes over a socket, it is its sender's error.

Or, where the sender leaves in the midst of it, by nothing; and nothing is left behind either way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import Logged, ValkeyServer

from .fuzz_seeds import SEEDS
from .fuzz_world import FAULTS, SECONDS, HoldingEngine, World
from .test_native_real import serving

PLACES = {"{id}": "run-" + "0" * 32, "{session}": "s", "{model}": "model"}


def path_of(label: str) -> str:
    """An operation's path, with ids of nothing."""
    path = label.partition(" ")[2]
    for name, value in PLACES.items():
        path = path.replace(name, value)
    return path


POSTS = [path_of(label) for label in SEEDS if label.startswith("POST")]
METHODS = ("OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "X")
GOOD = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "max_tokens": 5}).encode()

BODIES: dict[str, bytes] = {
    "empty": b"",
    "NUL bytes": b"\0\0\0\0",
    "NUL in JSON": b'{"input": "\0", "messages": []}',
    "a cut off body": GOOD[:20],
    "no UTF-8": b'{"input": "\xff\xfe\xed\xa0\x80"}',
    "UTF-16": '{"input": "Hi"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "two values": GOOD + GOOD,
    "a comma too much": b'{"input": "Hi",}',
    "single quotes": b"{'input': 'Hi'}",
    "no object": b'["input"]',
    "a bare NaN": b'{"max_tokens": NaN, "input": "Hi", "messages": []}',
    "an infinite exponent": b'{"max_tokens": 1e999, "input": "Hi", "messages": []}',
    "a number of 5000 digits": b'{"max_tokens": ' + b"9" * 5000 + b', "input": "Hi", "messages": []}',
    "a field twice": b'{"input": "Hi", "input": 5, "messages": [], "messages": 5}',
    "deep lists": b'{"input": ' + b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a lone surrogate": b'{"input": "\\ud800", "text": "\\udfff", "messages": [{"role": "\\ud800"}]}',
    "an escape cut off": b'{"input": "\\u12',
    "a megabyte of spaces": b" " * (1 << 20) + b"5",
}

HEADS: list[tuple[tuple[bytes, ...], bytes]] = [
    ((b"Content-Length: 5",), GOOD),  # the rest looks like a second request
    ((b"Content-Length: -1",), GOOD),
    ((b"Content-Length: x",), GOOD),
    ((b"Content-Length: 5", b"Content-Length: 6"), GOOD),
    ((b"Content-Length: 5", b"Transfer-Encoding: chunked"), b"5\r\nhello\r\n0\r\n\r\n"),
    ((b"Content-Length: 99999999999999999999",), GOOD),
    ((b"Transfer-Encoding: chunked",), b"zz\r\nhello\r\n"),
    ((b"Transfer-Encoding: chunked",), b"-5\r\nhello\r\n0\r\n\r\n"),
    ((b"Transfer-Encoding: chunked",), b"ffffffffffffffffffff\r\nhello"),
    ((b"Transfer-Encoding: chunked",), b"5\r\nhelloworld\r\n0\r\n\r\n"),
    ((b"Transfer-Encoding: chunked",), b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)),
    ((b"Transfer-Encoding: gzip, chunked",), b"5\r\nhello\r\n0\r\n\r\n"),
    ((b"Content-Encoding: gzip", b"Content-Length: 5"), b"hello"),
    ((b"Content-Encoding: br", b"Content-Length: 5"), b"hello"),
    ((b"Content-Encoding: zstd", b"Content-Length: 5"), b"hello"),
    ((b"Content-Encoding: x", b"Content-Length: 5"), b"hello"),
    ((b"X-Y: " + b"y" * 20_000, b"Content-Length: 0"), b""),
    ((b"X-Y: \0", b"Content-Length: 0"), b""),
    ((b"X-Y\0: y", b"Content-Length: 0"), b""),
    ((b"no colon", b"Content-Length: 0"), b""),
    ((b" folded", b"Content-Length: 0"), b""),
    (tuple(b"X-%d: y" % number for number in range(2000)), b""),
]


@pytest.fixture
async def world(valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[World]:
    async with HoldingEngine(valkey.url), serving(valkey.url, tmp_path) as client:
        started = World(client.url)
        yield started
        started.close()


async def send(world: World, *pieces: bytes, reads: bool = True) -> bytes:
    """All that the server answers until it closes; or nothing, where the sender leaves at once."""
    host, _, port = world.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), SECONDS) if reads else b""
    finally:
        writer.close()


def head(path: str, *lines: bytes, method: str = "POST") -> bytes:
    """A request's head."""
    first = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    return (
        first + b"Content-Type: application/json\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    )


def assert_told(answer: bytes, about: object) -> None:
    """One whole answer with a status that blames the sender, or none of both."""
    first, _, rest = answer.partition(b"\r\n")
    status = int(first.split()[1])
    assert 200 <= status < 500, (about, answer)
    headers, _, body = rest.partition(b"\r\n\r\n")
    if b"application/json" in headers and b"chunked" not in headers:
        assert json.loads(body), (about, answer)


async def test_no_body_breaks_the_server(world: World, logged: Logged) -> None:
    for path in POSTS:
        for kind, body in BODIES.items():
            answer = await send(world, head(path, b"Content-Length: %d" % len(body)), body)
            assert_told(answer, (path, kind))
    await asyncio.to_thread(world.clear)
    assert not logged.lines(*FAULTS)


async def test_no_head_breaks_the_server(world: World, logged: Logged) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/runs", "/v1/runs/wait"):
        for lines, body in HEADS:
            assert_told(await send(world, head(path, *lines), body), (path, lines))
    await asyncio.to_thread(world.clear)
    assert not logged.lines(*FAULTS)


async def test_a_client_that_leaves_before_its_body_is_whole_leaves_nothing(
    world: World, logged: Logged
) -> None:
    for path in POSTS:
        for lines, body in (
            ((b"Content-Length: %d" % (len(GOOD) + 5),), GOOD),
            ((b"Transfer-Encoding: chunked",), b"%x\r\n%s" % (len(GOOD), GOOD)),
            ((b"Content-Length: 50000000",), GOOD),
        ):
            await send(world, head(path, *lines), body, reads=False)
            await send(world, head(path, *lines)[:-7], reads=False)
    await asyncio.to_thread(world.clear)
    assert not logged.lines(*FAULTS)


async def test_a_client_that_leaves_at_any_moment_takes_its_call_along(world: World, logged: Logged) -> None:
    for path, seeds in ((label.partition(" ")[2], seeds) for label, seeds in SEEDS.items()):
        for seed in seeds:
            if seed.body is None or "{" in path or "@" in str(seed.body):
                continue
            body = json.dumps(seed.body).encode()
            whole = head(path, b"Content-Length: %d" % len(body))
            for milliseconds in (0, 2, 10):
                host, _, port = world.url.removeprefix("http://").rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(whole + body)
                await asyncio.sleep(milliseconds / 1000)
                writer.close()
    await asyncio.to_thread(world.clear)
    assert not logged.lines(*FAULTS)


async def test_no_method_breaks_the_server(world: World, logged: Logged) -> None:
    for path in map(path_of, SEEDS):
        for method in METHODS:
            assert_told(await send(world, head(path, method=method)), (method, path))
        if not path.endswith("/events"):
            answer = await send(world, head(path, method="HEAD"))
            assert 200 <= int(answer.split()[1]) < 500 and answer.endswith(b"\r\n\r\n"), (path, answer)
    await asyncio.to_thread(world.clear)
    assert not logged.lines(*FAULTS)


async def test_requests_one_behind_the_other_are_all_answered(world: World, logged: Logged) -> None:
    """Also those behind one that was refused."""
    keep = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    bodies = [GOOD, b"{", b"", GOOD.replace(b"Hi", b"\\ud800")]
    requests = b"".join(keep + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in bodies)
    answer = await send(world, requests, head("/v1/models", method="GET"))
    assert answer.count(b"HTTP/1.1 ") == len(bodies) + 1, answer
    assert b"HTTP/1.1 500" not in answer
    await asyncio.to_thread(world.clear)
    assert not logged.lines(*FAULTS)
