"""A run's events in the words of the native API and of session logs: each bus event makes none, one or more.

Pure. Text and calls are not here: they need the whole turn's reading (gateway/native/telling.py).
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from gateway.derail.body import derail_body
from gateway.flow.outlook import NO_OUTLOOK, Outlook
from workers.messages import (
    Accepted,
    Cancelled,
    Derailed,
    Dispatched,
    Failed,
    Finished,
    Missed,
    Paused,
    Progress,
    RunEnded,
    Started,
    Tokens,
    Usage,
)

from .events import AnyEvent, Cause, InputRequired, Resumed, TurnOpened
from .outcomes import Status
from .state import RunState


class Told(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events. `run` is the run's id, since one stream may tell of many."""

    run: str


class UsageBody(Struct, frozen=True, kw_only=True):
    """Token counts; `cached_tokens` is the part of the prompt that was not computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


def usage_body(usage: Usage) -> UsageBody:
    """As callers get it."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


class AskedCall(Struct, frozen=True, kw_only=True):
    """A tool call that the run waits for."""

    id: str
    name: str
    arguments: str  # JSON text


class RunAccepted(Told, frozen=True, kw_only=True, tag="run.accepted"):
    """It has an id and waits in line. Names are "" where there is none."""

    run_kind: str = msgspec.field(name="kind")  # run, or call: a chat, responses or messages request
    session: str
    agent: str
    parent: str
    parent_run: str
    model: str
    prompt_tokens: int
    created: int  # unix seconds


class RunRouted(Told, frozen=True, kw_only=True, tag="run.routed"):
    """A turn was sent to an engine, which gives it a worker (run.started). A further attempt of the same turn
    begins after a pause or a loss. `reason`: held, it has what the turn goes on from; kin, the agent's, its
    parent's or its session's last turn went there; cost, it takes the fewest seconds to the first token;
    cold, none is believed to hold much of the prompt; resent, the engine before was lost.
    """

    engine: str
    turn: int
    attempt: int
    cached_tokens: int = 0  # of its prompt, that the gateway believes to be there
    reason: str = ""


class RunStarted(Told, frozen=True, kw_only=True, tag="run.started"):
    """The turn has a worker. `missed`: why over a thousand tokens are computed again."""

    turn: int
    worker: int
    prompt_tokens: int
    cached_tokens: int
    missed: str | None


class RunProgress(Told, frozen=True, kw_only=True, tag="run.progress"):
    """How far it is; sent when there is news of the prompt or of its place in line, and after each silence.
    Estimates of the moment, by its own gateway: a replay tells them of the run's newest event at most.
    """

    phase: Status
    processed: int  # prompt tokens, cached ones included
    total: int
    eta_ms: int | None = None  # until the answer begins
    queue_pos: int | None = None  # in its gateway's line; 1 goes next


class RunDerail(Told, frozen=True, kw_only=True, tag="run.derail"):
    """The turn goes astray, as a run's and an answer's `derail` says it."""

    kind: str
    severity: str
    first_token: int
    excerpt: str
    action: str


class TurnOver(Told, frozen=True, kw_only=True, tag="turn.ended"):
    """One turn is over; the run may go on. Usage is the turn's."""

    turn: int
    reason: str  # stop, length, derailed, cancelled, or an error's kind
    usage: UsageBody


class RunPaused(Told, frozen=True, kw_only=True, tag="run.paused"):
    """It stands still until it is resumed."""

    turn: int
    usage: UsageBody


class RunResumed(Told, frozen=True, kw_only=True, tag="run.resumed"):
    """It waits for a worker again."""

    turn: int


class CallDropped(Told, frozen=True, kw_only=True, tag="tool_call.dropped"):
    """A tool call that was not yet whole when the run was steered is not part of it any more. At a fork's
    beginning: the call of its parent that is not part of the child.
    """

    turn: int
    name: str


class RunSteered(Told, frozen=True, kw_only=True, tag="run.steered"):
    """Another turn begins. `cause`: steer (at once), next_turn, queue, or respond."""

    turn: int
    cause: Cause


class RunInputRequired(Told, frozen=True, kw_only=True, tag="run.input_required"):
    """It waits for the results of these calls, or for text where there are none."""

    turn: int
    calls: tuple[AskedCall, ...]


class _End(Told, frozen=True, kw_only=True):
    """The run is over. Usage is that of all its turns."""

    usage: UsageBody
    turns: int
    error: str | None  # an error's kind
    message: str | None


class RunCompleted(_End, frozen=True, kw_only=True, tag="run.completed"):
    """It came to its end by itself."""


class RunFailed(_End, frozen=True, kw_only=True, tag="run.failed"):
    """An error or a budget ended it; what it had said is kept."""


class RunCancelled(_End, frozen=True, kw_only=True, tag="run.cancelled"):
    """Its caller ended it."""


class RunExpired(_End, frozen=True, kw_only=True, tag="run.expired"):
    """Its deadline or its time in line ended it."""


class RunRejected(_End, frozen=True, kw_only=True, tag="run.rejected"):
    """It was accepted, and then no engine could be given it: what it is made of is not kept any more, say."""


class RunDerailed(_End, frozen=True, kw_only=True, tag="run.derailed"):
    """It was stopped because it went astray."""


class Gap(Told, frozen=True, kw_only=True, tag="gap"):
    """Events between two ids were lost, or are kept no more."""

    after: str
    before: str


Lifecycle = (
    RunAccepted
    | RunRouted
    | RunStarted
    | RunProgress
    | RunDerail
    | TurnOver
    | RunPaused
    | RunResumed
    | CallDropped
    | RunSteered
    | RunInputRequired
    | RunCompleted
    | RunFailed
    | RunCancelled
    | RunExpired
    | RunRejected
    | RunDerailed
    | Gap
)

ENDS: dict[str, type[_End]] = {
    "completed": RunCompleted,
    "failed": RunFailed,
    "cancelled": RunCancelled,
    "expired": RunExpired,
    "rejected": RunRejected,
    "derailed": RunDerailed,
}


def tell(run_id: str, event: AnyEvent, state: RunState) -> list[Lifecycle]:
    """What an event tells. `state` is the fold with it."""
    match event:
        case Accepted():
            return _accepted(run_id, event, state)
        case Progress():
            return [progress(run_id, state)]
        case Derailed(what=what):
            return [RunDerail(run=run_id, **msgspec.structs.asdict(derail_body(what)))]
        case Dispatched() | Started() | Resumed() | TurnOpened() | InputRequired():
            return _tell_steps(run_id, event, state)
        case Paused() | Finished() | Cancelled() | Failed():
            return [_turn_over(run_id, event, state)]
        case RunEnded(state=end):
            return [told_end(run_id, end, state)]
        case Tokens():
            return []


def log_body(run_id: str, event: AnyEvent, state: RunState) -> bytes:
    """The same as a session's log keeps it: a JSON list; empty for what such a log leaves out."""
    if isinstance(event, Progress | Tokens):
        return b""
    return msgspec.json.encode(tell(run_id, event, state))


def progress(run_id: str, state: RunState, outlook: Outlook = NO_OUTLOOK) -> RunProgress:
    """How far the run is."""
    return RunProgress(
        run=run_id,
        phase=state.status,
        processed=state.processed_tokens,
        total=state.prompt_tokens,
        eta_ms=None if outlook.seconds is None else round(1000 * outlook.seconds),
        queue_pos=outlook.queue_pos,
    )


def told_end(run_id: str, status: str, state: RunState) -> Lifecycle:
    """The end under that status."""
    ended = state.ended
    end = ENDS.get(status, RunFailed)(
        run=run_id,
        usage=usage_body(state.usage),
        turns=state.turn,
        error=(ended.error or None) if ended is not None else None,
        message=(ended.message or None) if ended is not None else None,
    )
    assert isinstance(end, Lifecycle)
    return end


def _accepted(run_id: str, event: Accepted, state: RunState) -> list[Lifecycle]:
    spec = state.spec
    accepted = RunAccepted(
        run=run_id,
        run_kind=spec.kind,
        session=spec.session,
        agent=spec.agent,
        parent=spec.parent,
        parent_run=spec.parent_run,
        model=event.model,
        prompt_tokens=event.prompt_tokens,
        created=event.created,
    )
    if spec.fork is None or spec.fork.dropped_call is None:
        return [accepted]
    return [accepted, CallDropped(run=run_id, turn=state.turn, name=spec.fork.dropped_call)]


def _tell_steps(
    run_id: str, event: Dispatched | Started | Resumed | TurnOpened | InputRequired, state: RunState
) -> list[Lifecycle]:
    match event:
        case Dispatched():
            return [_routed(run_id, event, state)]
        case Started():
            return [_started(run_id, event, state)]
        case Resumed():
            return [RunResumed(run=run_id, turn=state.turn)]
        case TurnOpened(turn=turn, cause=cause, dropped_call=dropped):
            steered = RunSteered(run=run_id, turn=turn, cause=cause)
            if dropped is None:
                return [steered]
            return [CallDropped(run=run_id, turn=turn - 1, name=dropped), steered]
        case InputRequired(calls=calls):
            asked = tuple(AskedCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls)
            return [RunInputRequired(run=run_id, turn=state.turn, calls=asked)]


def _routed(run_id: str, event: Dispatched, state: RunState) -> RunRouted:
    return RunRouted(
        run=run_id,
        engine=event.engine_id,
        turn=state.turn,
        attempt=state.attempt,
        cached_tokens=event.cached_tokens,
        reason=event.reason,
    )


def _started(run_id: str, event: Started, state: RunState) -> RunStarted:
    missed: Missed | None = event.missed
    return RunStarted(
        run=run_id,
        turn=state.turn,
        worker=event.worker,
        prompt_tokens=state.prompt_tokens,
        cached_tokens=event.cached_tokens,
        missed=missed.cause if missed is not None else None,
    )


def _turn_over(
    run_id: str, event: Paused | Finished | Cancelled | Failed, state: RunState
) -> RunPaused | TurnOver:
    usage = usage_body(event.usage)
    match event:
        case Paused():
            return RunPaused(run=run_id, turn=state.turn, usage=usage)
        case Finished(reason=reason):
            return TurnOver(run=run_id, turn=state.turn, reason=reason, usage=usage)
        case Cancelled():
            return TurnOver(run=run_id, turn=state.turn, reason="cancelled", usage=usage)
        case Failed(error=error):
            return TurnOver(run=run_id, turn=state.turn, reason=error, usage=usage)
