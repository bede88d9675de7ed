"""What the MCP server's tools answer. Pure.

A model's words stand only where they are data: in a JSON string under `text`, `reason` or `arguments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from gateway.client import RunBody, RunLine, RunUsage, VerbBody, Waited
from gateway.runs.told import AskedCall

URI = "tetrarch://runs/"


class Spawned(Struct, frozen=True, kw_only=True):
    """A new sub-agent."""

    run: str
    status: str
    session: str
    agent: str
    resource: str


class Trouble(Struct, frozen=True, kw_only=True):
    """An error, or how it went astray."""

    kind: str
    reason: str


class Answered(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sub-agent that is done, or waits for input."""

    run: str
    status: str
    agent: str
    text: str
    truncated: bool = False  # the text: the rest is behind `resource`
    partial: bool = False
    json: Any = None
    input_required: Sequence[AskedCall] | None = None  # the calls whose results it waits for; []: text
    error: Trouble | None = None
    derail: Trouble | None = None
    usage: RunUsage
    resource: str


class WaitAnswer(Struct, frozen=True, kw_only=True):
    """Of `wait`."""

    done: list[Answered]
    pending: list[str]
    timed_out: bool


class Listed(Struct, frozen=True, kw_only=True):
    """A sub-agent in a list."""

    run: str
    status: str
    agent: str
    parent_run: str | None
    usage: RunUsage
    resource: str


class ListAnswer(Struct, frozen=True, kw_only=True):
    """Of `list`."""

    session: str
    runs: list[Listed]


class VerbAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of `send_input` and `cancel`."""

    run: str
    status: str
    applied: str | None = None
    turn: int | None = None
    num_runs: int | None = None


def uri_of(run_id: str) -> str:
    """The resource that holds all of a run."""
    return URI + run_id


def answered(run: RunBody, max_chars: int) -> Answered:
    """As `wait` tells it."""
    result = run.result
    text = result.text if result is not None else ""
    asked = run.input_required
    return Answered(
        run=run.id,
        status=run.status,
        agent=run.agent,
        text=text[:max_chars],
        truncated=len(text) > max_chars or (result is not None and result.truncated),
        partial=result is not None and result.partial,
        json=result.json if result is not None and len(text) <= max_chars else None,
        input_required=asked.calls if asked is not None else None,
        error=Trouble(kind=run.error.code, reason=run.error.message) if run.error is not None else None,
        derail=Trouble(kind=run.derail.kind, reason=run.derail.excerpt) if run.derail is not None else None,
        usage=run.usage,
        resource=uri_of(run.id),
    )


def wait_answer(waited: Waited, max_chars: int) -> WaitAnswer:
    """All that were waited for."""
    return WaitAnswer(
        done=[answered(run, max_chars) for run in waited.done],
        pending=waited.pending,
        timed_out=waited.timed_out,
    )


def listed(line: RunLine) -> Listed:
    """In a list."""
    return Listed(
        run=line.id,
        status=line.status,
        agent=line.agent,
        parent_run=line.parent_run,
        usage=line.usage,
        resource=uri_of(line.id),
    )


def verb_answer(told: VerbBody) -> VerbAnswer:
    """How a verb was taken."""
    return VerbAnswer(
        run=told.id, status=told.status, applied=told.applied, turn=told.turn, num_runs=told.num_runs
    )
