"""A run as the native API shows it: from its fold while it lives, from its kept result afterwards. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.derail.body import derail_body
from gateway.runs.outcomes import FINAL
from gateway.runs.spec import Budget, RunSpec
from gateway.runs.state import RunState, advance
from gateway.runs.told import AskedCall
from gateway.store.index import RunNote
from gateway.store.results import RunResult
from workers.messages import Timings, Usage, decode_event

from .bodies import (
    CheckpointBody,
    ForkedFrom,
    InputBody,
    Links,
    ResultBody,
    RunBody,
    RunErrorBody,
    RunLine,
    RunTimings,
    RunUsage,
)
from .structs import BudgetBody


def show(run_id: str, state: RunState, result: RunResult | None) -> RunBody:
    """The run. One that has ended is shown from its result alone, so that it looks the same when its events
    are gone.
    """
    if result is not None and result.accepted:
        state = advance(RunState(), "0-1", decode_event(result.accepted))
    accepted, spec = state.accepted, state.spec
    assert accepted is not None
    derail = state.derail if result is None else result.derail
    return RunBody(
        id=run_id,
        kind=spec.kind,
        status=state.status if result is None else result.state,  # type: ignore[arg-type]
        session=spec.session,
        agent=spec.agent,
        parent=spec.parent,
        parent_run=spec.parent_run or None,
        fork=_fork(spec),
        flow_class=spec.flow_class,
        priority=spec.priority,
        label=spec.label,
        metadata=spec.metadata,
        model=accepted.model,
        created=accepted.created,
        started=result.started if result is not None else None,
        ended=result.ended if result is not None else None,
        deadline=spec.deadline,
        turn=state.turn if result is None else result.turns,
        checkpoints=_checkpoints(state.checkpoints if result is None else result.checkpoints),
        usage=usage_of(state.usage) if result is None else usage_of(result.usage, result.thinking_tokens),
        timings=_timings(state.timings if result is None else result.timings),
        budget=_budget(spec.budget),
        tree_budget=_budget(spec.tree_budget),
        result=None if result is None else _result(result),
        error=_error(state, result),
        derail=derail_body(derail) if derail is not None else None,
        input_required=_input(state) if result is None else None,
        links=links(run_id, spec.session),
    )


def show_line(note: RunNote) -> RunLine:
    """The run in a list."""
    return RunLine(
        id=note.run_id,
        kind=note.kind,
        status=note.status,
        session=note.session,
        agent=note.agent,
        parent=note.parent,
        parent_run=note.parent_run or None,
        flow_class=note.priority_class,
        label=note.label,
        model=note.model,
        created=note.created,
        usage=usage_of(note.usage),
    )


def links(run_id: str, session: str) -> Links:
    """Where more is to be had of it."""
    path = f"/v1/runs/{run_id}"
    tree = f"/v1/sessions/{quote(session, safe='')}/tree" if session else None
    return Links(self_=path, events=f"{path}/events", tree=tree)


def usage_of(usage: Usage, reasoning_tokens: int | None = None) -> RunUsage:
    """As callers get it."""
    return RunUsage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=reasoning_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def is_settled(state: RunState, *, input_counts: bool) -> bool:
    """Whether the run has ended, or (`input_counts`) waits for its caller."""
    return state.status in FINAL or (input_counts and state.status == "input_required")


def _fork(spec: RunSpec) -> ForkedFrom | None:
    fork = spec.fork
    if fork is None:
        return None
    return ForkedFrom(run=fork.run, tokens=fork.num_tokens, dropped_call=fork.dropped_call)


def _checkpoints(told: Mapping[Any, int]) -> tuple[CheckpointBody, ...]:
    in_order = sorted((token, str(name)) for name, token in told.items())
    return tuple(CheckpointBody(name=name, token=token) for token, name in in_order)


def _timings(timings: Timings) -> RunTimings:
    return RunTimings(
        queue_ms=_milliseconds(timings.queue_seconds),
        prefill_ms=_milliseconds(timings.prefill_seconds),
        decode_ms=_milliseconds(timings.decode_seconds),
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _budget(budget: Budget) -> BudgetBody:
    return BudgetBody(
        prompt_tokens=budget.prompt_tokens,
        output_tokens=budget.output_tokens,
        thinking_tokens=budget.thinking_tokens,
        wall_ms=budget.wall_ms,
        tool_calls=budget.tool_calls,
    )


def _result(result: RunResult) -> ResultBody:
    calls = tuple(AskedCall(id=call.id, name=call.name, arguments=call.arguments) for call in result.calls)
    return ResultBody(
        text=result.text,
        reasoning=result.reasoning,
        json=_json_value(result.json),
        problem=result.problem or None,
        tool_calls=calls,
        finish_reason=result.finish_reason,
        partial=result.is_partial,
        truncated=result.is_truncated,
        dropped=result.is_dropped,
    )


def _json_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _error(state: RunState, result: RunResult | None) -> RunErrorBody | None:
    if result is not None:
        error = result.error
        if error is None:
            return None
        return RunErrorBody(code=error.code, message=error.message, retryable=error.retryable)
    ended = state.ended
    if ended is None or not ended.error:
        return None
    return RunErrorBody(code=ended.error, message=ended.message, retryable=False)


def _input(state: RunState) -> InputBody | None:
    if state.status != "input_required":
        return None
    calls = tuple(AskedCall(id=call.id, name=call.name, arguments=call.arguments) for call in state.calls)
    return InputBody(calls=calls)
