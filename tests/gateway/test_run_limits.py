"""Budgets, deadlines, time in line and heartbeats end runs, with what they had said kept."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gateway.runs.commands import CancelRun
from gateway.runs.events import InputRequired
from gateway.runs.limits import expired
from gateway.runs.run import Run, RunEvent
from gateway.runs.spec import Budget
from gateway.runs.state import fold
from gateway.text.tokenizer import pack_token_ids
from tests.conftest import ValkeyServer
from workers.messages import Accepted, Derail, Finished, Started, Timings, Tokens, Usage, encode

from .chatting import CALL, assert_adds_up, chatting, ended, generated, reaches, result, spec
from .fake_engine import FakeEngine, Turn
from .talking_engine import TalkingEngine, answer_ids
from .test_run_verbs import FIRST, answers


async def test_an_output_budget_caps_the_turn_and_fails_the_run_with_its_part(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec(budget=Budget(output_tokens=7)))
        state = await ended(gate, run_id)
        assert engine.turns[0].submit.max_tokens == 7
        assert_adds_up(valkey, run_id, state)
        kept = await result(gate, run_id)
        assert kept.error is not None
        assert (kept.state, kept.error.code, kept.is_partial) == ("failed", "budget_exceeded", True)
        assert "output_tokens is 7" in kept.error.message
        assert kept.text and FIRST.startswith(kept.text)


async def test_a_budget_counts_over_turns(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec(on_end="await_input"))
        first = await reaches(gate, run_id, "input_required")
        await gate.runs.cancel(run_id, seconds=5)
        most = first.usage.completion_tokens + 2
        run_id = await gate.runs.create(spec(on_end="await_input", budget=Budget(output_tokens=most)))
        await reaches(gate, run_id, "input_required")
        await gate.runs.respond(run_id, text="more")
        state = await ended(gate, run_id)
        assert engine.turns[-1].submit.max_tokens == 2
        assert state.usage.completion_tokens == most
        assert (state.status, state.turn) == ("failed", 2)


@pytest.mark.parametrize(
    ("budget", "status"),
    [(Budget(prompt_tokens=3), "failed"), (Budget(wall_ms=300), "failed")],
)
async def test_other_budgets_end_a_run(valkey: ValkeyServer, budget: Budget, status: str) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 3
        run_id = await gate.runs.create(spec(budget=budget))
        state = await ended(gate, run_id)
        assert state.status == status
        assert state.ended is not None and state.ended.error == "budget_exceeded"
        assert_adds_up(valkey, run_id, state)


async def test_a_budget_of_tool_calls_ends_a_run_instead_of_asking(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, lambda prompt: CALL), chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec(tools=True, budget=Budget(tool_calls=0)))
        state = await ended(gate, run_id)
        assert state.ended is not None and "tool_calls is 0" in state.ended.message


async def test_a_deadline_expires_a_run_with_its_part(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec(deadline=time.time() + 0.7))
        state = await ended(gate, run_id)
        assert state.status == "expired"
        assert_adds_up(valkey, run_id, state)
        assert (await result(gate, run_id)).text


async def test_a_deadline_ends_a_paused_run_too(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec(deadline=time.time() + 1))
        await generated(gate, run_id, 4)
        await gate.runs.pause(run_id)
        assert (await ended(gate, run_id)).status == "expired"


async def test_a_run_that_finds_no_worker_in_its_time_expires(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.is_starting = False
        run_id = await gate.runs.create(spec(queue_ttl_ms=1200))
        state = await ended(gate, run_id)
        assert state.ended is not None
        assert (state.status, state.ended.error) == ("expired", "queue_ttl_exceeded")


@pytest.mark.parametrize(("orphan", "status"), [("cancel", "cancelled"), ("pause", "paused")])
async def test_a_caller_that_is_not_heard_any_more(valkey: ValkeyServer, orphan: str, status: str) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec(heartbeat_ms=600, orphan=orphan))
        for _ in range(2):
            await gate.caretaker.sweep()
            assert (await gate.runs.heartbeat(run_id)).due_seconds == 0.6
        assert (await gate.runs.state(run_id)).status not in ("cancelled", "paused")
        await reaches(gate, run_id, status)
        await gate.runs.cancel(run_id, seconds=5)


async def test_a_thinking_budget_stops_a_thought_that_does_not_end(valkey: ValkeyServer) -> None:
    thought = f"<think>\n{FIRST * 15}</think>\n\nok"
    async with TalkingEngine(valkey.url, lambda prompt: thought) as engine, chatting(valkey.url) as gate:
        engine.seconds_per_token = 0.02
        run_id = await gate.runs.create(spec(budget=Budget(thinking_tokens=6)))
        state = await ended(gate, run_id)
        assert state.ended is not None and "thinking_tokens is 6" in state.ended.message
        assert 6 < state.num_tokens < len(answer_ids(thought)) / 2
        kept = await result(gate, run_id)
        assert (kept.text, kept.thinking_tokens > 6) == ("", True)
        free = await gate.runs.create(spec(budget=Budget(thinking_tokens=1000)))
        assert (await ended(gate, free)).status == "completed"


@pytest.mark.parametrize("name", ["budget", "tree_budget"])
async def test_a_run_whose_last_turn_was_over_before_it_could_be_stopped_has_not_completed(
    valkey: ValkeyServer, name: str
) -> None:
    thought = "<think>\nIt is so because it is so, is it not?\n</think>\n\nok"

    async def all_at_once(engine: FakeEngine, turn: Turn) -> None:
        ids = answer_ids(thought)
        await engine.write(turn, Started(worker=0, cached_tokens=0))
        await engine.write(turn, Tokens(token_ids=pack_token_ids(ids), text=thought))
        usage = Usage(prompt_tokens=len(turn.submit.token_ids) // 4, completion_tokens=len(ids))
        turn.has_ended = True
        await engine.write(turn, Finished(reason="stop", usage=usage, timings=Timings(worker=0)))

    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.script = all_at_once
        fields: dict[str, Any] = {name: Budget(thinking_tokens=6)}
        run_id = await gate.runs.create(spec(**fields))
        state = await ended(gate, run_id)
        assert isinstance(state.turn_end, Finished)
        assert state.ended is not None
        assert (state.status, state.ended.error) == ("failed", "budget_exceeded")
        assert "thinking_tokens is 6" in state.ended.message
        kept = await result(gate, run_id)
        assert (kept.text.strip(), kept.is_partial) == ("ok", True)


async def test_a_watcher_can_stop_a_run_that_goes_astray(valkey: ValkeyServer) -> None:
    found = Derail(derail="text_loop", excerpt="lazy")

    def watch(run: Run, entry: RunEvent) -> list[CancelRun | Derail]:
        is_due = isinstance(entry.event, Tokens) and run.state.num_tokens == 4
        return [found, CancelRun(command=f"watch-{run.run_id}", derail=found)] if is_due else []

    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        gate.runs.astray.watchers.append(watch)
        engine.allowed = 5
        run_id = await gate.runs.create(spec())
        state = await ended(gate, run_id)
        assert state.status == "derailed"
        kept = await result(gate, run_id)
        assert kept.derail == found
        assert kept.text


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"budget": Budget(wall_ms=700)}, "failed"), ({"queue_ttl_ms": 700}, "expired")],
)
async def test_no_limit_counts_from_the_begin_of_the_second(
    valkey: ValkeyServer, fields: dict[str, Any], status: str
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.is_starting = False
        await asyncio.sleep(0.9 - time.time() % 1 if time.time() % 1 < 0.9 else 0)
        begun = time.time()
        run_id = await gate.runs.create(spec(**fields))
        await reaches(gate, run_id, status)
        assert time.time() - begun >= 0.7


def test_what_waits_for_a_caller_who_never_comes_is_not_kept_for_ever() -> None:
    accepted = Accepted(model="m", engine_id="e", created=100, at=100.5, prompt_tokens=1)
    asks = fold([("0-1", encode(accepted)), ("1-1", encode(InputRequired(at=101.0)))])
    assert expired(asks, 100.5 + 7 * 86_400) is None
    over = expired(asks, 101.5 + 7 * 86_400)
    assert over is not None
    assert over.state == "expired"
