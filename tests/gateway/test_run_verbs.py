"""Runs of many turns over a real Valkey: steered, answered, paused and resumed, cancelled."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import Conflict, InvalidField
from gateway.runs.commands import Answered, RespondRun, ToolOutput, decode_command
from gateway.runs.events import InputRequired, Resumed, TurnOpened, run_commands_key
from tests.conftest import ValkeyServer
from workers.messages import EVENT_FIELD, Finished, Paused, RunEnded, encode

from .chatting import CALL, assert_adds_up, chatting, ended, generated, reaches, result, spec
from .fake_engine import until
from .talking_engine import TalkingEngine
from .test_runs import stored

FIRST, SECOND = "The quick brown fox jumps over the lazy dog", "Fine"


def answers(prompt: str) -> str:
    """A first answer, then another."""
    return FIRST if prompt.count("<|im_start|>assistant") == 1 else SECOND


def looks(prompt: str) -> str:
    """Words and a call, then an answer."""
    return f"I look. {CALL}" if prompt.count("<|im_start|>assistant") == 1 else "ok"


def calls(prompt: str) -> str:
    """A call until there is a result."""
    return "done" if "contents" in prompt else CALL


async def test_a_detached_run_ends_with_a_result_that_is_kept(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers), chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec())
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        kept = await result(gate, run_id)
        assert (kept.state, kept.text, kept.turns, kept.is_partial) == ("completed", FIRST, 1, False)
        assert kept.usage == state.usage


async def test_a_steer_now_closes_the_turn_and_goes_on_behind_its_very_tokens(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 5
        run_id = await gate.runs.create(spec())
        await generated(gate, run_id, 5)
        steered = await gate.runs.steer(run_id, "Stop, be brief", command="c1")
        engine.allowed = None
        assert (steered.applied, steered.turn) == ("now", 2)
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        first, second = (turn.submit for turn in engine.turns)
        so_far = b"".join(e.token_ids for e in stored(valkey, run_id)[:20] if hasattr(e, "token_ids"))[:20]
        assert second.token_ids.startswith(first.token_ids + so_far)
        assert engine.prompt_of(1).endswith(
            "<|im_end|>\n<|im_start|>user\nStop, be brief<|im_end|>\n<|im_start|>assistant\n"
        )
        assert state.turn == 2
        assert state.usage.prompt_tokens == (len(first.token_ids) + len(second.token_ids)) // 4
        assert (await result(gate, run_id)).text == SECOND
        assert await gate.runs.steer(run_id, "Stop, be brief", command="c1") == steered.__class__(
            "completed", "now", 2
        )


async def test_texts_for_the_next_turn_come_together_and_queued_ones_get_a_turn_each(
    valkey: ValkeyServer,
) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 3
        run_id = await gate.runs.create(spec())
        await generated(gate, run_id, 3)
        assert (await gate.runs.steer(run_id, "q1", "queue")).applied == "queue"
        assert (await gate.runs.steer(run_id, "n1", "next_turn")).applied == "next_turn"
        assert (await gate.runs.steer(run_id, "q2", "queue")).applied == "queue"
        assert (await gate.runs.steer(run_id, "n2", "next_turn")).applied == "next_turn"
        engine.allowed = None
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        opened = [event for event in stored(valkey, run_id) if isinstance(event, TurnOpened)]
        assert [event.cause for event in opened] == ["next_turn", "queue", "queue"]
        assert [b"n1" in event.added[0] and b"n2" in event.added[0] for event in opened] == [
            True,
            False,
            False,
        ]
        assert "user\nq1<" in engine.prompt_of(2)
        assert "user\nq2<" in engine.prompt_of(3)
        assert f"{FIRST}<|im_end|>\n<|im_start|>user\nn1\n\nn2<|im_end|>" in engine.prompt_of(3)


async def test_a_steer_of_a_run_that_has_ended_is_a_conflict(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers), chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec())
        await ended(gate, run_id)
        with pytest.raises(Conflict) as caught:
            await gate.runs.steer(run_id, "too late")
        assert caught.value.kind == "run_ended"


async def test_a_steer_within_a_tool_call_drops_the_call_whole(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, looks) as engine,
        chatting(valkey.url) as gate,
    ):
        engine.allowed = 14
        run_id = await gate.runs.create(spec(tools=True))
        await generated(gate, run_id, 14)
        steered = await gate.runs.steer(run_id, "Do not")
        engine.allowed = None
        assert steered.applied == "now"
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        (opened,) = [event for event in stored(valkey, run_id) if isinstance(event, TurnOpened)]
        assert opened.dropped_call is not None
        assert 0 < opened.kept_tokens < 14
        assert "<tool_call>" not in engine.prompt_of(1).split("<|im_start|>assistant")[1]
        assert "I look." in engine.prompt_of(1)


async def test_calls_wait_for_their_results_which_open_a_turn(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, calls) as engine,
        chatting(valkey.url) as gate,
    ):
        run_id = await gate.runs.create(spec(tools=True))
        state = await reaches(gate, run_id, "input_required")
        (call,) = state.calls
        assert (call.name, call.arguments) == ("read_file", '{"path": "/a"}')
        assert (await gate.runs.steer(run_id, "hint")).applied == "next_turn"
        outputs = [ToolOutput(call_id=call.id, output="contents")]
        responded = await gate.runs.respond(run_id, outputs, command="r1")
        assert responded.turn == 2
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        assert engine.turns[1].submit.token_ids.startswith(engine.turns[0].submit.token_ids)
        assert engine.prompt_of(1).endswith(
            "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\ncontents\n</tool_response><|im_end|>\n"
            "<|im_start|>user\nhint<|im_end|>\n<|im_start|>assistant\n"
        )
        assert (await gate.runs.respond(run_id, outputs, command="r1")).turn == 2
        with pytest.raises(Conflict):
            await gate.runs.respond(run_id, outputs)
        assert (await result(gate, run_id)).text == "done"


def asks_twice(prompt: str) -> str:
    return "done" if "<tool_response>" in prompt else f"{CALL}\n{CALL.replace('/a', '/b')}"


async def test_a_response_answers_all_calls_each_once(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, asks_twice) as engine, chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec(tools=True))
        state = await reaches(gate, run_id, "input_required")
        one, two = [ToolOutput(call_id=call.id, output=call.arguments) for call in state.calls]
        for outputs, param, named in (
            ([one], "outputs", two.call_id),
            ([two], "outputs", one.call_id),
            ([one, two, one], "outputs[2].call_id", one.call_id),
            ([one, ToolOutput(call_id="call_x", output="")], "outputs[1].call_id", two.call_id),
            ([], "outputs", one.call_id),
        ):
            with pytest.raises(InvalidField) as caught:
                await gate.runs.respond(run_id, outputs, "" if outputs else "text")
            assert caught.value.param == param and named in caught.value.message
        assert (await gate.runs.state(run_id)).turn == 1
        assert (await gate.runs.respond(run_id, [two, one])).turn == 2
        await ended(gate, run_id)
        told = engine.prompt_of(1)
        assert told.count("<tool_response>") == 2
        assert told.rindex('{"path": "/a"}') < told.rindex('{"path": "/b"}'), "in the order of the calls"


async def test_a_response_of_another_turn_that_its_owner_finds_is_refused(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, asks_twice), chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec(tools=True))
        state = await reaches(gate, run_id, "input_required")
        early = RespondRun(command="r", outputs=(ToolOutput(call_id=state.calls[0].id, output="x"),))
        with valkey.client() as client:  # recorded before the run came to wait
            client.xadd(run_commands_key(run_id), {EVENT_FIELD: encode(early)})
        run = gate.runs.mine(run_id)
        assert run is not None
        await gate.runs.driver.look(run)
        assert (await gate.runs.state(run_id)).status == "input_required"
        with valkey.client() as client:
            ((_, fields),) = client.xrevrange(run_commands_key(run_id), count=1)
        answered = decode_command(fields[EVENT_FIELD])
        assert isinstance(answered, Answered)
        assert (answered.command, answered.error) == ("r", "invalid_field")
        assert state.calls[1].id in answered.message
        await gate.runs.cancel(run_id, seconds=5)


async def test_a_repeated_response_is_answered_the_same_while_the_run_waits_again(
    valkey: ValkeyServer,
) -> None:
    async with TalkingEngine(valkey.url, lambda prompt: CALL), chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec(tools=True))
        state = await reaches(gate, run_id, "input_required")
        outputs = [ToolOutput(call_id=state.calls[0].id, output="contents")]
        assert (await gate.runs.respond(run_id, outputs, command="r1")).turn == 2
        await reaches(gate, run_id, "input_required")
        assert (await gate.runs.respond(run_id, outputs, command="r1")).turn == 2
        await gate.runs.cancel(run_id, seconds=5)


async def test_a_response_that_nobody_waits_for_is_a_conflict(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 2
        run_id = await gate.runs.create(spec())
        await generated(gate, run_id, 2)
        with pytest.raises(Conflict) as caught:
            await gate.runs.respond(run_id, text="hm")
        assert caught.value.kind == "no_input_required"
        engine.allowed = None
        await ended(gate, run_id)


async def test_a_run_that_awaits_input_goes_on_with_text(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers), chatting(valkey.url) as gate:
        run_id = await gate.runs.create(spec(on_end="await_input"))
        await reaches(gate, run_id, "input_required")
        assert (await gate.runs.respond(run_id, text="more")).turn == 2
        await reaches(gate, run_id, "input_required")
        assert (await gate.runs.cancel(run_id, seconds=5)).status == "cancelled"
        state = await ended(gate, run_id)
        assert state.turn == 2


@pytest.mark.parametrize("where", ["line", "engine", "decoding"])
async def test_a_paused_run_goes_on_where_it_was(valkey: ValkeyServer, where: str) -> None:
    async with TalkingEngine(valkey.url, answers, workers=1) as engine, chatting(valkey.url) as gate:
        engine.allowed, engine.is_starting = 4, where == "decoding"
        others = [await gate.runs.create(spec("other")) for _ in range(2 if where == "line" else 0)]
        if others:
            await engine.turn(1)
        run_id = await gate.runs.create(spec())
        await (generated(gate, run_id, 4) if where == "decoding" else reaches(gate, run_id, "queued"))
        if where == "engine":
            await engine.turn(0)
        assert (await gate.runs.pause(run_id)).status == "paused"
        assert (await gate.runs.pause(run_id)).status == "paused"
        engine.allowed, engine.is_starting = None, True
        for other in others:
            await ended(gate, other)
        resumed = await gate.runs.resume(run_id)
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        assert (await result(gate, run_id)).text == FIRST
        if where == "decoding":
            assert resumed.recomputed_tokens == 0
            assert engine.turns[-1].submit.generated_tokens == 4
        assert [type(e) for e in stored(valkey, run_id) if isinstance(e, Paused | Resumed | Finished)] == [
            Paused,
            Resumed,
            Finished,
        ]


async def test_a_steer_of_a_paused_run_applies_and_resumes(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec())
        await generated(gate, run_id, 4)
        await gate.runs.pause(run_id)
        engine.allowed = None
        assert (await gate.runs.steer(run_id, "go on")).applied == "now"
        state = await ended(gate, run_id)
        assert (state.turn, state.status) == (2, "completed")
        assert_adds_up(valkey, run_id, state)


async def test_a_paused_run_can_be_cancelled(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec())
        await generated(gate, run_id, 4)
        await gate.runs.pause(run_id)
        assert (await gate.runs.cancel(run_id, seconds=5)).status == "cancelled"
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        assert (await result(gate, run_id)).is_partial
        with pytest.raises(Conflict):
            await gate.runs.resume(run_id)


async def test_a_graceful_cancel_lets_the_turn_end(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec())
        await generated(gate, run_id, 4)
        await gate.runs.steer(run_id, "more", "queue")
        await gate.runs.cancel(run_id, "graceful")
        engine.allowed = None
        state = await ended(gate, run_id)
        assert (state.status, state.turn) == ("cancelled", 1)
        assert (await result(gate, run_id)).text == FIRST


async def test_cancel_racing_completion_has_one_end(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers), chatting(valkey.url) as gate:
        for delay in range(8):
            run_id = await gate.runs.create(spec())
            await asyncio.sleep(delay / 200)
            cancelled = await gate.runs.cancel(run_id, seconds=5)
            state = await ended(gate, run_id)
            assert cancelled.status == state.status
            assert state.status in ("completed", "cancelled")
            assert_adds_up(valkey, run_id, state)


async def test_a_cancel_of_a_tree_ends_all_that_descend(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 2
        root = await gate.runs.create(spec(session="s", agent="a"))
        child = await gate.runs.create(spec(session="s", agent="b", parent_run=root))
        by_agent = await gate.runs.create(spec(session="s", agent="c", parent="b"))
        other = await gate.runs.create(spec(session="s", agent="x"))
        await until(lambda: len(engine.turns) == 4)
        cancelled = await gate.runs.cancel(root, tree=True, seconds=5)
        assert (cancelled.status, cancelled.num_runs) == ("cancelled", 3)
        for run_id in (root, child, by_agent):
            assert (await ended(gate, run_id)).status == "cancelled"
        engine.allowed = None
        assert (await ended(gate, other)).status == "completed"


async def test_the_session_log_tells_each_lifecycle_event_once(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, lambda p: CALL if "tool_resp" not in p else "ok"),
        chatting(valkey.url) as gate,
    ):
        run_id = await gate.runs.create(spec(tools=True, session="s", agent="a"))
        state = await reaches(gate, run_id, "input_required")
        await gate.runs.respond(run_id, [ToolOutput(call_id=state.calls[0].id, output="contents")])
        await ended(gate, run_id)
        entries = await gate.runs.keeper.store.session_log.read("", "s")
        told = [entry.event_id for entry in entries]
        assert len(told) == len(set(told))
        kinds = [type(event).__name__ for event in stored(valkey, run_id) if not hasattr(event, "token_ids")]
        assert len(told) == len(kinds)
        assert "InputRequired" in kinds and isinstance(stored(valkey, run_id)[-1], RunEnded)
        assert any(isinstance(event, InputRequired) for event in stored(valkey, run_id))


async def test_what_a_turn_computed_before_a_pause_is_not_told_as_cached(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, chatting(valkey.url) as gate:
        engine.allowed = 4
        run_id = await gate.runs.create(spec())
        for num_tokens in (4, 8):
            await generated(gate, run_id, num_tokens)
            await gate.runs.pause(run_id)
            resumed = await gate.runs.resume(run_id)
            assert resumed.recomputed_tokens == 0
        engine.allowed = None
        usage = (await ended(gate, run_id)).usage
        assert (usage.prompt_tokens, usage.cached_tokens) == (len(engine.turns[0].submit.token_ids) // 4, 0)
