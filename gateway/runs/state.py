"""A run's state as a pure fold over its events, and the ends that a gateway may write from it.

Knows the bus's words; knows neither the bus nor time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from workers.messages import (
    Accepted,
    Cancelled,
    Derail,
    Derailed,
    Dispatched,
    Failed,
    Finished,
    Paused,
    Progress,
    RunEnded,
    Started,
    Timings,
    Tokens,
    TurnEnd,
    Usage,
    event_id,
)

from .event_ids import id_pair
from .events import AnyEvent, CallAsked, Cause, InputRequired, Resumed, TurnOpened, decode
from .outcomes import Status
from .spec import Checkpoint, RunSpec, decode_spec


class Phase(Enum):
    """Where a run is. The order is the order of life, but a further attempt or turn leads back."""

    WAITING = "waiting"  # in a gateway's line, or on its way there
    DISPATCHED = "dispatched"  # sent to an engine, in its line
    PREFILLING = "prefilling"  # on a worker
    GENERATING = "generating"  # has a token
    PAUSED = "paused"  # its turn is to go on, but not now
    TURN_ENDED = "turn_ended"  # its terminal event is written; what follows from it is not
    INPUT_REQUIRED = "input_required"  # between two turns, for as long as its caller likes
    ENDED = "ended"


_STATUS: dict[Phase, Status] = {
    Phase.WAITING: "queued",
    Phase.DISPATCHED: "queued",
    Phase.PREFILLING: "prefilling",
    Phase.GENERATING: "decoding",
    Phase.PAUSED: "paused",
    Phase.TURN_ENDED: "decoding",
    Phase.INPUT_REQUIRED: "input_required",
}
_CALL, _NOTHING, _NO_TIME = RunSpec(), Usage(), Timings()
_ON_ENGINE = (Phase.DISPATCHED, Phase.PREFILLING, Phase.GENERATING)


@dataclass(frozen=True, slots=True)
class Obeyed:
    """What became of a command: the turn that it opened, or in which the run went on."""

    cause: Cause | None  # None: no turn was opened
    turn: int


@dataclass(frozen=True, slots=True)
class RunState:
    """The fold's value. `attempt` is 0 before the first dispatch; `last_id` is "0-0" before any event."""

    phase: Phase = Phase.WAITING
    accepted: Accepted | None = None
    spec: RunSpec = _CALL
    engine_id: str | None = None  # where the current or last attempt was sent
    incarnation: int | None = None
    attempt: int = 0  # counts what gateways wrote, too
    turn: int = 1
    prompt_tokens: int = 0  # of this turn
    turn_tokens: int = 0  # generated in this turn, over its attempts
    attempt_tokens: int = 0  # a lost attempt is only made again while this is 0
    num_tokens: int = 0  # generated in the whole run
    cached_tokens: int | None = None  # of the present attempt, once it has a worker
    turn_cached: int | None = None  # of the turn's prompt: what none of its attempts had to compute
    worker: int | None = None
    processed_tokens: int = 0  # of the prompt, in this attempt
    turn_end: TurnEnd | None = None
    calls: tuple[CallAsked, ...] = ()  # that the caller is to answer
    past: Usage = _NOTHING  # of the turns before this one
    past_timings: Timings = _NO_TIME  # of the attempts before this one that ended in an engine's word
    obeyed: Mapping[str, Obeyed] = field(default_factory=dict)  # commands that events name
    derail: Derail | None = None  # the last that was told
    waiting_since: float = 0.0  # unix seconds: when it last came to wait for a worker
    checkpoints: Mapping[Checkpoint, int] = field(default_factory=dict)  # as tokens of the whole run
    ended: RunEnded | None = None
    last_id: str = "0-0"

    @property
    def is_on_engine(self) -> bool:
        """An engine owes this run a terminal event."""
        return self.phase in _ON_ENGINE

    @property
    def next_id(self) -> str:
        """For the gateway's next event; fences all that the present attempt may still say."""
        return event_id(self.attempt + 1, 1)

    @property
    def status(self) -> Status:
        """The public state."""
        return self.ended.state if self.ended is not None else _STATUS[self.phase]  # type: ignore[return-value]

    @property
    def turn_usage(self) -> Usage:
        """Of the present turn, so far as events tell."""
        if self.turn_end is not None:
            return self.turn_end.usage
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.turn_cached or 0,
            completion_tokens=self.turn_tokens,
        )

    @property
    def accepted_at(self) -> float | None:
        """Unix seconds; None before that."""
        return None if self.accepted is None else self.accepted.at or float(self.accepted.created)

    @property
    def usage(self) -> Usage:
        """Of the whole run: the sum over its turns."""
        return add_usage(self.past, self.turn_usage)

    @property
    def timings(self) -> Timings:
        """Summed over turns and attempts; the worker is the last one."""
        end = self.turn_end
        return self.past_timings if end is None else add_timings(self.past_timings, end.timings)


def advance(state: RunState, entry_id: str, event: AnyEvent) -> RunState:
    """The state after one more event. The store refused those of a fenced attempt."""
    if isinstance(event, Tokens):  # most are: one copy instead of two
        return _generated(state, entry_id, len(event.token_ids) // 4)
    state = replace(state, last_id=entry_id)
    match event:
        case Accepted():
            return _accepted(state, event)
        case Dispatched():
            return _dispatched(state, id_pair(entry_id)[0], event)
        case Finished() | Cancelled() | Failed() | Paused():
            return _turn_ended(state, id_pair(entry_id)[0], event)
        case Resumed() | TurnOpened() | InputRequired():
            return _by_gateway(replace(state, attempt=id_pair(entry_id)[0]), event)
        case RunEnded():
            return replace(state, phase=Phase.ENDED, ended=event)
        case Derailed(what=what):  # by the engine, or by a gateway behind the turn's end
            return replace(state, attempt=id_pair(entry_id)[0], derail=what)
    return _by_engine(state, event)


def fold(entries: Iterable[tuple[str, bytes]], state: RunState = RunState()) -> RunState:
    """`advance` over encoded (id, message) pairs; what a newer version wrote is skipped."""
    for entry_id, message in entries:
        event = decode(message)
        if event is not None:
            state = advance(state, entry_id, event)
    return state


def _accepted(state: RunState, event: Accepted) -> RunState:
    return replace(
        state,
        accepted=event,
        spec=_spec_of(event),
        engine_id=event.engine_id,
        prompt_tokens=event.prompt_tokens,
        checkpoints=_reached({"system": event.system_tokens, "prompt": event.turn_tokens}),
        waiting_since=event.at or float(event.created),
    )


def _spec_of(event: Accepted) -> RunSpec:
    """A call's own, where none was given or where a newer gateway wrote it."""
    try:
        return decode_spec(event.spec) if event.spec else RunSpec()
    except msgspec.MsgspecError:
        return RunSpec()


def _dispatched(state: RunState, attempt: int, event: Dispatched) -> RunState:
    return replace(
        _reopened(state),
        phase=Phase.DISPATCHED,
        engine_id=event.engine_id,
        incarnation=event.incarnation,
        attempt=attempt,
    )


def _reopened(state: RunState) -> RunState:
    """The turn before its next attempt."""
    return replace(
        state,
        past_timings=state.timings,
        turn_end=None,
        attempt_tokens=0,
        cached_tokens=None,
        processed_tokens=0,
        worker=None,
    )


def _by_engine(state: RunState, event: Started | Progress) -> RunState:
    match event:
        case Started(cached_tokens=cached, worker=worker):
            fewest = min(cached, state.prompt_tokens if state.turn_cached is None else state.turn_cached)
            return replace(
                state,
                phase=Phase.PREFILLING,
                cached_tokens=cached,
                turn_cached=fewest,
                processed_tokens=cached,
                worker=worker,
            )
        case Progress(processed_tokens=processed):
            return replace(state, processed_tokens=processed)


def _generated(state: RunState, entry_id: str, num_tokens: int) -> RunState:
    return replace(
        state,
        last_id=entry_id,
        phase=Phase.GENERATING,
        turn_tokens=state.turn_tokens + num_tokens,
        attempt_tokens=state.attempt_tokens + num_tokens,
        num_tokens=state.num_tokens + num_tokens,
    )


def _turn_ended(state: RunState, attempt: int, end: TurnEnd) -> RunState:
    """A verdict may come behind an end: a paused turn that is cancelled. Its usage counts for both."""
    phase = Phase.PAUSED if isinstance(end, Paused) else Phase.TURN_ENDED
    name: Checkpoint = "pause" if isinstance(end, Paused) else "turn"
    position = state.prompt_tokens + state.turn_tokens if state.turn_tokens else 0
    return replace(
        state,
        phase=phase,
        attempt=attempt,
        past_timings=state.timings,
        turn_end=end,
        checkpoints={**state.checkpoints, **_reached({name: position})},
    )


def _by_gateway(state: RunState, event: TurnOpened | InputRequired | Resumed) -> RunState:
    match event:
        case InputRequired(calls=calls):
            return replace(state, phase=Phase.INPUT_REQUIRED, calls=calls)
        case Resumed(commands=commands, at=at):
            obeyed = {**state.obeyed, **dict.fromkeys(commands, Obeyed(None, state.turn))}
            return replace(_reopened(state), phase=Phase.WAITING, obeyed=obeyed, waiting_since=at)
        case TurnOpened(commands=commands, at=at, cause=cause):
            return replace(
                _reopened(state),
                phase=Phase.WAITING,
                turn=event.turn,
                prompt_tokens=event.prompt_tokens,
                turn_tokens=0,
                turn_cached=None,
                past=state.usage,
                calls=(),
                checkpoints=_behind(state, event),
                obeyed={**state.obeyed, **dict.fromkeys(commands, Obeyed(cause, event.turn))},
                waiting_since=at,
            )


def _behind(state: RunState, event: TurnOpened) -> Mapping[Checkpoint, int]:
    """What is still there when the next turn opens: what the last one had dropped is not."""
    end = state.prompt_tokens + event.kept_tokens if event.kept_tokens else 0
    now: dict[Checkpoint, int] = {**state.checkpoints, "turn": end, "prompt": event.turn_tokens}
    if now.get("pause", 0) > end:
        del now["pause"]
    return _reached(now)


def _reached(checkpoints: Mapping[Checkpoint, int]) -> dict[Checkpoint, int]:
    return {name: position for name, position in checkpoints.items() if position}


def add_usage(one: Usage, other: Usage) -> Usage:
    """The sum of two usages."""
    return Usage(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
    )


def add_timings(one: Timings, other: Timings) -> Timings:
    """The sum of two timings; the later worker."""
    return Timings(
        worker=one.worker if other.worker is None else other.worker,
        queue_seconds=one.queue_seconds + other.queue_seconds,
        prefill_seconds=one.prefill_seconds + other.prefill_seconds,
        decode_seconds=one.decode_seconds + other.decode_seconds,
    )


def end_of(turn_end: TurnEnd) -> RunEnded:
    """The run's end that follows from its last turn's end, if nothing else goes on from there."""
    match turn_end:
        case Finished(reason=reason):
            return RunEnded(state="derailed" if reason == "derailed" else "completed")
        case Cancelled() | Paused():
            return RunEnded(state="cancelled")
        case Failed():
            return RunEnded(state="failed")


def cancelled(state: RunState) -> Cancelled:
    """The verdict for a turn that no engine will end after a cancel."""
    return Cancelled(usage=state.turn_usage, timings=Timings())


def paused(state: RunState) -> Paused:
    """The verdict for a turn that is paused while no engine has it."""
    return Paused(usage=state.turn_usage, timings=Timings())


def failed(state: RunState, error: str, message: str, *, retryable: bool = True) -> Failed:
    """The verdict for a turn that no engine will end. Most that a gateway sees fail may be sent again."""
    return Failed(error=error, message=message, retryable=retryable, usage=state.turn_usage)
