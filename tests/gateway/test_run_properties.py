"""Random verbs in random order from two gateways: one end each, usage that adds up, one fold."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest

from gateway.errors import GatewayError
from gateway.runs.commands import ToolOutput
from gateway.runs.spec import ForkPoint
from gateway.runs.state import RunState, fold
from gateway.runs.transcript import Transcript
from tests.conftest import ValkeyServer
from workers.messages import EVENT_FIELD, RUNS_LIVE_KEY, RunEnded, run_events_key

from .chatting import CALL, chatting, reaches, spec
from .fake_engine import until
from .talking_engine import TalkingEngine
from .test_runs import Gateway

NUM_VERBS = 12
VERBS = ("steer", "steer", "pause", "resume", "resume", "respond", "fork", "graceful", "cancel")


def answers(prompt: str) -> str:
    """Words, or a call, by the prompt."""
    kind = len(prompt) % 3
    return ("The quick brown fox jumps over the lazy dog", f"I look. {CALL}", "Fine")[kind]


async def act(gate: Gateway, run_id: str, choice: random.Random, children: list[str]) -> None:
    """One verb. Conflicts are answers too."""
    verb = choice.choice(VERBS)
    with contextlib.suppress(GatewayError):
        match verb:
            case "steer":
                await gate.runs.steer(run_id, "go on", choice.choice(["now", "next_turn", "queue"]))
            case "pause":
                await gate.runs.pause(run_id)
            case "resume":
                await gate.runs.resume(run_id)
            case "respond":
                state = await gate.runs.state(run_id)
                outputs = [ToolOutput(call_id=call.id, output="x") for call in state.calls]
                await gate.runs.respond(run_id, outputs, "and then")
            case "fork":
                children.append((await gate.runs.fork(ForkPoint(run=run_id), spec("child"))).run_id)
            case "graceful" if choice.random() < 0.2:
                await gate.runs.cancel(run_id, "graceful")
            case "cancel" if choice.random() < 0.1:
                await gate.runs.cancel(run_id)


def entries_of(valkey: ValkeyServer, run_id: str) -> list[tuple[str, bytes]]:
    """A run's stream as it is kept."""
    with valkey.client() as client:
        found = client.xrange(run_events_key(run_id))
    return [(entry.decode(), fields[EVENT_FIELD]) for entry, fields in found]


def check(valkey: ValkeyServer, run_id: str) -> RunState:
    """What holds for every ended run."""
    entries = entries_of(valkey, run_id)
    state = fold(entries)
    assert state == fold(entries[7:], fold(entries[:7]))
    told = Transcript()
    told.advance_over(entries)
    assert sum(len(turn.ids) // 4 for turn in told.turns) == state.usage.completion_tokens == state.num_tokens
    assert len(told.turns) == state.turn
    assert state.ended is not None
    assert state.usage.prompt_tokens == sum(turn.prompt_tokens for turn in told.turns)
    return state


@pytest.mark.parametrize("seed", range(6))
async def test_random_verbs_from_two_gateways_leave_one_end_and_a_sum_that_is_right(
    valkey: ValkeyServer, seed: int
) -> None:
    choice = random.Random(seed)
    async with (
        TalkingEngine(valkey.url, answers, workers=2) as engine,
        chatting(valkey.url, "g1") as first,
        chatting(valkey.url, "g2") as second,
    ):
        engine.seconds_per_token = 0.003
        runs = [
            await choice.choice([first, second]).runs.create(spec(f"r{n}", tools=True, on_end="await_input"))
            for n in range(3)
        ]
        children: list[str] = []

        async def disturb(run_id: str) -> None:
            for _ in range(NUM_VERBS):
                await asyncio.sleep(choice.random() * 0.05)
                await act(choice.choice([first, second]), run_id, choice, children)

        async with asyncio.timeout(60):
            await asyncio.gather(*(disturb(run_id) for run_id in runs))
            for run_id in [*runs, *children]:
                await first.runs.cancel(run_id, seconds=5)
                await reaches(first, run_id, "completed", "cancelled", "failed")
        with valkey.client() as client:
            await until(lambda: not client.scard(RUNS_LIVE_KEY), 10)
        for run_id in [*runs, *children]:
            state = check(valkey, run_id)
            assert (state.ended or RunEnded(state="")).error == ""
        for turn in engine.turns:  # each prompt begins with what its run had before
            earlier = [t.submit for t in engine.turns if t.submit.run_id == turn.submit.run_id]
            ordered = sorted(earlier, key=lambda submit: submit.attempt)
            for one, other in itertools.pairwise(ordered):
                kept = len(one.token_ids) - 4 * one.generated_tokens
                assert other.token_ids[:kept] == one.token_ids[:kept]
