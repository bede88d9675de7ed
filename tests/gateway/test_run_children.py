"""Children that another gateway takes over, whatever has become of their parents."""

from __future__ import annotations

from gateway.runs.spec import ForkPoint
from tests.conftest import ValkeyServer

from .chatting import CALL, chatting, ended, generated, spec
from .talking_engine import TalkingEngine
from .test_run_verbs import answers


async def test_a_child_goes_on_behind_its_own_tokens_when_its_parent_has_others(valkey: ValkeyServer) -> None:
    def talks(prompt: str) -> str:
        return f"I look. {CALL}" if prompt.count("<|im_start|>assistant") == 1 else "Fine"

    async with TalkingEngine(valkey.url, talks) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed = 12
            parent = await first.runs.create(spec(tools=True))
            await generated(first, parent, 12)
            engine.is_starting = False
            inside = len(engine.turns[0].submit.token_ids) // 4 + 12  # of a call
            child = (await first.runs.fork(ForkPoint(run=parent, token=inside), spec("child"))).run_id
            (run,) = [run for run in first.runs.local() if run.run_id == child]
            assert run.order is not None
            prompt = run.order.token_ids
            await first.runs.pause(child)
            await first.runs.steer(parent, "no")  # its open call is dropped
            engine.is_starting, engine.allowed = True, None
            await ended(first, parent)
        async with chatting(valkey.url, "g2") as second:
            await second.runs.resume(child)
            assert (await ended(second, child)).status == "completed"
        assert engine.turns[-1].submit.run_id == child
        assert engine.turns[-1].submit.token_ids == prompt


async def test_a_child_outlives_its_parent_that_was_forgotten(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine:
        async with chatting(valkey.url, "g1", kill=True) as first:
            parent = await first.runs.create(spec())
            await ended(first, parent)
            engine.is_starting = False
            child = (await first.runs.fork(ForkPoint(run=parent), spec("child"))).run_id
            await first.runs.pause(child)
            await first.runs.keeper.store.ids.remove(parent)
            engine.is_starting = True
        async with chatting(valkey.url, "g2") as second:
            await second.runs.resume(child)
            assert (await ended(second, child)).status == "completed"
