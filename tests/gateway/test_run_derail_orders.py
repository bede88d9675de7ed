"""Who wants to hear of derailed turns only, or wants all tokens, has no turn stopped by an engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.runs.spec import RunSpec
from tests.conftest import ValkeyServer
from workers.messages import Derail, Derailed, Finished, Started, Timings, Tokens, Usage

from .chatting import chatting, ended, generated, result, spec
from .fake_engine import FakeEngine, Turn
from .talking_engine import TalkingEngine
from .test_run_verbs import answers


def all_tokens() -> RunSpec:
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "temperature": 0}
    return spec(body=msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("asked", "stops"),
    [(spec(), True), (spec(derail="report"), False), (all_tokens(), False)],
    ids=["stop", "report", "ignore_eos"],
)
async def test_each_attempt_tells_its_engine_whether_a_derailed_turn_ends(
    valkey: ValkeyServer, asked: RunSpec, stops: bool
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 3
        run_id = await gate.runs.create(asked)
        await generated(gate, run_id, 3)
        await gate.runs.pause(run_id)
        await gate.runs.resume(run_id)
        await generated(gate, run_id, 6)
        await gate.runs.steer(run_id, "on")
        engine.allowed = None
        await ended(gate, run_id)
        assert [turn.submit.stops_derailed for turn in engine.turns] == [stops] * 3


async def cycles(engine: FakeEngine, turn: Turn) -> None:
    """As a real one does: a cycle is told, and ends the turn where that was asked for."""
    assert isinstance(engine, TalkingEngine)
    usage: Any = Usage(prompt_tokens=len(turn.submit.token_ids) // 4, completion_tokens=1)
    await engine.write(turn, Started(worker=0, cached_tokens=0))
    await engine.write(turn, Tokens(token_ids=b"\1\0\0\0", text="a"))
    await engine.write(turn, Derailed(what=Derail(derail="token_cycle", excerpt="a")))
    reason = "derailed" if turn.submit.stops_derailed else "stop"
    await engine.write(turn, Finished(reason=reason, usage=usage, timings=Timings()))


@pytest.mark.parametrize(("asked", "end"), [("stop", "derailed"), ("report", "completed")])
async def test_a_derailed_run_ends_so_or_goes_on_and_says_it(
    valkey: ValkeyServer, asked: str, end: str
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.script = cycles
        run_id = await gate.runs.create(spec(derail=asked))
        assert (await ended(gate, run_id)).status == end
        kept = await result(gate, run_id)
        assert kept.derail is not None and kept.derail.derail == "token_cycle"
        assert (kept.is_partial, kept.text) == (end == "derailed", "a")
