"""A run's state as a pure fold over its events: what a gateway knows about a run is what its stream says.

Knows the bus's words; knows neither the bus nor time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from workers.messages import (
    Accepted,
    Cancelled,
    Dispatched,
    Event,
    Failed,
    Finished,
    Progress,
    RunEnded,
    Started,
    Tokens,
    TurnEnd,
    event_id,
)


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
        """Where this gateway's next Dispatched or verdict goes; fences all that the present attempt may still say."""
        return event_id(self.attempt + 1, 1)


def advance(state: RunState, entry_id: str, event: Event) -> RunState:
    """The state after one more event. Events of a fenced attempt never arrive: the store refuses their ids."""
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
                attempt=_attempt(entry_id),
            )
        case Started():
            return replace(state, phase=Phase.PREFILLING)
        case Tokens(token_ids=token_ids):
            return replace(
                state, phase=Phase.GENERATING, num_tokens=state.num_tokens + len(token_ids) // 4
            )
        case Finished() | Cancelled() | Failed():
            return replace(state, phase=Phase.TURN_ENDED, turn_end=event, attempt=_attempt(entry_id))
        case RunEnded():
            return replace(state, phase=Phase.ENDED, ended=event)
        case Progress():
            return state


def fold(entries: Iterable[tuple[str, Event]], state: RunState = RunState()) -> RunState:  # noqa: B008 (frozen)
    """`advance` over (id, event) pairs."""
    for entry_id, event in entries:
        state = advance(state, entry_id, event)
    return state


def end_of(turn_end: TurnEnd) -> RunEnded:
    """The run's end that follows from its last turn's end."""
    match turn_end:
        case Finished():
            return RunEnded(state="completed")
        case Cancelled():
            return RunEnded(state="cancelled")
        case Failed():
            return RunEnded(state="failed")


def _attempt(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])
