"""Tells the session's log and the list of runs what happens to runs of ours: in order, once, a moment later.

Owns when that is written. Knows no step.
"""

from __future__ import annotations

import asyncio
import contextlib

from gateway.bus import Bus, BusLost
from gateway.tasks import Tasks

from .event_ids import id_pair
from .events import decode
from .keeping import Keeper, is_lifecycle
from .reading import read_whole
from .run import Run, RunEvent
from .state import RunState

FLUSH_SECONDS = 0.05
"""How long they may lag behind."""


class Telling:
    """Notes events at once and writes them soon."""

    def __init__(self, bus: Bus, keeper: Keeper, tasks: Tasks) -> None:
        self._bus = bus
        self._keeper = keeper
        self._tasks = tasks

    def tell(self, run: Run, entry: RunEvent) -> None:
        """An event of a run of ours; `run.state` is the fold with it."""
        if not is_lifecycle(entry.event):
            return
        self._keeper.tell(run, entry)
        if not run.is_flushing:
            run.is_flushing = True
            self._tasks.spawn(self._flush(run), run.in_logs())

    async def tell_ended(self, run_id: str) -> None:
        """What a gateway may not have told that died just behind a run's end. Raises BusLost."""
        state, transcript = await read_whole(self._bus, run_id)
        await self.retell(Run(run_id, state, order=None, transcript=transcript))

    async def retell(self, run: Run) -> None:
        """All that a gateway that is gone may not have told. Raises BusLost."""
        if run.state.accepted is not None:
            await self._keeper.accepted(run)
        told = Run(run.run_id, RunState(), order=None)
        async for page in self._bus.pages(run.key, "0-0"):
            for entry in page:
                event = decode(entry.message)
                if event is not None and id_pair(entry.id) <= id_pair(run.state.last_id):
                    told.advance(entry.id, event)
                    if is_lifecycle(event):
                        self._keeper.tell(told, RunEvent(entry.id, event))
        run.untold[:0] = told.untold
        await self._keeper.flush(run)

    async def finish(self, run: Run) -> None:
        """The rest, before the run is forgotten. Raises BusLost."""
        await self._keeper.flush(run)

    async def _flush(self, run: Run) -> None:
        await asyncio.sleep(FLUSH_SECONDS)  # several come close together
        run.is_flushing = False
        with contextlib.suppress(BusLost):  # the next event, or the end, flushes again
            await self._keeper.flush(run)
