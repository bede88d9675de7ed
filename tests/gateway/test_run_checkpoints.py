"""Forks at the points where an engine keeps what it computed: named, shown, and right for the template."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.errors import Conflict, GatewayError, InvalidField
from gateway.runs.events import TurnOpened
from gateway.runs.spec import Checkpoint, ForkPoint, RunSpec
from gateway.runs.state import fold
from tests.conftest import ValkeyServer
from workers.messages import (
    Accepted,
    Dispatched,
    Finished,
    Paused,
    Timings,
    Tokens,
    Usage,
    encode,
    gateway_lease_key,
    run_events_key,
)

from .chatting import chatting, ended, generated, reaches, result
from .native_client import NativeClient
from .samples import MISTRAL, QWEN, bundle_of
from .talking_engine import TalkingEngine, text_of, tokenizer
from .test_native_real import reaches as client_reaches
from .test_native_real import serving
from .test_run_verbs import FIRST, answers
from .test_tool_calls import THINKING

SYSTEM = {"role": "system", "content": "You are quick and brown, and you answer as foxes do."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*messages: dict[str, str], **fields: Any) -> RunSpec:
    body = {"messages": messages, "temperature": 0, "max_tokens": 50}
    return RunSpec(**{"kind": "run", "body": msgspec.json.encode(body), **fields})


@pytest.fixture
async def engine(valkey: ValkeyServer) -> AsyncIterator[TalkingEngine]:
    async with TalkingEngine(valkey.url, answers) as talking:
        yield talking


@pytest.mark.parametrize("template", [QWEN, THINKING])
@pytest.mark.parametrize("parent_ends", [True, False])
async def test_a_child_of_a_point_between_messages_has_the_prompt_of_that_conversation(
    engine: TalkingEngine, valkey: ValkeyServer, template: str, *, parent_ends: bool
) -> None:
    engine.bundle = bundle_of(tokenizer(), template)
    async with chatting(valkey.url) as gate:
        engine.allowed = None if parent_ends else 4
        parent = await gate.runs.create(chat(SYSTEM, user("Hi there")))
        await (ended(gate, parent) if parent_ends else generated(gate, parent, 4))
        prompts = []
        engine.allowed = None
        points: tuple[Checkpoint, ...] = ("system", "prompt")
        for checkpoint in points:
            fork = ForkPoint(run=parent, checkpoint=checkpoint)
            forked = await gate.runs.fork(fork, chat(user("And you?")))
            assert forked.parent_tokens == (await gate.runs.state(parent)).checkpoints[checkpoint]
            if parent_ends:
                assert forked.recomputed_tokens == 0
            await ended(gate, forked.run_id)
            prompts.append(submit_of(engine, forked.run_id).token_ids)
        for prompt, messages in zip(prompts, ([SYSTEM], [SYSTEM, user("Hi there")]), strict=True):
            whole = await gate.runs.create(chat(*messages, user("And you?")))
            await ended(gate, whole)
            expected = submit_of(engine, whole)
            assert text_of(prompt) == text_of(expected.token_ids)
            assert prompt == expected.token_ids
            assert expected.system_tokens > 0
        await ended(gate, parent)


def submit_of(engine: TalkingEngine, run_id: str) -> Any:
    return next(turn.submit for turn in engine.turns if turn.submit.run_id == run_id)


async def test_a_childs_own_points_are_those_of_its_prompt(
    engine: TalkingEngine, valkey: ValkeyServer
) -> None:
    async with chatting(valkey.url) as gate:
        parent = await gate.runs.create(chat(SYSTEM, user("Hi there")))
        await ended(gate, parent)
        forked = await gate.runs.fork(ForkPoint(run=parent, checkpoint="system"), chat(user("And you?")))
        await ended(gate, forked.run_id)
        whole = await gate.runs.create(chat(SYSTEM, user("And you?")))
        one, other = await ended(gate, forked.run_id), await ended(gate, whole)
        assert one.checkpoints == other.checkpoints
        submits = submit_of(engine, forked.run_id), submit_of(engine, whole)
        assert submits[0].turn_tokens == submits[1].turn_tokens > submits[0].system_tokens


async def test_points_within_answers_cost_nothing_either(engine: TalkingEngine, valkey: ValkeyServer) -> None:
    async with chatting(valkey.url) as gate:
        engine.allowed = 4
        parent = await gate.runs.create(chat(user("Hi"), on_end="await_input"))
        await generated(gate, parent, 4)
        await gate.runs.pause(parent)
        engine.allowed = None
        at_pause = await gate.runs.fork(ForkPoint(run=parent, checkpoint="pause"), chat(user("a")))
        now = await gate.runs.fork(ForkPoint(run=parent), chat(user("b")))
        assert at_pause.parent_tokens == now.parent_tokens and at_pause.recomputed_tokens == 0
        await gate.runs.resume(parent)
        await reaches(gate, parent, "input_required")
        later = await gate.runs.fork(ForkPoint(run=parent, checkpoint="pause"), chat(user("c")))
        assert (later.parent_tokens, later.recomputed_tokens) == (now.parent_tokens, 0)
        at_turn = await gate.runs.fork(ForkPoint(run=parent, checkpoint="turn"), chat(user("d")))
        by_number = await gate.runs.fork(ForkPoint(run=parent, turn=1), chat(user("e")))
        assert at_turn.parent_tokens == by_number.parent_tokens > now.parent_tokens
        await gate.runs.respond(parent, text="more")
        await reaches(gate, parent, "input_required")
        points = (await gate.runs.state(parent)).checkpoints
        assert points["turn"] > points["prompt"] > at_turn.parent_tokens > points["pause"]
        elsewhere = ForkPoint(run=parent, token=at_turn.parent_tokens - 2)
        assert (await gate.runs.fork(elsewhere, chat(user("f")))).recomputed_tokens == 0  # it has no states
        for forked in (at_pause, now, later, at_turn, by_number):
            await ended(gate, forked.run_id)
        await gate.runs.cancel(parent, seconds=5)


async def test_the_points_of_an_ended_run_outlive_its_events(
    engine: TalkingEngine, valkey: ValkeyServer
) -> None:
    async with chatting(valkey.url) as gate:
        parent = await gate.runs.create(chat(SYSTEM, user("Hi")))
        points = (await ended(gate, parent)).checkpoints
        assert (await result(gate, parent)).checkpoints == points and len(points) == 3
        with valkey.client() as client:
            client.delete(run_events_key(parent))
        assert (await gate.runs.state(parent)).checkpoints == points
        names: tuple[Checkpoint, ...] = ("system", "prompt", "turn")
        for name in names:
            forked = await gate.runs.fork(ForkPoint(run=parent, checkpoint=name), chat(user("And?")))
            assert (forked.parent_tokens, forked.recomputed_tokens) == (points[name], 0)
            await ended(gate, forked.run_id)


async def test_a_child_that_is_taken_over_goes_on_behind_the_same_tokens(
    engine: TalkingEngine, valkey: ValkeyServer
) -> None:
    async with chatting(valkey.url, "g2") as second:
        async with chatting(valkey.url, "g1", kill=True) as first:
            parent = await first.runs.create(chat(SYSTEM, user("Hi")))
            await ended(first, parent)
            engine.allowed = 3
            fork = ForkPoint(run=parent, checkpoint="system")
            child = (await first.runs.fork(fork, chat(user("And?")))).run_id
            await generated(first, child, 3)
            await first.runs.pause(child)
        with valkey.client() as client:
            client.delete(gateway_lease_key("g1"))
        engine.allowed = None
        await second.runs.resume(child)
        await ended(second, child, 20)
        assert (await result(second, child)).text == FIRST
        attempts = [turn.submit for turn in engine.turns if turn.submit.run_id == child]
        assert attempts[1].token_ids.startswith(attempts[0].token_ids)


@pytest.mark.parametrize("name", ["pause", "turn", "system"])
async def test_a_point_that_a_run_has_not_is_refused(
    engine: TalkingEngine, valkey: ValkeyServer, name: Checkpoint
) -> None:
    async with chatting(valkey.url) as gate:
        engine.allowed = 2
        parent = await gate.runs.create(chat(user("Hi")))
        await generated(gate, parent, 2)
        with pytest.raises(GatewayError) as caught:
            await gate.runs.fork(ForkPoint(run=parent, checkpoint=name), chat(user("x")))
        assert caught.value.status == 400
        engine.allowed = None
        await ended(gate, parent)


async def test_a_system_text_of_its_own_has_no_place_behind_its_parents(
    engine: TalkingEngine, valkey: ValkeyServer
) -> None:
    async with chatting(valkey.url) as gate:
        parent = await gate.runs.create(chat(SYSTEM, user("Hi")))
        await ended(gate, parent)
        with pytest.raises(InvalidField) as caught:
            await gate.runs.fork(ForkPoint(run=parent, checkpoint="system"), chat(SYSTEM, user("x")))
        assert caught.value.param == "messages[0].role"


async def test_a_template_without_a_system_part_has_no_such_point(
    engine: TalkingEngine, valkey: ValkeyServer
) -> None:
    engine.bundle = bundle_of(tokenizer(), MISTRAL)
    async with chatting(valkey.url) as gate:
        parent = await gate.runs.create(chat(user("Hi")))
        assert "system" not in (await ended(gate, parent)).checkpoints
        with pytest.raises((InvalidField, Conflict)):
            await gate.runs.fork(ForkPoint(run=parent, checkpoint="system"), chat(user("x")))


def test_points_are_a_fold_over_events() -> None:
    usage, timings = Usage(), Timings()
    opened = TurnOpened(turn=2, cause="steer", added=(), kept_tokens=3, prompt_tokens=120, turn_tokens=115)
    accepted = Accepted(
        model="m", engine_id="e", created=0, prompt_tokens=90, system_tokens=40, turn_tokens=85
    )
    events = [
        ("0-1", accepted),
        ("1-1", Dispatched(engine_id="e", incarnation=1)),
        ("1-2", Tokens(token_ids=bytes(4 * 5), text="abcde")),
        ("1-3", Paused(usage=usage, timings=timings)),
        ("2-1", opened),
        ("3-1", Dispatched(engine_id="e", incarnation=1, turn=2)),
        ("3-2", Tokens(token_ids=bytes(4 * 2), text="ab")),
        ("3-3", Finished(reason="stop", usage=usage, timings=timings)),
    ]  # fmt: skip
    told = [
        fold((name, encode(event)) for name, event in events[:length]).checkpoints for length in (1, 4, 5, 8)
    ]
    assert told == [
        {"system": 40, "prompt": 85},
        {"system": 40, "prompt": 85, "pause": 95},
        {"system": 40, "prompt": 115, "turn": 93},  # the pause lay within what was dropped
        {"system": 40, "prompt": 115, "turn": 122},
    ]


async def test_points_are_shown_and_taken_over_the_api(
    engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with serving(valkey.url, tmp_path) as client:
        parent = await create(client, SYSTEM, user("Hi"))
        told = await client_reaches(client, parent, lambda told: told["ended"] is not None)
        assert [point["name"] for point in told["checkpoints"]] == ["system", "prompt", "turn"]
        assert sorted(point["token"] for point in told["checkpoints"])[0] > 5
        for point in told["checkpoints"]:
            body = {"input": "And?", "at": {"checkpoint": point["name"]}}
            status, child = await client.call("POST", f"/v1/runs/{parent}/fork", body)
            assert (status, child["parent_tokens"], child["recomputed_tokens"]) == (202, point["token"], 0)
        by_create = {"input": "And?", "fork": {"run": parent, "at": {"checkpoint": "system"}}}
        status, child = await client.call("POST", "/v1/runs", by_create)
        assert (status, child["parent_tokens"]) == (202, told["checkpoints"][0]["token"])
        for bad in ({"checkpoint": "end"}, {"checkpoint": "turn", "turn": 1}, {"checkpoint": "pause"}):
            status, child = await client.call("POST", f"/v1/runs/{parent}/fork", {"input": "x", "at": bad})
            assert (status, child["error"]["param"].split(".")[0]) == (400, "at")


async def create(client: NativeClient, *messages: dict[str, str]) -> str:
    status, told = await client.call("POST", "/v1/runs", {"messages": messages})
    assert status == 202, told
    return str(told["id"])
