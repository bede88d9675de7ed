"""What a person sees of runs: one line for each event, tables, and no control codes from a model. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gateway.client import PublicEvent, RunBody, RunLine, RunUsage, ToolCallMade, TreeBody
from gateway.client.streams import ENDINGS
from gateway.native.bodies import TreeAgent
from gateway.runs.told import (
    AskedCall,
    CallDropped,
    Gap,
    RunAccepted,
    RunDerail,
    RunInputRequired,
    RunPaused,
    RunProgress,
    RunResumed,
    RunRouted,
    RunStarted,
    RunSteered,
    TurnOver,
    UsageBody,
)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""C0 and C1 but tab and newline, and what turns the direction of text around."""

WIDTH = 200


def plain(text: str) -> str:
    """Text that a terminal shows as it is: what a model writes must not move the cursor or hide lines."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def one_line(text: str, width: int = WIDTH) -> str:
    """Its beginning, in one line."""
    line = plain(" ".join(text[: 4 * width].split()))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def line_of(event: PublicEvent) -> str | None:
    """What an event tells, without the run's name; None for what is no news, or text."""
    match event:
        case RunAccepted():
            return f"accepted: {one_line(event.model, 60)}, {event.prompt_tokens:,} prompt tokens"
        case RunRouted(turn=turn, attempt=attempt):
            again = f", attempt {attempt}" if attempt > 1 else ""
            engine = f"{one_line(event.engine, 40)} ({one_line(event.reason, 20)})"
            return f"turn {turn} sent to engine {engine}{again}"
        case RunStarted():
            missed = f", the rest computed again: {event.missed}" if event.missed else ""
            return (
                f"worker {event.worker}: {event.prompt_tokens:,} prompt tokens, "
                f"{event.cached_tokens:,} cached{missed}"
            )
        case RunDerail():
            return f"goes astray: {event.kind} ({event.severity}): {one_line(event.excerpt, 60)}"
        case TurnOver():
            return f"turn {event.turn} ended: {one_line(event.reason, 40)}"
        case ToolCallMade():
            return f"calls {one_line(event.name, 60)}({one_line(event.arguments, 120)})"
        case RunPaused() | RunResumed() | RunSteered() | CallDropped() | RunInputRequired():
            return _step(event)
        case Gap():
            return "some events were lost"
    return _end(event) if isinstance(event, ENDINGS) else None


def progress_of(event: RunProgress) -> str:
    """How far it is."""
    share = f" {event.processed:,}/{event.total:,}" if event.total else ""
    place = f", number {event.queue_pos:,} in line" if event.queue_pos is not None else ""
    soon = f", an answer in some {event.eta_ms / 1000:,.0f} s" if event.eta_ms is not None else ""
    return f"{event.phase}{share}{place}{soon}"


def tokens(usage: RunUsage | UsageBody) -> str:
    """In words."""
    return (
        f"{usage.prompt_tokens:,} prompt tokens ({usage.cached_tokens:,} cached), "
        f"{usage.completion_tokens:,} output tokens"
    )


def table(lines: Sequence[RunLine], now: float) -> Iterator[str]:
    """A row for each run."""
    rows = [("run", "status", "session", "agent", "class", "prompt", "output", "age", "label")]
    rows += [
        (
            line.id,
            line.status,
            one_line(line.session, 20),
            one_line("(its own)" if line.agent == line.id else line.agent, 20),
            line.flow_class,
            f"{line.usage.prompt_tokens:,}",
            f"{line.usage.completion_tokens:,}",
            age(now - line.created),
            one_line(line.label, 30),
        )
        for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def age(seconds: float) -> str:
    """Two digits or so."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def tree_lines(tree: TreeBody) -> Iterator[str]:
    """A session's agents, each below the one that called it."""
    yield (
        f"session {one_line(tree.session, 60)}: {tree.num_runs} runs, {tree.num_live} live; "
        f"{tokens(tree.usage)}"
    )
    stack: list[tuple[TreeAgent, int]] = [(agent, 0) for agent in reversed(tree.agents)]
    while stack:
        agent, depth = stack.pop()
        indent = "  " * depth
        yield f"{indent}{one_line(agent.agent, 60)}: {agent.status}; {tokens(agent.usage)}"
        for run in agent.runs:
            yield f"{indent}  · {run.id}  {run.status}  {one_line(run.label, 60)}".rstrip()
        stack += [(child, depth + 1) for child in reversed(agent.children)]


def run_lines(run: RunBody) -> Iterator[str]:
    """All of a run that a person asks for first."""
    yield f"{run.id}: {run.status}"
    names = (("session", run.session), ("agent", run.agent), ("parent", run.parent), ("label", run.label))
    yield from (f"{name:8} {one_line(value)}" for name, value in names if value)
    if run.parent_run:
        yield f"{'below':8} {run.parent_run}" + (f", forked at token {run.fork.tokens:,}" if run.fork else "")
    yield f"{'model':8} {one_line(run.model)}"
    yield f"{'turn':8} {run.turn}"
    yield f"{'usage':8} {tokens(run.usage)}"
    if run.error is not None:
        yield f"{'error':8} {run.error.code}: {one_line(run.error.message)}"
    if run.derail is not None:
        yield f"{'derail':8} {run.derail.kind} ({run.derail.severity}): {one_line(run.derail.excerpt, 60)}"
    if run.input_required is not None:
        yield f"{'waits':8} {_asked(run.input_required.calls)}"
    if run.result is not None:
        yield f"\n{plain(run.result.text)}"


def _step(event: RunPaused | RunResumed | RunSteered | CallDropped | RunInputRequired) -> str:
    match event:
        case RunPaused():
            return f"paused in turn {event.turn}; {tokens(event.usage)}"
        case RunResumed():
            return f"goes on with turn {event.turn}"
        case RunSteered():
            return f"turn {event.turn} begins ({event.cause})"
        case CallDropped():
            return f"an open call of {one_line(event.name, 60)} was dropped"
        case RunInputRequired():
            return f"waits for {_asked(event.calls)}"


def _end(event: PublicEvent) -> str:
    assert isinstance(event, ENDINGS)
    status = type(event).__struct_config__.tag
    assert isinstance(status, str)
    why = f" ({event.error}: {one_line(event.message or '')})" if event.error else ""
    turns = f" in {event.turns} turns" if event.turns > 1 else ""
    return f"{status.removeprefix('run.')}{why}; {tokens(event.usage)}{turns}"


def _asked(calls: Sequence[AskedCall]) -> str:
    if not calls:
        return "text"
    named = (f"{one_line(call.name, 60)}({one_line(call.arguments, 120)}) [{call.id}]" for call in calls)
    return "the results of " + ", ".join(named)
