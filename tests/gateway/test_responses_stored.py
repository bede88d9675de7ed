"""Stored responses: read, gone on from, resumed, cancelled, deleted, in the background, whose they are."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.store.responses import MAX_RESPONSE_BYTES, ResponseStore, StoredResponse
from gateway.store.store import store_in
from tests.conftest import ValkeyServer
from workers.messages import KEY_PREFIX, Failed, Tokens

from .bus_fixture import connected
from .fake_runs import words
from .http_gateway import Gateway, Start
from .responses_api import ASKED, CALL, RESPONSES, ask, prompt_text, refused, sse_events, stream
from .samples import QWEN
from .test_tool_calls import serve

NOBODY = f"resp_{'0' * 32}"
SLOW = 0.3


@pytest.fixture
async def stored(start: Start, valkey: ValkeyServer) -> AsyncIterator[Gateway]:
    """A gateway with a real store."""
    async with connected(valkey.url) as bus:
        gateway = await start(store=store_in(bus))
        serve(gateway, QWEN)
        yield gateway


async def get(gateway: Gateway, response: str, query: str = "", **kwargs: Any) -> tuple[int, Any]:
    return await gateway.get(f"{RESPONSES}/{response}{query}", **kwargs)


async def again(gateway: Gateway, response: str, after: int) -> list[Any]:
    url = f"{gateway.url}{RESPONSES}/{response}?stream=true&starting_after={after}"
    async with gateway.http.get(url) as answer:
        assert answer.status == 200, await answer.text()
        return sse_events(await answer.text())


async def cancel(gateway: Gateway, response: str) -> tuple[int, Any]:
    return await gateway.post({}, f"{RESPONSES}/{response}/cancel")


async def delete(gateway: Gateway, response: str) -> tuple[int, Any]:
    async with gateway.http.delete(f"{gateway.url}{RESPONSES}/{response}") as answer:
        return answer.status, await answer.json()


def expire_events(gateway: Gateway) -> None:
    """As an hour after the end."""
    gateway.runs.runs.clear()


# Read


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_reads_as_it_was_told(stored: Gateway, streams: bool) -> None:
    told = (await stream(stored, "Hi"))[-1].data["response"] if streams else await ask(stored, "Hi")
    assert told["store"] is True
    for _ in range(2):
        assert await get(stored, told["id"]) == (200, told)
        expire_events(stored)


async def test_a_response_that_was_not_to_be_stored_is_not_found(stored: Gateway) -> None:
    body = await ask(stored, "Hi", store=False)
    assert body["store"] is False
    for query in ("", "?stream=true", "/input_items"):
        status, answer = await get(stored, body["id"], query)
        assert (status, answer["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize("response", [NOBODY, "nonsense", "resp_%00", f"chatcmpl-{'0' * 32}"])
async def test_an_unknown_response_is_404(stored: Gateway, response: str) -> None:
    asked = [get(stored, response), cancel(stored, response), delete(stored, response)]
    for status, answer in await asyncio.gather(*asked, get(stored, response, "/input_items")):
        assert (status, answer["error"]["code"]) == (404, "response_not_found")


async def test_a_chat_calls_run_is_no_response(stored: Gateway) -> None:
    _, body = await stored.post({"messages": [{"role": "user", "content": "Hi"}]})
    response = body["id"].replace("chatcmpl-", "resp_")
    for query in ("", "?stream=true"):
        assert (await get(stored, response, query))[0] == 404
    assert (await cancel(stored, response))[0] == 404


async def test_a_failed_response_reads_as_failed(stored: Gateway) -> None:
    stored.runs.script = lambda order: [Failed(error="row_fault", message="A fault.")]
    status, _ = await stored.post(ASKED, RESPONSES)
    assert status == 500
    response = [*stored.runs.runs][-1].replace("run-", "resp_")
    _, body = await get(stored, response)
    assert (body["status"], body["error"]["type"]) == ("failed", "row_fault")


async def test_the_end_of_a_response_whose_gateway_died_is_found_in_its_events(
    stored: Gateway, valkey: ValkeyServer
) -> None:
    body = await ask(stored, "Hi")
    async with connected(valkey.url) as bus:
        store = ResponseStore(bus)
        [kept] = await store.get([body["id"]])
        assert kept is not None
        await store.put(body["id"], msgspec.structs.replace(kept, body=b""))
    assert await get(stored, body["id"]) == (200, body)
    expire_events(stored)
    assert await get(stored, body["id"]) == (200, body)


async def test_input_items_are_listed_in_pages(stored: Gateway) -> None:
    items = [{"role": "user", "content": f"text {number}"} for number in range(4)]
    body = await ask(stored, "Hi", input=items)
    _, page = await get(stored, body["id"], "/input_items?limit=3")
    assert [item["content"][0]["text"] for item in page["data"]] == ["text 3", "text 2", "text 1"]
    assert page["has_more"] and page["last_id"] == page["data"][-1]["id"]
    assert page["data"][0].keys() == {"id", "type", "role", "status", "content"}
    _, rest = await get(stored, body["id"], f"/input_items?after={page['last_id']}")
    assert [item["content"][0]["text"] for item in rest["data"]] == ["text 0"] and not rest["has_more"]
    _, first = await get(stored, body["id"], "/input_items?order=asc&limit=1")
    assert first["data"] == rest["data"]
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=msg_x"):
        status, answer = await get(stored, body["id"], f"/input_items?{query}")
        assert (status, answer["error"]["param"]) == (400, query.split("=")[0])


# Go on


async def test_a_response_goes_on_from_an_earlier_one(stored: Gateway) -> None:
    first = await ask(stored, f"Look.\n{CALL}", instructions="Only now.")
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "the text"}
    expire_events(stored)
    second = await ask(stored, "It says so.", input=[output], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    prompt = prompt_text(stored)
    said = ["Read /tmp/a.txt", "Look.", "<tool_call>", "the text"]
    assert [prompt.rindex(text) for text in said] == sorted(prompt.rindex(text) for text in said)
    assert "Only now." not in prompt
    await ask(stored, "Yes.", input="Sure?", previous_response_id=second["id"])
    said += ["It says so.", "Sure?"]
    prompt = prompt_text(stored)
    assert [prompt.rindex(text) for text in said] == sorted(prompt.rindex(text) for text in said)


async def test_what_cannot_be_gone_on_from_is_refused(stored: Gateway) -> None:
    """Silence would lose the context."""
    unstored = await ask(stored, "Hi", store=False)
    deleted = await ask(stored, "Hi")
    await delete(stored, deleted["id"])
    broken = await ask(stored, "Hi", previous_response_id=(await ask(stored, "Hi"))["id"])
    await delete(stored, broken["previous_response_id"])
    for response in (unstored["id"], deleted["id"], broken["id"], NOBODY, "resp_x"):
        error = await refused(stored, previous_response_id=response)
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_running_response_cannot_be_gone_on_from(stored: Gateway) -> None:
    stored.runs.script = lambda order: [60.0]
    _, body = await stored.post({**ASKED, "background": True}, RESPONSES)
    error = await refused(stored, previous_response_id=body["id"])
    assert error["code"] == "previous_response_not_found"


async def test_references_stand_for_stored_items(stored: Gateway) -> None:
    first = await ask(stored, "Look.")
    _, listed = await get(stored, first["id"], "/input_items")
    ids = [listed["data"][0]["id"], first["output"][0]["id"]]
    asked = [*({"type": "item_reference", "id": item} for item in ids), {"role": "user", "content": "Go on"}]
    await ask(stored, "Yes.", input=asked)
    prompt = prompt_text(stored)
    assert prompt.index("Read /tmp/a.txt") < prompt.index("Look.") < prompt.index("Go on")
    for item in ("msg_x", f"msg_{'0' * 40}", ids[0][:-1] + "7", None):
        error = await refused(stored, input=[{"type": "item_reference", "id": item}])
        assert error["param"] == "input[0].id"


async def test_an_input_that_is_too_large_is_not_stored_and_the_response_says_so(stored: Gateway) -> None:
    serve(stored, QWEN.replace("message.content", "message.content[:9]"))
    large = {**ASKED, "input": "a" * (MAX_RESPONSE_BYTES + 1)}
    status, body = await stored.post(io.BytesIO(json.dumps(large).encode()), RESPONSES)
    assert (status, body["store"]) == (200, False) and (await get(stored, body["id"]))[0] == 404
    background = json.dumps({**large, "background": True}).encode()
    status, answer = await stored.post(io.BytesIO(background), RESPONSES)
    assert (status, answer["error"]["param"]) == (400, "background")


# Resume


async def test_a_stream_is_resumed_behind_any_event(stored: Gateway) -> None:
    stored.runs.script = words("<think>\nHm.", "\n</think>\n\nLook.\n", CALL)
    events = await stream(stored)
    response = events[0].data["response"]["id"]
    for number in range(len(events) - 1):
        rest = await again(stored, response, number)
        assert [event.raw for event in rest] == [event.raw for event in events[number + 1 :]]


async def test_a_stream_whose_events_have_expired_is_404_and_says_so(stored: Gateway) -> None:
    body = await ask(stored, "Hi")
    expire_events(stored)
    status, answer = await get(stored, body["id"], "?stream=true")
    assert status == 404 and "without 'stream'" in answer["error"]["message"]


@pytest.mark.parametrize("after", ["x", "1.5", "-2", "99999999999"])
async def test_a_bad_number_to_start_after_is_400(stored: Gateway, after: str) -> None:
    body = await ask(stored, "Hi")
    status, answer = await get(stored, body["id"], f"?stream=true&starting_after={after}")
    assert (status, answer["error"]["param"]) == (400, "starting_after")


# In the background


async def test_a_background_response_is_queued_at_once_and_runs_on(stored: Gateway) -> None:
    stored.runs.script = lambda order: [SLOW, *words("Hel", "lo")(order)]
    status, queued = await stored.post({**ASKED, "background": True}, RESPONSES)
    assert (status, queued["status"], queued["output"], queued["background"]) == (200, "queued", [], True)
    _, running = await get(stored, queued["id"])
    assert running["status"] == "in_progress" and running["usage"] is None
    done = await ended(stored, queued["id"])
    assert done["output"][0]["content"][0]["text"] == "Hello" and done["usage"]["output_tokens"] == 2
    assert stored.runs.cancelled == []
    expire_events(stored)
    assert await get(stored, queued["id"]) == (200, done)


async def ended(gateway: Gateway, response: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while True:
            _, body = await get(gateway, response)
            if body["status"] not in ("queued", "in_progress"):
                return dict(body)


async def test_a_background_response_tells_what_it_has_said_so_far(stored: Gateway) -> None:
    stored.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text="Hel"), 60.0]
    _, queued = await stored.post({**ASKED, "background": True}, RESPONSES)
    _, running = await get(stored, queued["id"])
    [item] = running["output"]
    assert (item["status"], item["content"][0]["text"]) == ("in_progress", "Hel")


async def test_a_background_stream_that_is_dropped_goes_on_and_is_resumed(stored: Gateway) -> None:
    stored.runs.script = lambda order: [
        *words("Hel")(order)[:1],
        SLOW,
        *words("lo", "!")(order)[:1],
        *words("", "")(order)[-1:],
    ]
    asked = {**ASKED, "background": True, "stream": True}
    dropped = await stored.http.post(stored.url + RESPONSES, json=asked)
    seen = sse_events((await dropped.content.readuntil(b"}\n\n")).decode())
    dropped.close()
    response = seen[0].data["response"]["id"]
    assert seen[0].data["response"]["status"] == "queued"
    rest = await again(stored, response, seen[-1].data["sequence_number"])
    numbers = [event.data["sequence_number"] for event in [*seen, *rest]]
    assert numbers == [*range(len(numbers))] and rest[-1].name == "response.completed"
    assert stored.runs.cancelled == []
    assert await get(stored, response) == (200, rest[-1].data["response"])


async def test_a_background_call_learns_its_answer(stored: Gateway) -> None:
    """Its agent's next prompt is built on the generated ids as for any other call."""
    _, queued = await stored.post({**ASKED, "background": True}, RESPONSES)
    await ended(stored, queued["id"])
    assert stored.runs.num_reserved == 0


# Cancel and delete


async def test_a_cancelled_response_says_so_and_keeps_what_it_said(stored: Gateway) -> None:
    stored.runs.script = lambda order: [Tokens(token_ids=b"\1\0\0\0", text="Hel"), 60.0]
    _, queued = await stored.post({**ASKED, "background": True}, RESPONSES)
    await get(stored, queued["id"])
    status, body = await cancel(stored, queued["id"])
    assert (status, body["status"]) == (200, "cancelled")
    assert body["output"][0]["content"][0]["text"] == "Hel"
    assert await get(stored, queued["id"]) == (200, body)
    assert await cancel(stored, queued["id"]) == (200, body)  # safe to repeat


async def test_a_cancel_after_the_end_changes_nothing(stored: Gateway) -> None:
    body = await ask(stored, "Hi")
    assert await cancel(stored, body["id"]) == (200, body)


async def test_a_deleted_response_is_gone_and_a_running_one_ends(stored: Gateway) -> None:
    body = await ask(stored, "Hi")
    expected = {"id": body["id"], "object": "response", "deleted": True}
    assert await delete(stored, body["id"]) == (200, expected)
    for query in ("", "?stream=true", "/input_items"):
        assert (await get(stored, body["id"], query))[0] == 404
    stored.runs.script = lambda order: [60.0]
    _, queued = await stored.post({**ASKED, "background": True}, RESPONSES)
    await delete(stored, queued["id"])
    assert stored.runs.cancelled == [queued["id"].replace("resp_", "run-")]
    await asyncio.sleep(0.05)  # its end must not bring it back
    assert (await get(stored, queued["id"]))[0] == 404


# Whose it is


async def test_another_tenants_response_is_not_there(stored: Gateway) -> None:
    body = await ask(stored, "Hi")
    secret = stored.tokens.add("other")
    headers = {"Authorization": f"Bearer {secret}"}
    asked = {**ASKED, "previous_response_id": body["id"]}
    async with stored.http.post(stored.url + RESPONSES, json=asked, headers=headers) as answer:
        assert (await answer.json())["error"]["code"] == "previous_response_not_found"
    for query in ("", "?stream=true", "/input_items"):
        assert (await get(stored, body["id"], query, headers=headers))[0] == 404
    reference = [{"type": "item_reference", "id": body["output"][0]["id"]}]
    async with stored.http.post(stored.url + RESPONSES, json={"input": reference}, headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "input[0].id")


async def test_a_store_that_is_away_spoils_no_answer(gateway: Gateway) -> None:
    serve(gateway, QWEN)
    assert (await ask(gateway, "Hi"))["status"] == "completed"
    status, answer = await get(gateway, NOBODY)
    assert (status, answer["error"]["code"]) == (503, "bus_unavailable")


# The store itself


async def test_an_end_never_brings_back_what_is_deleted_at_the_same_time(valkey: ValkeyServer) -> None:
    whole, deleted = StoredResponse(body=b"{}"), StoredResponse(is_deleted=True)
    names = [f"resp_race{number}" for number in range(100)]
    async with connected(valkey.url) as one, connected(valkey.url, "g2") as other:
        ending, deleting = ResponseStore(one), ResponseStore(other)
        for name in names:
            await ending.put(name, StoredResponse())
        for name in names:
            await asyncio.gather(ending.end(name, whole), deleting.delete(name))
        assert await ending.get(names) == [deleted] * len(names)
        assert not await ending.end(names[0], whole)
        assert not await ending.end("resp_gone", whole)


async def test_a_deleted_response_leaves_a_mark_and_what_was_none_leaves_nothing(
    valkey: ValkeyServer,
) -> None:
    deleted = StoredResponse(is_deleted=True)
    async with connected(valkey.url) as bus:
        store = ResponseStore(bus)
        await store.put("resp_there", StoredResponse(tenant="t", items=b"[1]", body=b"{}"))
        for _ in range(2):
            for name in ("resp_there", "resp_never"):
                await store.delete(name)
            await store.delete("resp_told", is_told=True)
        found = await store.get(["resp_there", "resp_never", "resp_told"])
        assert found == [deleted, None, deleted]


async def test_the_end_of_a_beginning_is_kept(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = ResponseStore(bus)
        await store.put("resp_a", StoredResponse(items=b"[1]"))
        assert await store.end("resp_a", StoredResponse(items=b"[1]", body=b"{}"))
        assert await store.get(["resp_a"]) == [StoredResponse(items=b"[1]", body=b"{}")]


async def test_a_delete_that_the_store_did_not_take_is_not_told_as_done(
    start: Start, own_valkey: ValkeyServer
) -> None:
    async with connected(own_valkey.url) as bus:
        gateway = await start(store=store_in(bus))
        serve(gateway, QWEN)
        body = await ask(gateway, "Hi")
        await bus.commands.config_set("maxmemory", "1")
        assert (await delete(gateway, body["id"]))[0] == 503


async def test_a_conversation_lives_as_long_as_it_is_used(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = ResponseStore(bus)
        await store.put("resp_1", StoredResponse(items=b"[1]"))
        with valkey.client() as client:
            client.expire(f"{KEY_PREFIX}run:resp_1:response", 60)
            await store.put("resp_2", StoredResponse(chain=("resp_1",)))
            assert int(client.ttl(f"{KEY_PREFIX}run:resp_1:response")) > 600_000
            client.set(f"{KEY_PREFIX}run:resp_3:response", b"\xc1")
        assert await store.get(["resp_1", "resp_3", "resp_4"]) == [StoredResponse(items=b"[1]"), None, None]
