"""Does a run's missing next step: when its engine, its gateway or its client is gone, or a step was lost.

Looks at state, not at what happened, so it may come late or twice. Writes through Runs only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from gateway.bus import Bus, BusLost
from gateway.errors import RunNotFound
from gateway.flow.directory import Directory
from gateway.tasks import Border, Tasks, repeat
from metrics.logs import about_run
from workers.messages import RUNS_LIVE_KEY, gateway_lease_key, run_attendant_key, run_events_key

from .runs import Run, Runs
from .state import Phase, cancelled, failed, fold

SWEEP_SECONDS = 2.0
RESEND_SECONDS = 8.0
"""How long a turn without a token waits for an engine that can take it once more."""
MAX_RESENT = 1
"""A turn that was on a lost engine goes to another once: it may have been what killed the first."""
ORPHAN_SECONDS = 30.0
"""How long a run outlives its gateway for a client that resumes it."""
ATTEND_SECONDS = 3 * SWEEP_SECONDS
"""How long a gateway stands in for a dead one after it last said so."""
CANCEL_SECONDS = 30.0
"""An engine that lives but has not obeyed a Cancel for so long is no longer asked."""

ENGINE_LOST = "The engine stopped before this call ended; it is being restarted. Send the call again."
NO_ENGINE = "No engine became ready to take this call. Send it again."
GATEWAY_LOST = "The gateway that took this call stopped before it was sent to an engine. Send it again."

log = structlog.get_logger(__name__)


class Caretaker:
    """Watches the runs that this gateway follows, and the live ones that no gateway follows."""

    def __init__(
        self, bus: Bus, directory: Directory, runs: Runs, *, orphan_seconds: float = ORPHAN_SECONDS
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._runs = runs
        self._orphan_seconds = orphan_seconds
        self._seen: set[str] = set()  # foreign runs of the last sweep
        self._at_work: set[str] = set()
        self._tasks = Tasks()
        self._border = Border("caretaker")  # of one run: the others are looked after all the same
        directory.on_poll.append(self.look)

    async def start(self) -> None:
        """Takes over what stopped gateways left, then keeps watching."""
        await self.sweep()
        self._tasks.spawn(repeat(self._sweep, seconds=SWEEP_SECONDS, where="sweep"))

    async def stop(self) -> None:
        """Stops watching."""
        await self._tasks.end()

    def look(self) -> None:
        """Each local run's missing next step, at once; called after each look at the engines."""
        for run in self._runs.local():
            if run.run_id not in self._at_work and not run.lock.locked():
                work = None
                with run.in_logs(), self._border:
                    work = self._next_step(run, time.monotonic())
                if work is not None:
                    self._at_work.add(run.run_id)
                    self._tasks.spawn(self._do(run, work), run.in_logs())

    async def sweep(self) -> None:
        """Adopts live runs whose gateway is gone; forgets those without a stream, clears those that ended."""
        members: Any = await self._bus.answered(self._bus.commands.smembers(RUNS_LIVE_KEY))
        local = {run.run_id for run in self._runs.local()}
        foreign = {name.decode(errors="replace") for name in members} - local
        for run_id in sorted(foreign):
            if not self._bus.available:
                raise BusLost
            with about_run(run_id), self._border, contextlib.suppress(BusLost, RunNotFound):
                await self._adopt_abandoned(run_id)
        self._seen = foreign
        for run in self._runs.local():
            if run.order is None and run.num_followers:
                await self._attend(run)  # before another gateway calls it an orphan

    async def _adopt_abandoned(self, run_id: str) -> None:
        if not await self._is_abandoned(run_id):
            return
        if await self._runs.adopt(run_id) is None:
            await self._runs.clear(run_id)
        else:
            log.info("run_adopted")

    async def _is_abandoned(self, run_id: str) -> bool:
        entries = await self._bus.read(run_events_key(run_id), "0-0", 1)
        accepted = fold(entries).accepted
        if accepted is None:
            if run_id in self._seen:
                await self._bus.answered(self._bus.commands.srem(RUNS_LIVE_KEY, run_id))
            return False
        if accepted.gateway == self._bus.gateway_id:
            return run_id in self._seen  # ours, but its start failed half-way; once may be a start under way
        return await self._bus.get(gateway_lease_key(accepted.gateway)) is None

    async def _attend(self, run: Run) -> bool:
        """Stands in for the run's own gateway; False when that one lives, or another stands in already."""
        gateway = run.state.accepted.gateway if run.state.accepted is not None else ""
        if gateway != self._bus.gateway_id and await self._bus.get(gateway_lease_key(gateway)) is not None:
            return False
        return await self._bus.hold(run_attendant_key(run.run_id), ATTEND_SECONDS)

    async def _in_its_place(self, run: Run, step: Coroutine[Any, Any, None]) -> None:
        """A step that only the run's own gateway may take, or the one that stands in for it."""
        try:
            if await self._attend(run):
                await step
            else:
                run.since, run.lost_since = time.monotonic(), None
        finally:
            step.close()

    async def _sweep(self) -> None:
        with contextlib.suppress(BusLost):
            await self.sweep()

    def _next_step(self, run: Run, now: float) -> Coroutine[Any, Any, None] | None:
        step = self._missing_step(run, now)
        if step is None or run.order is not None or run.cancel_requested:
            return step
        return self._in_its_place(run, step)

    def _missing_step(self, run: Run, now: float) -> Coroutine[Any, Any, None] | None:
        state = run.state
        if state.phase is Phase.WAITING:
            return self._next_step_waiting(run, now)
        if not state.is_on_engine:
            return None  # its end is being written
        if self._directory.is_lost(state.engine_id, state.incarnation):
            return self._next_step_lost(run, now)
        run.lost_since = None
        if run.cancel_requested and run.cancelled_attempt != state.attempt:
            return self._runs.send_cancel(run)
        if run.cancel_requested and now - run.since > CANCEL_SECONDS:
            return self._runs.write_verdict(run, cancelled(state))
        if run.order is None and not run.num_followers and now - run.since > self._orphan_seconds:
            return self._runs.cancel(run.run_id)
        return None

    def _next_step_waiting(self, run: Run, now: float) -> Coroutine[Any, Any, None] | None:
        if run.cancel_requested:
            return self._runs.write_verdict(run, cancelled(run.state))
        if run.order is None:
            return self._runs.write_verdict(run, failed(run.state, "gateway_lost", GATEWAY_LOST))
        if self._directory.like(run.order.engine):
            run.lost_since = None
            engines = self._runs.engines_for(run.order) if self._runs.is_adrift(run) else []
            if engines:
                return self._runs.dispatch(run, engines[0])
        elif self._waited(run, now):
            return self._runs.write_verdict(run, failed(run.state, "engine_lost", NO_ENGINE))
        return None

    def _next_step_lost(self, run: Run, now: float) -> Coroutine[Any, Any, None] | None:
        state = run.state
        if run.cancel_requested:
            return self._runs.write_verdict(run, cancelled(state))
        if run.order is not None and state.num_tokens == 0 and run.num_resent < MAX_RESENT:
            engines = self._runs.engines_for(run.order)
            if engines:
                log.info("turn_sent_again", engine=engines[0].info.engine_id)
                run.num_resent += 1
                return self._runs.dispatch(run, engines[0])
            if not self._waited(run, now):
                return None
        return self._runs.write_verdict(run, failed(state, "engine_lost", ENGINE_LOST))

    def _waited(self, run: Run, now: float) -> bool:
        if run.lost_since is None:
            run.lost_since = now
        return now - run.lost_since > RESEND_SECONDS

    async def _do(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (BusLost, RunNotFound):
            pass  # the next look tries again
        finally:
            self._at_work.discard(run.run_id)
