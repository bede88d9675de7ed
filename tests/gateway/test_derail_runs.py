"""What detectors find of real runs on a real bus: reported in their streams, steered or stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from gateway.derail.ladder import action_for, is_unattended
from gateway.derail.rules import NOTE, DerailRules
from gateway.derail.watching import Watching
from gateway.runs.commands import ToolOutput
from gateway.runs.spec import RunSpec
from tests.conftest import ValkeyServer
from workers.messages import (
    Cancelled,
    Derail,
    Derailed,
    EngineStats,
    Finished,
    RunEnded,
    TurnEnd,
    encode,
    engine_key,
)

from .chatting import CALL, assert_adds_up, chatting, ended, generated, reaches, result, spec
from .fake_engine import until
from .samples import TOOLS
from .talking_engine import TalkingEngine
from .test_derail_text import counted
from .test_runs import Gateway, stored

RULES = DerailRules(warn_chunks=3, critical_chunks=6)


@dataclass
class Figures:
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def found(self, kind: str, action: str) -> None:
        self.counts[kind, action] += 1


@dataclass
class Watched:
    """A gateway whose runs are looked after, and a clock that only goes on when it is told to."""

    gate: Gateway
    figures: Figures
    watching: Watching
    seconds: float = 0.0


@asynccontextmanager
async def watched(url: str, rules: DerailRules = RULES, name: str = "g1") -> AsyncIterator[Watched]:
    async with chatting(url, name) as gate:
        figures, now = Figures(), [0.0]
        watching = Watching(rules, gate.runs, gate.directory, figures, clock=lambda: now[0])
        found = Watched(gate, figures, watching)
        watching._clock = lambda: found.seconds
        watching.begin()
        yield found


def told(valkey: ValkeyServer, run_id: str) -> list[Derail]:
    return [event.what for event in stored(valkey, run_id) if isinstance(event, Derailed)]


def kinds(found: list[Derail]) -> set[str]:
    return {one.derail for one in found}


def asked(*rounds: int, **fields: Any) -> RunSpec:
    """A run whose body holds so many equal calls with equal results."""
    call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "/a"}'}}
    turn: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "none"},
    ]
    messages = [{"role": "user", "content": "Go"}, *turn * sum(rounds)]
    body = msgspec.json.encode({"messages": messages, "tools": TOOLS, "temperature": 0})
    return RunSpec(**{"kind": "run", "body": body, **fields})


async def test_a_text_loop_of_an_attended_run_is_reported_and_nothing_else(valkey: ValkeyServer) -> None:
    text = f"Hello there.\n{counted(8)}"
    async with TalkingEngine(valkey.url, lambda _: text), watched(valkey.url) as here:
        run_id = await here.gate.runs.create(spec())
        state = await ended(here.gate, run_id)
        assert state.status == "completed"
        found = told(valkey, run_id)[-1]
        assert (found.derail, found.severity) == ("text_loop", "critical")
        assert 0 < found.first_token < 40 and found.excerpt in text
        assert here.figures.counts == {("text_loop", "report"): 2}
        kept = await result(here.gate, run_id)
        assert (kept.derail, kept.text, kept.is_partial) == (found, text, False)
        assert_adds_up(valkey, run_id, state)


@pytest.mark.parametrize("by", ["spec", "settings"])
async def test_a_text_loop_that_nobody_watches_is_stopped(valkey: ValkeyServer, by: str) -> None:
    text = counted(60)
    rules = msgspec.structs.replace(RULES, unattended=("night-*",) if by == "settings" else ())
    fields: dict[str, Any] = {"session": "night-1"} if by == "settings" else {"is_unattended": True}
    async with TalkingEngine(valkey.url, lambda _: text) as engine, watched(valkey.url, rules) as here:
        engine.seconds_per_token = 0.001
        run_id = await here.gate.runs.create(spec(**fields))
        state = await ended(here.gate, run_id, 30)
        kept = await result(here.gate, run_id)
        assert state.status == kept.state == "derailed"
        assert kept.derail is not None and kept.derail.severity == "critical"
        assert kept.is_partial and kept.text and text.startswith(kept.text) and kept.text != text
        events = stored(valkey, run_id)
        assert [type(event) for event in events if isinstance(event, TurnEnd | RunEnded)] == [
            Cancelled,
            RunEnded,
        ]
        assert_adds_up(valkey, run_id, state)


async def test_a_run_that_wants_reports_only_is_not_stopped(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, lambda _: counted(10)), watched(valkey.url) as here:
        run_id = await here.gate.runs.create(spec(is_unattended=True, derail="report"))
        assert (await ended(here.gate, run_id)).status == "completed"
        assert here.figures.counts == {("text_loop", "report"): 2}


@pytest.mark.parametrize(
    "text",
    [" \n", "<think>\nSo I say it.\n</think>\n\n", "<think>\nSo I say it", "<think>\nSo.\n</think>\n\n "],
)
async def test_an_end_without_an_answer_is_a_warning(valkey: ValkeyServer, text: str) -> None:
    async with TalkingEngine(valkey.url, lambda _: text), watched(valkey.url) as here:
        run_id = await here.gate.runs.create(spec(is_unattended=True))
        assert (await ended(here.gate, run_id)).status == "completed"
        assert told(valkey, run_id) == [Derail(derail="empty", severity="warning")]


async def test_a_thought_that_a_limit_cuts_off_is_no_empty_end(valkey: ValkeyServer) -> None:
    async with (
        TalkingEngine(valkey.url, lambda _: "<think>\nSo I say it.\n</think>\n\nIt."),
        watched(valkey.url) as here,
    ):
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "Go"}], "max_tokens": 4})
        run_id = await here.gate.runs.create(RunSpec(kind="run", body=body))
        assert (await ended(here.gate, run_id)).status == "completed"
        assert not told(valkey, run_id)


async def test_an_end_that_breaks_its_schema_is_a_warning(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, lambda _: "no JSON"), watched(valkey.url) as here:
        run_id = await here.gate.runs.create(spec(result_schema=b'{"type": "object"}'))
        assert (await ended(here.gate, run_id)).status == "completed"
        assert [found.derail for found in told(valkey, run_id)] == ["schema"]
        assert here.figures.counts == {("schema", "report"): 1}


async def test_repeated_calls_are_noted_next_to_the_results_and_stopped_if_nobody_watches(
    valkey: ValkeyServer,
) -> None:
    async with TalkingEngine(valkey.url, lambda _: CALL) as engine, watched(valkey.url) as here:
        run_id = await here.gate.runs.create(spec(tools=True, is_unattended=True))
        for _ in range(4):
            state = await reaches(here.gate, run_id, "input_required")
            await here.gate.runs.respond(run_id, [ToolOutput(call_id=state.calls[0].id, output="none")])
        state = await ended(here.gate, run_id)
        assert (state.status, state.turn) == ("derailed", 5)
        assert [NOTE in engine.prompt_of(number) for number in range(5)] == [False, False, False, True, True]
        assert [found.severity for found in told(valkey, run_id)] == ["warning", "critical"]
        assert here.figures.counts == {("tool_repeat", "steer"): 1, ("tool_repeat", "stop"): 1}
        assert told(valkey, run_id)[0].excerpt.startswith('read_file({"path"')
        kept = await result(here.gate, run_id)
        assert kept.state == "derailed" and kept.calls[0].name == "read_file"


async def test_the_calls_before_a_call_are_in_its_prompt(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, lambda _: CALL), watched(valkey.url) as here:
        talk = here.gate.runs.talk
        assert talk is not None
        found = []
        for rounds, unattended in ((1, False), (2, False), (4, False), (4, True)):
            begun = await talk.begin(asked(rounds), None)
            hints = replace(begun.order.hints, is_unattended=unattended)
            run_id = await here.gate.runs.start(replace(begun.order, hints=hints))
            status = (await ended(here.gate, run_id)).status
            found.append((status, [(one.derail, one.severity) for one in told(valkey, run_id)]))
        assert found == [
            ("completed", []),
            ("completed", [("tool_repeat", "warning")]),
            ("completed", [("tool_repeat", "critical")]),
            ("derailed", [("tool_repeat", "critical")]),
        ]


async def test_a_turn_without_tokens_while_its_engine_computes_has_stalled(valkey: ValkeyServer) -> None:
    class Counting(TalkingEngine):
        num_steps = 0

        async def compute(self) -> None:
            self.num_steps += 1
            stats = EngineStats(incarnation=1, ready=True, num_steps=self.num_steps)
            fields: Any = {"stats": encode(stats)}
            await self._client.hset(engine_key("e1"), mapping=fields)

    async with Counting(valkey.url, lambda _: "some words") as engine, watched(valkey.url) as here:
        engine.allowed = 2
        run_id = await here.gate.runs.create(spec(is_unattended=True))
        await generated(here.gate, run_id, 2)
        await until(lambda: here.gate.runs.local()[0].state.num_tokens == 2)
        here.watching.look()
        here.seconds = 31
        here.watching.look()
        assert not here.figures.counts  # the engine has made no step: it is not the turn that stands
        await engine.compute()
        await here.gate.directory.refresh()
        here.watching.look()
        assert here.figures.counts == {("stall", "report"): 1}
        await until(lambda: here.gate.runs.local()[0].state.derail is not None)  # it is told while it lasts
        here.seconds = 121
        here.watching.look()
        assert here.figures.counts == {("stall", "report"): 1, ("stall", "stop"): 1}
        assert (await ended(here.gate, run_id)).status == "derailed"
        assert told(valkey, run_id) == [
            Derail(derail="stall", severity="warning", first_token=2),
            Derail(derail="stall", severity="critical", first_token=2, action="stop"),
        ]


async def test_what_is_reported_ends_no_turn_twice(valkey: ValkeyServer) -> None:
    async with TalkingEngine(valkey.url, lambda _: counted(8)), watched(valkey.url) as here:
        run_id = await here.gate.runs.create(spec(on_end="await_input"))
        await reaches(here.gate, run_id, "input_required")
        await here.gate.runs.respond(run_id, text="more")
        await reaches(here.gate, run_id, "input_required")
        await here.gate.runs.cancel(run_id, seconds=5)
        state = await ended(here.gate, run_id)
        ends = [event for event in stored(valkey, run_id) if isinstance(event, TurnEnd)]
        assert [type(end) for end in ends] == [Finished, Finished]
        assert state.usage.completion_tokens == sum(end.usage.completion_tokens for end in ends)
        assert state.derail is not None and kinds(told(valkey, run_id)) == {"text_loop"}


@pytest.mark.parametrize("severity", ["warning", "critical"])
@pytest.mark.parametrize("unattended", [False, True])
@pytest.mark.parametrize("kind", ["call", "run"])
@pytest.mark.parametrize("may_stop", [False, True])
@pytest.mark.parametrize("derail", ["tool_repeat", "text_loop"])
def test_the_ladder(severity: Any, unattended: bool, kind: Any, may_stop: bool, derail: Any) -> None:
    found = Derail(derail=derail, severity=severity)
    action = action_for(found, RunSpec(kind=kind, is_unattended=unattended), RULES, may_stop=may_stop)
    if severity == "critical" and unattended and may_stop:
        assert action == "stop"
    else:
        assert action == ("steer" if kind == "run" and derail == "tool_repeat" else "report")


def test_no_note_steers_nothing_and_a_star_is_every_session() -> None:
    silent = DerailRules(note="", unattended=("*",))
    found = Derail(derail="tool_repeat", severity="warning")
    assert action_for(found, RunSpec(kind="run"), silent, may_stop=True) == "report"
    assert is_unattended(RunSpec(), silent)
    assert not is_unattended(RunSpec(), DerailRules(unattended=("night-*",)))
