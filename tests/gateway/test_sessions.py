"""Agents over HTTP: names told and inferred, answers that come back, cancels of sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.callers.hints import Names
from tests.conftest import Logged

from .fake_runs import words
from .http_gateway import CHAT, HELLO, TEXT, Gateway, Start, until

USER = {"role": "user", "content": "Read the file and tell me what it says, in some more words than needed."}
AGAIN = {"role": "user", "content": "Again."}


async def names_of(gateway: Gateway, *messages: dict[str, Any], **more: Any) -> Names:
    status, _ = await gateway.post({"messages": list(messages), **more})
    assert status == 200
    return gateway.runs.last.order.names


async def test_headers_reach_the_order(gateway: Gateway) -> None:
    headers = {"X-Tetrarch-Session": "s", "X-Tetrarch-Agent": "a", "X-Tetrarch-Retain": "ephemeral"}
    for path, body in ((CHAT, HELLO), (TEXT, {"prompt": "x"})):
        async with gateway.http.post(gateway.url + path, json=body, headers=headers) as response:
            assert response.status == 200
        order = gateway.runs.last.order
        assert order.names == Names("s", "a")
        assert order.hints.retain == "ephemeral"


async def test_a_bad_hint_is_refused(gateway: Gateway) -> None:
    status, body = await gateway.post({**HELLO, "tetrarch": {"retain": "forever"}})
    assert (status, body["error"]["param"]) == (400, "tetrarch.retain")
    assert "'session', 'ephemeral' or 'pin'" in body["error"]["message"]


async def test_boundaries_reach_the_order(gateway: Gateway) -> None:
    await gateway.post({"messages": [{"role": "system", "content": "Be brief."}, USER]})
    order = gateway.runs.last.order
    assert 0 < order.system_tokens < order.turn_tokens < order.prompt_tokens


async def test_a_nameless_agent_is_known_by_its_history(gateway: Gateway) -> None:
    first = await names_of(gateway, USER)
    answer = {"role": "assistant", "content": "Hello"}
    second = await names_of(gateway, USER, answer, AGAIN)
    assert first == second
    assert first.agent and first.session == first.agent
    assert await names_of(gateway, AGAIN) != first
    with_key = await names_of(gateway, USER, prompt_cache_key="k")
    assert with_key.session == "k" and with_key.agent
    assert await names_of(gateway, USER, answer, AGAIN, prompt_cache_key="k") == with_key


async def test_equal_nameless_calls_at_once_are_two_agents(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [0.2, *words("Hel", "lo")(order)]
    await asyncio.gather(gateway.post({"messages": [USER]}), gateway.post({"messages": [USER]}))
    names = [run.order.names for run in gateway.runs.runs.values()]
    assert len(names) == 2 and names[0] != names[1]


async def test_a_failed_start_leaves_the_agent_to_its_retry(gateway: Gateway) -> None:
    gateway.runs.refuse = RuntimeError("broken")
    assert (await gateway.post({"messages": [USER]}))[0] == 500
    gateway.runs.refuse = None
    first = await names_of(gateway, USER)
    assert await names_of(gateway, USER, {"role": "assistant", "content": "Hello"}, AGAIN) == first


async def test_a_place_is_given_back_while_the_answer_comes(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [0.3, *words("x")(order)]
    async with gateway.http.post(gateway.url + CHAT, json={**HELLO, "stream": True}) as response:
        assert gateway.runs.num_reserved == 0
        await response.read()


async def test_volatile_lines_are_made_constant_and_told_without_text(start: Start, logged: Logged) -> None:
    head = "x-anthropic-billing-header: cc_version=2.1.100.{}; cc_entrypoint=cli; cch={};\nYou are brief."
    calls = [[{"role": "system", "content": head.format(n, n)}, USER] for n in ("7b4", "0d9")]
    for is_on in (True, False):
        gateway = await start(normalise_prompts=is_on)
        for messages in calls:
            assert (await gateway.post({"messages": messages}))[0] == 200
        first, second = (run.order.token_ids for run in gateway.runs.runs.values())
        assert (first == second) is is_on
    lines = logged.lines("prompt_normalised")
    assert [line["billing_header"] for line in lines] == [1, 1]
    assert not any("cch" in str(line) for line in lines)


async def test_a_session_can_be_cancelled(gateway: Gateway) -> None:
    gateway.runs.script = lambda order: [30.0]
    tree = (("root", ""), ("a", "root"), ("a1", "a"), ("b", "root"))
    told = [{"session": "s 1", "agent": agent, "parent": parent} for agent, parent in tree]
    calls = [asyncio.create_task(gateway.post({**HELLO, "tetrarch": names})) for names in told]
    await until(lambda: len(gateway.runs.runs) == 4)
    status, body = await gateway.post({"agent": "a"}, "/v1/sessions/s%201/cancel")
    assert (status, body) == (200, {"session": "s 1", "num_cancelled": 4})  # the fake ends all
    root, agents = gateway.runs.cancelled_agents[0]
    assert (root.tenant, root.session, root.agent) == ("", "s 1", "a")
    assert agents == {"a", "a1"}
    assert [status for status, _ in await asyncio.gather(*calls)] == [499] * 4
    assert (await gateway.post(b"", "/v1/sessions/s%201/cancel"))[1]["num_cancelled"] == 0
    assert gateway.runs.cancelled_agents[1][0].agent == ""
    assert gateway.runs.cancelled_agents[1][1] == {"root", "a", "a1", "b"}


async def test_names_are_cancelled_as_calls_carry_them(gateway: Gateway) -> None:
    session, agent = "s/" + 300 * "s", " " + 300 * "ä"
    gateway.runs.script = lambda order: [30.0]
    call = asyncio.create_task(gateway.post({**HELLO, "tetrarch": {"session": session, "agent": agent}}))
    await until(lambda: len(gateway.runs.runs) == 1)
    status, _ = await gateway.post({"agent": agent}, f"/v1/sessions/{session.replace('/', '%2F')}/cancel")
    assert status == 200
    root, agents = gateway.runs.cancelled_agents[0]
    assert Names(root.session, root.agent) == gateway.runs.last.order.names
    assert agents == {root.agent}
    assert (await call)[0] == 499


@pytest.mark.parametrize(
    "body",
    [b"{", b'{"agent": 7}', b'{"agent": ""}', b'{"agent": " "}', b'{"agnet": "a"}', b"[]", b"[" * 100_000],
)
async def test_a_bad_cancel_is_refused(gateway: Gateway, body: bytes) -> None:
    status, answer = await gateway.post(body, "/v1/sessions/s/cancel")
    assert status == 400
    assert answer["error"]["message"]
    assert not gateway.runs.cancelled_agents


async def test_a_session_without_a_name_is_refused(gateway: Gateway) -> None:
    assert (await gateway.post({}, "/v1/sessions/%20%09/cancel"))[0] == 400
    assert not gateway.runs.cancelled_agents
