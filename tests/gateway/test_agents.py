"""Agents on the bus: what an engine is told of them, whole subtrees that end, and where kin are sent."""

from __future__ import annotations

import asyncio
import os

import pytest

from gateway.callers.hints import Hints, Names
from gateway.errors import NoEngine
from gateway.flow.places import submit_of
from gateway.runs.runs import Order
from tests.conftest import Logged, ValkeyServer
from workers.messages import CancelAgents, Cancelled, Finished, Missed, Sampling, Started

from .fake_engine import FakeEngine, answer_at_once, only_start, until, wait_in_line
from .fake_runs import engine_view
from .samples import chatml_bundle
from .test_runs import Gateway, assert_one_end, gateway, settled

TREE = (("root", ""), ("a", "root"), ("a1", "a"), ("b", "root"))


async def start(gate: Gateway, session: str, agent: str, parent: str = "", tenant: str = "") -> str:
    """A run whose prompt nobody else has."""
    return await gate.runs.start(
        Order(
            engine=gate.directory.find("model"),
            token_ids=os.urandom(4 * 300),
            max_tokens=10,
            sampling=Sampling(),
            tenant=tenant,
            hints=Hints(Names(session, agent, parent)),
        )
    )


def test_an_engine_is_told_all_hints() -> None:
    hints = Hints(Names("s", "a", "p"), 640, "read_file", is_final=True, retain="pin", explain=True)
    order = Order(
        engine=engine_view(chatml_bundle()),
        token_ids=bytes(4 * 1000),
        max_tokens=10,
        sampling=Sampling(),
        tenant="t",
        hints=hints,
        system_tokens=100,
        turn_tokens=990,
    )
    submit = submit_of(order, "run-1", 2, order.engine.info)
    assert (submit.tenant, submit.session, submit.agent, submit.parent) == ("t", "s", "a", "p")
    assert (submit.fork_tokens, submit.expects, submit.is_final) == (640, "read_file", True)
    assert (submit.retain, submit.explain) == ("pin", True)
    assert (submit.system_tokens, submit.turn_tokens) == (100, 990)
    long = Order(
        engine=order.engine,
        token_ids=bytes(40),
        max_tokens=1,
        sampling=Sampling(),
        hints=Hints(fork_tokens=99),
    )
    assert submit_of(long, "run-1", 1, order.engine.info).fork_tokens == 10


async def test_a_subtree_ends_in_line_and_on_engines_and_nobody_else_does(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, only_start, workers=1) as engine, gateway(valkey.url) as gate:
        runs = {agent: await start(gate, "s", agent, parent) for agent, parent in TREE}
        others = [await start(gate, "other", "a"), await start(gate, "s", "a", tenant="t")]
        await engine.turn(1)  # root and a; the rest is in line
        root = CancelAgents(session="s", agent="a")
        assert await gate.runs.cancel_agents(root, {"a", "a1"}) == 2
        await until(lambda: engine.agent_cancels == [root])
        by_run = {turn.submit.run_id: turn for turn in engine.turns}  # the two may come in either order
        await engine.cancel_of(by_run[runs["a"]])
        await engine.obey_cancel(by_run[runs["a"]])
        for agent in ("a", "a1"):
            await settled(gate, runs[agent])
            assert isinstance(assert_one_end(valkey, runs[agent]), Cancelled)
        assert await gate.runs.cancel_agents(root, {"a", "a1"}) == 0
        await engine.finish(by_run[runs["root"]])
        for number in (2, 3, 4):
            turn = await engine.turn(number)
            await engine.finish(turn)
        for run_id in (runs["root"], runs["b"], *others):
            await settled(gate, run_id)
            assert isinstance(assert_one_end(valkey, run_id), Finished)


async def test_a_whole_session_ends_at_once(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, wait_in_line, workers=1) as engine, gateway(valkey.url) as gate:
        runs = [await start(gate, "s", agent, parent) for agent, parent in TREE]
        await engine.turn(1)
        assert await gate.runs.cancel_agents(CancelAgents(session="s"), frozenset()) == len(TREE)
        for turn in engine.turns:
            await engine.cancel_of(turn)
            await engine.obey_cancel(turn)
        for run_id in runs:
            await settled(gate, run_id)
            assert isinstance(assert_one_end(valkey, run_id), Cancelled)


async def test_without_a_bus_a_cancel_says_so(valkey: ValkeyServer) -> None:
    async with FakeEngine(valkey.url, only_start), gateway(valkey.url) as gate:
        await start(gate, "s", "a")
        valkey.kill()
        try:
            await until(lambda: not gate.bus.available)
            with pytest.raises(NoEngine):
                await gate.runs.cancel_agents(CancelAgents(session="s"), frozenset())
        finally:
            valkey.start()


async def test_kin_go_where_their_kin_were(valkey: ValkeyServer) -> None:
    async with (
        FakeEngine(valkey.url, answer_at_once, engine_id="e1") as first,
        FakeEngine(valkey.url, answer_at_once, engine_id="e2") as second,
        gateway(valkey.url) as gate,
    ):
        for agent, parent in (("root", ""), ("child", "root"), ("sibling", ""), ("root", "")):
            await settled(gate, await start(gate, "s", agent, parent))
        assert sorted((len(first.turns), len(second.turns))) == [0, 4]
        await settled(gate, await start(gate, "other", "root"))
        assert sorted((len(first.turns), len(second.turns))) == [1, 4]  # cold ones go round


async def test_a_miss_is_logged_without_a_token(valkey: ValkeyServer, logged: Logged) -> None:
    async def missing(engine: FakeEngine, turn: object) -> None:
        missed = Missed(
            cause="diverged",
            position=4711,
            page=73,
            recomputed_tokens=1500,
            before=(987_654,),
            now=(987_653,),
        )
        await engine.write(engine.turns[0], Started(worker=0, cached_tokens=64, missed=missed))
        await engine.finish(engine.turns[0])

    async with FakeEngine(valkey.url, missing), gateway(valkey.url) as gate:
        run_id = await start(gate, "s", "a")
        await settled(gate, run_id)
        await asyncio.sleep(0)
    (line,) = logged.lines("prefix_missed")
    assert (line["cause"], line["tokens"], line["position"]) == ("diverged", 1500, 4711)
    assert (line["run"], line["session"]) == (run_id, "s")
    assert "98765" not in str(line)
