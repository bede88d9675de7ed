"""What stands on the bus about engines may be anything: an unreadable one costs nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis import Redis

from gateway.bus import Bus
from gateway.flow.directory import Directory
from tests.conftest import Logged, ValkeyServer
from workers.messages import ENGINES_KEY, encode, engine_key, engine_lease_key, tokenizer_key

from .fake_engine import FakeEngine, until


@asynccontextmanager
async def directory(url: str, **settings: Any) -> AsyncIterator[Directory]:
    bus = Bus(url, "g1")
    await bus.start()
    found = Directory(bus, **settings)
    try:
        yield found
    finally:
        await found.stop()
        await bus.stop()


def ids(found: Directory) -> list[str]:
    return [view.info.engine_id for view in found.engines()]


def rubbish_info(client: Redis) -> None:
    client.hset(engine_key("bad"), "info", b"\xff rubbish")


def rubbish_stats(client: Redis) -> None:
    info = FakeEngine("unix:///none", engine_id="bad").info
    client.hset(engine_key("bad"), mapping={"info": encode(info), "stats": encode({"ready": "perhaps"})})


def rubbish_tokenizer(client: Redis) -> None:
    rubbish_stats(client)
    client.hdel(engine_key("bad"), "stats")
    client.set(tokenizer_key("digest-1"), b"rubbish")


def another_type(client: Redis) -> None:
    client.set(engine_key("bad"), b"no hash")
    client.hset(engine_lease_key("bad"), "no", "string")


@pytest.mark.parametrize("spoil", [rubbish_info, rubbish_stats, another_type])
async def test_an_unreadable_engine_is_skipped_and_told_once(
    valkey: ValkeyServer, logged: Logged, spoil: Callable[[Redis], None]
) -> None:
    with valkey.client() as client:
        client.sadd(ENGINES_KEY, "bad")
        spoil(client)
        async with FakeEngine(valkey.url), directory(valkey.url) as found:
            await found.start()
            for _ in range(3):
                await found.refresh()
            assert ids(found) == ["e1"]
            (line,) = logged.lines("engine_unreadable")
            assert line["engine"] == "bad"
            client.delete(engine_key("bad"), engine_lease_key("bad"))
            async with FakeEngine(valkey.url, engine_id="bad"):
                await found.refresh()
                assert ids(found) == ["bad", "e1"]


async def test_an_unreadable_tokenizer_is_skipped(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        client.sadd(ENGINES_KEY, "bad")
        rubbish_tokenizer(client)
        async with directory(valkey.url) as found:
            await found.start()
            assert ids(found) == []


async def test_a_lease_that_is_no_number_is_nobodys(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        async with FakeEngine(valkey.url, engine_id="e2") as engine, directory(valkey.url) as found:
            await found.start()
            await engine.die()
            client.set(engine_lease_key("e2"), b"rubbish")
            await found.refresh()
            assert [view.alive for view in found.engines()] == [False]


async def test_a_fault_in_one_listener_stops_neither_the_others_nor_the_looking(
    valkey: ValkeyServer, logged: Logged
) -> None:
    looks: list[int] = []
    async with directory(valkey.url) as found:
        found.on_poll += [lambda: [].clear(1), lambda: looks.append(1)]  # type: ignore[call-arg]
        await found.start()
        await until(lambda: len(looks) == 2)
    (line,) = logged.lines("fault")
    assert line["exception"] == "TypeError"


async def test_a_fault_while_looking_is_told_and_the_next_look_comes(
    valkey: ValkeyServer, logged: Logged
) -> None:
    with valkey.client() as client:
        async with directory(valkey.url) as found:
            await found.start()
            client.set(ENGINES_KEY, b"no set")
            await until(lambda: bool(logged.lines("fault")))
            client.delete(ENGINES_KEY)
            async with FakeEngine(valkey.url):
                await until(lambda: ids(found) == ["e1"])


async def test_an_engine_that_was_away_for_long_leaves_the_list(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        async with (
            FakeEngine(valkey.url, engine_id="old") as old,
            FakeEngine(valkey.url),
            directory(valkey.url, forget_seconds=0.1) as found,
        ):
            await found.start()
            await old.die()
            await found.refresh()
            assert ids(found) == ["e1", "old"]
            await asyncio.sleep(0.2)
            await found.refresh()
            assert ids(found) == ["e1"]
            assert client.smembers(ENGINES_KEY) == {b"e1"}
            await old.restart()
            await found.refresh()
            assert ids(found) == ["e1", "old"]
