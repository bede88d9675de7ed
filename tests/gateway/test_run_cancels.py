"""A cancelled run keeps its counts, and what it had said unless who cancels it does not want that."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import Conflict
from gateway.runs.commands import CancelMode
from gateway.runs.spec import ForkPoint
from tests.conftest import ValkeyServer

from .chatting import assert_adds_up, chatting, ended, generated, reaches, result, spec
from .talking_engine import TalkingEngine
from .test_native_real import get, serving
from .test_native_real import reaches as shows
from .test_run_calls import call
from .test_run_verbs import FIRST, answers
from .test_runs import Gateway


async def assert_dropped(gate: Gateway, run_id: str) -> None:
    """Nothing of what it had said is kept."""
    kept = await result(gate, run_id)
    assert (kept.state, kept.is_dropped, kept.is_partial) == ("cancelled", True, True)
    assert (kept.text, kept.reasoning, kept.calls, kept.json) == ("", "", (), "")
    assert await gate.runs.keeper.ids_of(run_id) is None


@pytest.mark.parametrize("kind", ["run", "call"])
@pytest.mark.parametrize("mode", ["now", "graceful"])
async def test_a_cancel_may_drop_the_part_and_keeps_the_counts(
    valkey: ValkeyServer, kind: str, mode: CancelMode
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec()) if kind == "run" else await call(gate)
        await generated(gate, run_id, 4)
        await gate.runs.steer(run_id, "more", "queue")  # else it would complete
        await gate.runs.cancel(run_id, mode, keep_partial=False)
        engine.allowed = None
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        await assert_dropped(gate, run_id)
        usage = (await result(gate, run_id)).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            state.usage.prompt_tokens,
            state.num_tokens,
        )
        assert usage.completion_tokens >= 4
        with pytest.raises(Conflict) as caught:
            await gate.runs.fork(ForkPoint(run=run_id), spec("child"))
        assert caught.value.kind == "ids_gone"


async def test_a_run_that_completes_first_keeps_its_result(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec())
        await generated(gate, run_id, 4)
        await gate.runs.cancel(run_id, "graceful", keep_partial=False)
        engine.allowed = None
        assert (await ended(gate, run_id)).status == "completed"
        kept = await result(gate, run_id)
        assert (kept.text, kept.is_dropped) == (FIRST, False)
        assert await gate.runs.keeper.ids_of(run_id) is not None
        assert (await gate.runs.cancel(run_id, keep_partial=False)).status == "completed"
        assert (await result(gate, run_id)).text == FIRST


async def test_a_cancel_of_a_tree_at_another_gateway_drops_all_its_parts(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, answers) as engine,
        chatting(valkey.url, "g1") as first,
        chatting(valkey.url, "g2") as second,
    ):
        engine.allowed = 4
        root = await first.runs.create(spec())
        child = await first.runs.create(spec("child", parent_run=root))
        other = await first.runs.create(spec("other"))
        for run_id in (root, child, other):
            await generated(first, run_id, 4)
        assert (await second.runs.cancel(root, tree=True, keep_partial=False, seconds=5)).num_runs == 2
        for run_id in (root, child):
            await ended(first, run_id)
            await assert_dropped(first, run_id)
        assert (await second.runs.cancel(other, seconds=5)).num_runs == 1
        await ended(first, other)
        assert FIRST.startswith((await result(first, other)).text) and (await result(first, other)).text


async def test_the_gateway_that_takes_over_drops_it_too(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed = 4
            run_id = await first.runs.create(spec())
            await generated(first, run_id, 4)
            await first.runs.steer(run_id, "more", "queue")
            await first.runs.cancel(run_id, "graceful", keep_partial=False)
        engine.allowed = None
        async with chatting(valkey.url, "g2") as second:
            await reaches(second, run_id, "cancelled")
            await ended(second, run_id)
            await assert_dropped(second, run_id)


async def test_keep_partial_over_http(valkey: ValkeyServer, tmp_path: Path) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        engine.allowed = 4
        dropped, kept = await client.create(), await client.create()
        for run_id in (dropped, kept):
            await shows(client, run_id, lambda told: told["usage"]["completion_tokens"] == 4)
        for run_id, body in ((dropped, {"keep_partial": False}), (kept, {})):
            status, told = await client.call("POST", f"/v1/runs/{run_id}/cancel", body)
            assert (status, told["status"]) == (200, "cancelled")
        told = await get(client, dropped)
        assert (told["result"]["text"], told["result"]["dropped"]) == ("", True)
        assert told["usage"]["completion_tokens"] == 4
        told = await get(client, kept)
        assert told["result"]["text"] and not told["result"]["dropped"]
        status, told = await client.call("POST", f"/v1/runs/{kept}/cancel", {"keep_partial": "no"})
        assert (status, told["error"]["param"]) == (400, "keep_partial")


async def test_a_dropped_part_is_not_kept_as_a_response_either(valkey: ValkeyServer, tmp_path: Path) -> None:
    asked = {"model": "default", "input": "Hi", "background": True}
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        engine.allowed = 4
        told = {True: "", False: ""}
        for keep_partial in told:
            _, queued = await client.call("POST", "/v1/responses", asked)
            run_id = queued["id"].replace("resp_", "run-")
            await shows(client, run_id, lambda told: told["usage"]["completion_tokens"] == 4)
            body = {"keep_partial": keep_partial}
            assert (await client.call("POST", f"/v1/runs/{run_id}/cancel", body))[1]["status"] == "cancelled"
            told[keep_partial] = queued["id"]
        status, kept = await client.call("GET", f"/v1/responses/{told[True]}")
        assert (status, kept["status"]) == (200, "cancelled") and kept["output"]
        assert (await client.call("GET", f"/v1/responses/{told[False]}"))[0] == 404
