"""A run's state as a pure fold over its events, and the ends that a gateway may write from it.

Knows the bus's words; knows neither the bus nor time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from workers.messages import (
    VERSION,
    Accepted,
    Cancelled,
    Derailed,
    Dispatched,
    Event,
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
    decode_event,
    event_id,
)

from .event_ids import id_pair


class Phase(Enum):
    """Where a run is. The order is the order of life, but a lost engine leads back to DISPATCHED."""

    WAITING = "waiting"  # accepted, in a gateway's line
    DISPATCHED = "dispatched"  # sent to an engine, in its line
    PREFILLING = "prefilling"  # on a worker
    GENERATING = "generating"  # has a token
    TURN_ENDED = "turn_ended"  # its terminal event is written, the run's end is not
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RunState:
    """The fold's value. `attempt` is 0 before the first dispatch; `last_id` is "0-0" before any event."""

    phase: Phase = Phase.WAITING
    accepted: Accepted | None = None
    engine_id: str | None = None  # where the current attempt was sent
    incarnation: int | None = None
    attempt: int = 0
    num_tokens: int = 0  # of the whole run: a second attempt is only made while this is 0
    turn_end: TurnEnd | None = None
    ended: RunEnded | None = None
    last_id: str = "0-0"

    @property
    def is_on_engine(self) -> bool:
        """An engine owes this run a terminal event."""
        return self.phase in (Phase.DISPATCHED, Phase.PREFILLING, Phase.GENERATING)

    @property
    def next_id(self) -> str:
        """For the next Dispatched or verdict; fences all that the present attempt may still say."""
        return event_id(self.attempt + 1, 1)


def advance(state: RunState, entry_id: str, event: Event) -> RunState:
    """The state after one more event. The store refused those of a fenced attempt."""
    state = replace(state, last_id=entry_id)
    match event:
        case Accepted():
            return replace(state, accepted=event, engine_id=event.engine_id)
        case Dispatched(engine_id=engine_id, incarnation=incarnation):
            return replace(
                state,
                phase=Phase.DISPATCHED,
                engine_id=engine_id,
                incarnation=incarnation,
                attempt=id_pair(entry_id)[0],
            )
        case Started():
            return replace(state, phase=Phase.PREFILLING)
        case Tokens(token_ids=token_ids):
            return replace(state, phase=Phase.GENERATING, num_tokens=state.num_tokens + len(token_ids) // 4)
        case Finished() | Paused() | Cancelled() | Failed():
            return replace(state, phase=Phase.TURN_ENDED, turn_end=event, attempt=id_pair(entry_id)[0])
        case RunEnded():
            return replace(state, phase=Phase.ENDED, ended=event)
        case Progress() | Derailed():
            return state


def fold(entries: Iterable[tuple[str, bytes]], state: RunState = RunState()) -> RunState:
    """`advance` over encoded (id, message) pairs; what a newer version wrote is skipped."""
    for entry_id, message in entries:
        event = decode(message)
        if event is not None:
            state = advance(state, entry_id, event)
    return state


def decode(message: bytes) -> Event | None:
    """An event; None when it is of a newer version than ours, or none of ours at all."""
    try:
        event = decode_event(message)
    except msgspec.MsgspecError:
        return None
    return event if event.v <= VERSION else None


def end_of(turn_end: TurnEnd) -> RunEnded:
    """The run's end that follows from its last turn's end."""
    match turn_end:
        case Finished():
            return RunEnded(state="completed")
        case Cancelled() | Paused():
            return RunEnded(state="cancelled")
        case Failed():
            return RunEnded(state="failed")


def cancelled(state: RunState) -> Cancelled:
    """The verdict for a turn that no engine will end after a cancel."""
    return Cancelled(usage=_usage(state), timings=Timings())


def failed(state: RunState, error: str, message: str, *, retryable: bool = True) -> Failed:
    """The verdict for a turn that no engine will end. Most that a gateway sees fail may be sent again."""
    return Failed(error=error, message=message, retryable=retryable, usage=_usage(state))


def _usage(state: RunState) -> Usage:
    prompt_tokens = state.accepted.prompt_tokens if state.accepted is not None else 0
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=state.num_tokens)
