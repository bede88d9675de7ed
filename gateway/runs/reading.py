"""One run's events for one reader: in order, without a hole, to the end; or up to a hole, which is told.

And what they come to so far, for who does not follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from gateway.bus import Bus, BusLost, StreamGone
from workers.messages import RUN_END_ID, RunEnded, run_events_key

from .event_ids import StreamGap, follows
from .events import decode
from .run import RunEvent
from .state import Phase, RunState, failed, fold
from .transcript import Transcript

NOTHING = RunState()
"""Of a run without events."""

GONE = "The message bus lost the events of this run. Send the call again."


async def read_events(bus: Bus, run_id: str, after: str) -> AsyncGenerator[RunEvent, None]:
    """Events behind an id up to RunEnded; where the bus has lost some, up to Failed (`run_lost` or `gap`)."""
    follower = bus.follow(run_events_key(run_id), after)
    before = after
    try:
        while True:
            entry = await follower.next()
            event = decode(entry.message)
            if not follows(before, entry.id):
                raise StreamGap(before, entry.id)
            before = entry.id
            if event is not None:
                yield RunEvent(entry.id, event)
            if isinstance(event, RunEnded):
                return
    except StreamGone:
        yield RunEvent(before, failed(RunState(), "run_lost", GONE))
        yield RunEvent(RUN_END_ID, RunEnded(state="failed"))
    except StreamGap as gap:
        yield RunEvent(before, failed(RunState(), "gap", str(gap)))
        yield RunEvent(RUN_END_ID, RunEnded(state="failed"))
    finally:
        follower.close()


async def read_state(bus: Bus, run_id: str, state: RunState = NOTHING) -> RunState:
    """The fold over the events behind a state. Raises BusLost."""
    async for page in bus.pages(run_events_key(run_id), state.last_id):
        state = fold(page, state)
    return state


async def read_newest(bus: Bus, run_id: str, state: RunState) -> RunState:
    """A followed run's state with what has come since: a reader of its events may be ahead of us."""
    if state.phase is not Phase.ENDED:
        with contextlib.suppress(BusLost):
            return await read_state(bus, run_id, state)
    return state


async def read_whole(bus: Bus, run_id: str) -> tuple[RunState, Transcript]:
    """The fold over all of a run's events, and what it has said. Raises BusLost."""
    state, told = NOTHING, Transcript()
    async for page in bus.pages(run_events_key(run_id), "0-0"):
        state = fold(page, state)
        told.advance_over(page)
    return state, told
