"""Runs that go astray: who looks after them, and what becomes of what they find. Judges nothing itself.

A finding comes into the run's stream by way of the engine while that has the turn. What has not come by the
turn's end is written here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gateway.bus import Bus, BusLost, StreamGone
from gateway.store.keys import WEEK_SECONDS
from gateway.tasks import Border
from workers.messages import Derail, Derailed, Note, encode, inbox_key

from .commands import CancelRun, Command
from .events import run_commands_key
from .run import Run, RunEvent
from .state import Phase, RunState

if TYPE_CHECKING:
    from .driver import Driver

Wanted = Sequence[Command | Derail]
"""What a detector has found, and what it wants done."""

Watcher = Callable[[Run, RunEvent], Wanted]
"""Hears each event of a run of ours."""

Examiner = Callable[[Run], Awaitable[Wanted]]
"""Looks at each turn of a run of ours that has ended, before anything follows from its end."""


class Astray:
    """The detectors, and their findings' way into runs."""

    def __init__(self, bus: Bus, driver: Driver) -> None:
        self.watchers: list[Watcher] = []
        self.examiners: list[Examiner] = []
        self._bus = bus
        self._driver = driver
        self._border = Border("watchers")

    def hear(self, run: Run, entry: RunEvent) -> None:
        """One more event of a run of ours."""
        if isinstance(entry.event, Derailed) and entry.event.what == run.derail:
            run.derail = None
        for watcher in self.watchers:
            with self._border:
                self.heed(run, watcher(run, entry))

    async def examine(self, run: Run) -> None:
        """An ended turn, once, then writes findings. For who holds the run's lock. Raises BusLost."""
        if run.state.phase is not Phase.TURN_ENDED:
            return
        if run.examined_turn != run.state.turn:
            run.examined_turn = run.state.turn
            for examiner in self.examiners:
                with self._border:
                    self.heed(run, await examiner(run))
        await self._write(run)

    def heed(self, run: Run, wanted: Iterable[Command | Derail]) -> None:
        """Takes findings in and sets what they want going."""
        for one in wanted:
            if isinstance(one, Derail):
                run.derail = _worse(run.derail, one)
                if run.state.is_on_engine:
                    self._driver.spawn(run, self._tell_engine(run, one))
                continue
            if isinstance(one, CancelRun) and one.derail is not None:
                run.stopped_by = one  # at once; what is recorded is for a gateway that takes over
            self._driver.spawn(run, self._record(run, one))

    async def _record(self, run: Run, command: Command) -> None:
        with contextlib.suppress(BusLost, StreamGone):
            key = run_commands_key(run.run_id)
            await self._bus.send(key, encode(command))
            await self._bus.answered(self._bus.commands.expire(key, WEEK_SECONDS))  # it may have ended by now
            await self._driver.look(run)

    async def _tell_engine(self, run: Run, found: Derail) -> None:
        """The stream is the engine's while it has the turn."""
        note = Note(run_id=run.run_id, attempt=run.state.attempt, what=found)
        with contextlib.suppress(BusLost):  # then it is written at the turn's end
            await self._bus.send(inbox_key(run.state.engine_id or ""), encode(note))

    async def _write(self, run: Run) -> None:
        found = run.untold_derail
        if found is None:
            return

        def make(state: RunState) -> Derailed | None:
            return Derailed(what=found) if state.phase is Phase.TURN_ENDED else None

        if await self._driver.write(run, make):
            run.kept_attempt = run.state.attempt


def _worse(one: Derail | None, other: Derail) -> Derail:
    return one if one is not None and one.severity == "critical" else other
