"""Joins the detectors to the gateway's runs: feeds them, decides by the ladder, counts and logs without text.

Owns what is remembered of a run that is looked after. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import structlog

from gateway.flow.directory import Directory
from gateway.runs.astray import Wanted
from gateway.runs.checking import problem_in
from gateway.runs.commands import CancelRun, Command, SteerRun
from gateway.runs.ends import calls_of
from gateway.runs.events import TurnOpened
from gateway.runs.run import Run, RunEvent
from gateway.runs.runs import Runs
from gateway.runs.state import Phase
from gateway.text.parsing import Said
from workers.messages import Derail, Derailed, DerailKind, Finished, RunEnded, Tokens

from .ladder import action_for
from .rules import MAX_HISTORY, DerailRules
from .text_loops import TextLoop, TextLoops
from .tool_loops import PastCall, asked_calls, past_calls, tool_loop

CRITICAL_STALLS = 4
"""A stall of so many times `stall_seconds` is critical."""
MAX_EXCERPT_CHARS = 200

_TEXT_LOOPS = {("text_loop", severity) for severity in ("warning", "critical")}
_TOOL_LOOPS = {
    (kind, severity) for kind in ("tool_repeat", "tool_cycle") for severity in ("warning", "critical")
}

log = structlog.get_logger(__name__)


class Figures(Protocol):
    """Who counts."""

    def found(self, kind: str, action: str) -> None:
        """A run went astray, and that was done about it."""


@dataclass(slots=True)
class _Turn:
    """What was seen of a run's present turn."""

    loops: TextLoops
    ends: array[int] = field(default_factory=lambda: array("Q"))  # characters so far, by event
    firsts: array[int] = field(default_factory=lambda: array("Q"))  # each event's first token
    num_chars: int = 0


@dataclass(slots=True)
class _Watched:
    """A run of this gateway."""

    turn: _Turn
    told: set[tuple[str, str]] = field(default_factory=set)  # kinds and severities: each once
    calls: list[PastCall] = field(default_factory=list)  # of its own turns that are over
    asked: list[dict[str, Any]] = field(default_factory=list)  # the last one's calls, as a message has them
    num_turns: int = 0  # that are in these
    heard_at: float = 0.0
    num_steps: int | None = None  # of its engine by then

    def begin_turn(self, turn: _Turn) -> None:
        """Anew, but for the calls."""
        self.turn = turn
        self.told &= _TOOL_LOOPS

    def go_on(self, run_id: str, added: Sequence[bytes], said: Said) -> None:
        """One more turn is over: what opened it has the results of the calls before it."""
        results = [msgspec.json.decode(message) for message in added]
        answered = past_calls([{"role": "assistant", "tool_calls": self.asked}, *results])
        self.calls = [*self.calls, *answered][-MAX_HISTORY:]
        self.num_turns += 1
        self.asked = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls_of(run_id, self.num_turns, said)
        ]


class Watching:
    """Looks after the runs of one gateway."""

    def __init__(
        self,
        rules: DerailRules,
        runs: Runs,
        directory: Directory,
        figures: Figures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._runs = runs
        self._directory = directory
        self._figures = figures
        self._clock = clock
        self._watched: dict[str, _Watched] = {}

    def begin(self) -> None:
        """From here on."""
        self._runs.astray.watchers.append(self.hear)
        self._runs.astray.examiners.append(self.examine)
        self._directory.on_poll.append(self.look)

    # Each event.

    def hear(self, run: Run, entry: RunEvent) -> Wanted:
        """One more event of a run of ours."""
        watched = self._watched_of(run)
        if not isinstance(entry.event, Derailed):
            watched.heard_at, watched.num_steps = self._clock(), None
        match entry.event:
            case Tokens() as tokens:
                return self._hear_tokens(run, watched, tokens)
            case TurnOpened():
                watched.begin_turn(self._fresh_turn())
            case Derailed(what=what) if (what.derail, what.severity) not in watched.told:  # the engine's own
                watched.told |= {(what.derail, what.severity), *_TEXT_LOOPS}  # which it is as well
                self._note(what)
            case RunEnded():
                del self._watched[run.run_id]
        return []

    def _hear_tokens(self, run: Run, watched: _Watched, tokens: Tokens) -> Wanted:
        turn = watched.turn
        turn.num_chars += len(tokens.text)
        turn.ends.append(turn.num_chars)
        turn.firsts.append(run.state.turn_tokens - len(tokens.token_ids) // 4)
        return self._told_loops(run, watched, turn.loops.feed(tokens.text))

    def _told_loops(self, run: Run, watched: _Watched, loops: Sequence[TextLoop]) -> list[Command | Derail]:
        turn, wanted = watched.turn, list[Command | Derail]()
        for loop in loops:
            index = min(bisect_right(turn.ends, loop.start), len(turn.ends) - 1)
            first, severity = turn.firsts[index], loop.severity
            found = Derail(derail="text_loop", severity=severity, first_token=first, excerpt=loop.excerpt)
            wanted.extend(self._found(run, found))
        return wanted

    # Each turn's end.

    async def examine(self, run: Run) -> Wanted:
        """A turn that has ended."""
        watched, end = self._watched_of(run), run.state.turn_end
        if not isinstance(end, Finished):
            return []
        wanted = self._told_loops(run, watched, watched.turn.loops.end())
        said = run.said
        wanted.extend(self._look_at_calls(run, watched, said))
        if end.reason != "stop":
            return wanted
        if not (said.content.strip() or said.calls):  # a thought that leads to nothing is no answer
            wanted.extend(self._found(run, Derail(derail="empty", severity="warning")))
        elif run.state.spec.result_schema and not said.calls:
            schema = run.state.spec.result_schema
            problem = await asyncio.to_thread(problem_in, said.content.strip(), schema)
            if problem is not None:
                broken = Derail(derail="schema", severity="warning", excerpt=problem[:MAX_EXCERPT_CHARS])
                wanted.extend(self._found(run, broken))
        return wanted

    def _look_at_calls(self, run: Run, watched: _Watched, said: Said) -> Wanted:
        turns = run.transcript.turns
        for turn in turns[watched.num_turns : -1]:  # after a takeover
            watched.go_on(run.run_id, turn.added, turn.said())
        watched.go_on(run.run_id, turns[-1].added, said)
        before = run.order.past_calls if run.order is not None else ()
        loop = tool_loop([*before, *watched.calls], asked_calls(said.calls), self._rules)
        if loop is None:
            watched.told -= _TOOL_LOOPS
            return []
        call = next(call for call in reversed(said.calls) if call.is_whole)
        excerpt = f"{call.name}({call.arguments})"[:MAX_EXCERPT_CHARS]
        kind: DerailKind = "tool_repeat" if loop.period == 1 else "tool_cycle"
        return self._found(run, Derail(derail=kind, severity=loop.severity, excerpt=excerpt))

    # Each look at the engines.

    def look(self) -> None:
        """Turns on a worker that get nothing though their engine computes."""
        local = {run.run_id: run for run in self._runs.local()}
        for run_id in self._watched.keys() - local:
            del self._watched[run_id]
        steps = {
            view.info.engine_id: view.stats.num_steps for view in self._directory.engines() if view.alive
        }
        for run_id, watched in list(self._watched.items()):
            run = local[run_id]
            num_steps = steps.get(run.state.engine_id or "")
            if run.state.phase in (Phase.PREFILLING, Phase.GENERATING) and num_steps is not None:
                with run.in_logs():
                    self._runs.astray.heed(run, self._stalled(run, watched, num_steps))

    def _stalled(self, run: Run, watched: _Watched, num_steps: int) -> Wanted:
        if watched.num_steps is None:
            watched.num_steps = num_steps
        silence = self._clock() - watched.heard_at
        if silence < self._rules.stall_seconds or num_steps <= watched.num_steps:
            return []
        is_critical = silence >= CRITICAL_STALLS * self._rules.stall_seconds
        found = Derail(
            derail="stall",
            severity="critical" if is_critical else "warning",
            first_token=run.state.turn_tokens,
        )
        return self._found(run, found)

    # What was found.

    def _found(self, run: Run, found: Derail) -> list[Command | Derail]:
        """Tells it unless it is known."""
        told = self._watched_of(run).told
        if (found.derail, found.severity) in told:
            return []
        told.add((found.derail, found.severity))
        action = action_for(found, run.state.spec, self._rules, may_stop=_may_stop(run))
        found = msgspec.structs.replace(found, action=action)
        self._note(found)
        command = f"derail-{found.derail}-{found.severity}-{run.state.turn}"
        match action:
            case "stop":
                return [found, CancelRun(command=command, derail=found)]
            case "steer":
                return [found, SteerRun(command=command, text=self._rules.note, when="next_turn")]
        return [found]

    def _note(self, found: Derail) -> None:
        self._figures.found(found.derail, found.action)
        log.info("astray", derail=found.derail, severity=found.severity, action=found.action)

    def _watched_of(self, run: Run) -> _Watched:
        watched = self._watched.get(run.run_id)
        if watched is None:
            watched = self._watched[run.run_id] = _Watched(self._fresh_turn(), heard_at=self._clock())
        return watched

    def _fresh_turn(self) -> _Turn:
        return _Turn(TextLoops(self._rules))


def _may_stop(run: Run) -> bool:
    """Whether its caller wants a derailed turn to end."""
    return run.state.spec.derail == "stop" and (run.order is None or run.order.stops_derailed)
