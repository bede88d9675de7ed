"""Small bodies that would grow large, ids that would stop everybody, classes and runs that are not theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.bus import Bus
from gateway.callers.scopes import Access
from gateway.dialects.messages.signature import sign
from gateway.dialects.responses.ids import item_id, seal_reasoning
from gateway.errors import GatewayError, InvalidField
from gateway.http.messages import history as messages_history
from gateway.http.messages.history import MessageParam, read_history
from gateway.http.messages.tools import read_tools
from gateway.http.responses import history, items
from gateway.http.responses.items import to_messages
from gateway.store.responses import StoredResponse
from gateway.store.store import store_in
from gateway.text.structured import check_schema
from tests.conftest import ValkeyServer
from workers.messages import EVENT_FIELD

from .bus_fixture import connected
from .fake_runs import words
from .http_gateway import CHAT, HELLO, JSON, Gateway, Start, until
from .responses_api import RESPONSES, ask, refused
from .test_access import bearer

RESPONSE = f"resp_{'7' * 32}"


@pytest.fixture
async def bus(valkey: ValkeyServer) -> AsyncIterator[Bus]:
    async with connected(valkey.url) as bus:
        yield bus


@pytest.fixture
async def stored(start: Start, bus: Bus) -> Gateway:
    return await start(store=store_in(bus))


@pytest.mark.parametrize(
    "after", ["", "x", "1", "1-", f"{2**64}-1", f"1-{2**64}", "1-1-1", "²-1", "-1-1", "$"]
)
async def test_an_id_that_is_none_does_not_stop_all_readers_of_the_bus(bus: Bus, after: str) -> None:
    await bus.commands.xadd("told", {EVENT_FIELD: b"first"}, id="1-1")
    with pytest.raises(InvalidField):
        bus.follow("told", after)
    follower = bus.follow("told", "0-0")
    try:
        async with asyncio.timeout(5):
            assert (await follower.next()).id == "1-1"
    finally:
        follower.close()
    assert bus.available


@pytest.mark.parametrize("index", ["²", "1" * 5000, "٣", "9"])
def test_a_reference_to_no_place_of_a_list_is_a_named_refusal(index: str) -> None:
    schema = {"anyOf": [{"type": "string"}], "properties": {"a": {"$ref": f"#/anyOf/{index}"}}}
    with pytest.raises(InvalidField) as caught:
        check_schema(schema, "schema")
    assert caught.value.param == "schema.properties.a.$ref"


def test_sealed_reasoning_of_a_body_unpacks_to_a_bounded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "MAX_OPENED_BYTES", 10_000)
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("a" * 4000)}
    assert to_messages([sealed] * 2, None)
    with pytest.raises(InvalidField) as caught:
        to_messages([sealed] * 3, None)
    assert caught.value.param == "input[2].encrypted_content"
    assert "aaaa" not in caught.value.message


def test_thoughts_in_signatures_unpack_to_a_bounded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_history, "MAX_OPENED_CHARS", 10_000)
    signature = sign(f"run-{'1' * 32}", "a" * 4000, carries_text=True)
    block = {"type": "thinking", "thinking": "", "signature": signature}
    asked = MessageParam("user", "Hi")
    assert read_history("", [MessageParam("assistant", [block] * 2), asked], read_tools([]))
    with pytest.raises(InvalidField) as caught:
        read_history("", [MessageParam("assistant", [block] * 3), asked], read_tools([]))
    assert caught.value.param == "messages[0].content[2].signature"


async def test_one_item_referred_to_again_and_again_is_bounded(
    stored: Gateway, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_REFERRED_BYTES", 400)
    said = [{"type": "message", "role": "user", "content": "x" * 100}]
    await store_in(bus).responses.put(RESPONSE, StoredResponse(items=msgspec.json.encode(said)))
    reference = {"type": "item_reference", "id": item_id("msg", RESPONSE, 0, is_input=True)}
    await ask(stored, "Hi", input=[reference] * 2)
    assert (await refused(stored, input=[reference] * 3))["param"] == "input[2].id"


@pytest.mark.parametrize(
    ("access", "may"),
    [
        (Access(), True),
        (Access(name="a", scopes=frozenset(["control"])), False),
        (Access(name="a", scopes=frozenset(["admin"])), True),
        (Access(name="a", scopes=frozenset(["control"]), flow_class="system"), True),
    ],
    ids=["local", "token", "admin", "made-with-it"],
)
def test_the_operators_class_is_not_for_everybody(access: Access, may: bool) -> None:
    assert access.class_of("bulk") == "bulk"
    assert access.class_of(None) == access.flow_class
    if may:
        assert access.class_of("system") == "system"
    else:
        with pytest.raises(GatewayError) as caught:
            access.class_of("system")
        assert caught.value.status == 403


@pytest.mark.parametrize(
    ("path", "headers", "field"),
    [
        (CHAT, {"X-Tetrarch-Class": "system"}, {}),
        (CHAT, {}, {"tetrarch": {"class": "system"}}),
        ("/v1/runs", {"X-Tetrarch-Class": "system"}, {}),
        ("/v1/runs", {}, {"class": "system"}),
    ],
)
async def test_a_token_that_claims_the_operators_class_is_refused_before_it_takes_a_place(
    gateway: Gateway, path: str, headers: dict[str, str], field: dict[str, Any]
) -> None:
    body, sent = msgspec.json.encode({**HELLO, **field}), {**JSON, **headers}
    status, answer = await gateway.post(body, path, headers=sent | bearer(gateway, "a"))
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert not gateway.runs.runs
    if path == CHAT:
        assert (await gateway.post(body, headers=sent))[0] == 200
        assert gateway.runs.last.order.flow.flow_class == "system"


async def test_another_routers_highest_class_is_not_the_operators(gateway: Gateway) -> None:
    headers = {**JSON, "X-SMG-Priority": "system"} | bearer(gateway, "a")
    assert (await gateway.post(msgspec.json.encode(HELLO), headers=headers))[0] == 200
    assert gateway.runs.last.order.flow.flow_class == "interactive"


async def look(gateway: Gateway, run_id: str, headers: dict[str, str], seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await gateway.get(f"{CHAT}/{run_id}", headers=headers)


async def slow_run(gateway: Gateway, headers: dict[str, str]) -> str:
    await gateway.post(msgspec.json.encode(HELLO), headers=headers | JSON)
    order = gateway.runs.last.order
    gateway.runs.script = lambda order: [30.0, *words("late")(order)]
    return await gateway.runs.start(order)


async def test_an_onlooker_that_stays_longer_does_not_keep_an_abandoned_run_alive(gateway: Gateway) -> None:
    mine, admin = bearer(gateway, "a"), bearer(gateway, "root", scopes=("admin",))
    run_id = await slow_run(gateway, mine)
    await asyncio.gather(look(gateway, run_id, mine, 0.2), look(gateway, run_id, admin, 0.6))
    await until(lambda: gateway.runs.cancelled == [run_id])


async def test_a_token_that_may_only_read_ends_no_run_by_leaving(gateway: Gateway) -> None:
    mine = bearer(gateway, "a", group="team")
    reader = bearer(gateway, "b", group="team", scopes=("read",))
    run_id = await slow_run(gateway, mine)
    await look(gateway, run_id, reader, 0.2)
    await asyncio.sleep(0.1)
    assert gateway.runs.cancelled == []


async def test_a_client_that_leaves_while_its_input_is_stored_ends_its_run(
    stored: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(self: history.Kept) -> None:
        await asyncio.sleep(30)

    monkeypatch.setattr(history.Kept, "begin", slow)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.4):
            await stored.post({"input": "Hi"}, RESPONSES)
    await until(lambda: len(stored.runs.cancelled) == 1)
