"""Each log line of a gateway that is about a run carries it, and the caller's session."""

from __future__ import annotations

from typing import Any

from tests.conftest import Logged, ValkeyServer
from workers.messages import Tokens

from .fake_engine import FakeEngine, answer_at_once, until
from .http_gateway import HELLO, Gateway
from .test_runs import gateway as runs_on


async def test_the_lines_of_runs_at_the_same_time_carry_their_own_run_and_session(
    valkey: ValkeyServer, logged: Logged
) -> None:
    async with FakeEngine(valkey.url, answer_at_once, workers=1), runs_on(valkey.url) as parts:
        agents = {await parts.order(agent): agent for agent in ("left", "", "right")}
        await until(lambda: not parts.runs.num_live)
    told = logged.lines("run_started", "run_ended")
    assert len(told) == 6
    for line in told:
        assert line.get("session", "") == agents[line["run"]]
    assert {line["state"] for line in told if line["event"] == "run_ended"} == {"completed"}


async def test_an_incident_carries_its_request_run_and_session(gateway: Gateway, logged: Logged) -> None:
    def broken(order: Any) -> list[Any]:
        return [Tokens(token_ids=b"123", text="x")]  # not whole uint32

    gateway.runs.script = broken
    headers = {"x-session-id": "left", "x-request-id": "mine"}
    async with gateway.http.post(
        f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": True}, headers=headers
    ) as response:
        run_id = response.headers["x-tetrarch-run"]
        await response.read()
    (line,) = logged.lines("incident")
    assert (line["run"], line["session"], line["request_id"]) == (run_id, "left", "mine")


async def test_the_next_request_of_a_connection_has_a_context_of_its_own(
    gateway: Gateway, logged: Logged
) -> None:
    assert (await gateway.post({**HELLO, "user": "left"}))[0] == 200
    gateway.runs.refuse = RuntimeError("broken")
    assert (await gateway.post(HELLO))[0] == 500
    (line,) = logged.lines("incident")
    assert "run" not in line
    assert "session" not in line
