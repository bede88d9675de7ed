"""Does a run's missing next step: when its engine, its gateway or its client is gone, or a step was lost.

Looks at state, not at what happened, so it may come late or twice. Writes through Runs only.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from gateway.bus import Bus, BusLost, StreamGone
from gateway.errors import Conflict, GatewayError, NoEngine, RunNotFound
from gateway.flow.directory import Directory
from gateway.flow.places import Release
from gateway.tasks import Border, Tasks, repeat
from metrics.logs import about_run
from workers.messages import RUNS_LIVE_KEY, TurnEnd, gateway_lease_key, run_attendant_key, run_events_key

from .runs import Run, Runs
from .state import Phase, RunState, cancelled, fold, paused

SWEEP_SECONDS = 2.0
RESEND_SECONDS = 8.0
"""How long a call without a token waits for an engine that can take it once more: its client can send it
elsewhere. A detached run has told how long it may wait, or its class tells it.
"""
MAX_RESENT = 1
"""A turn that was on a lost engine goes to another once: it may have been what killed the first."""
ORPHAN_SECONDS = 30.0
"""How long a run outlives its gateway for a client that resumes it."""
ATTEND_SECONDS = 3 * SWEEP_SECONDS
"""How long a gateway stands in for a dead one after it last said so."""
ASK_SECONDS = 0.4
"""How often it is asked whether a run's own gateway lives."""
CANCEL_SECONDS = 30.0
"""An engine that lives but has not obeyed a Cancel for so long is no longer asked."""

ENGINE_LOST = "The engine stopped before this call ended; it is being restarted. Send the call again."
NO_ENGINE = "No engine became ready to take this call. Send it again."

log = structlog.get_logger(__name__)


class Caretaker:
    """Watches the runs that this gateway follows, and the live ones that no gateway follows."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        runs: Runs,
        *,
        orphan_seconds: float = ORPHAN_SECONDS,
        resend_seconds: float = RESEND_SECONDS,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._runs = runs
        self._orphan_seconds = orphan_seconds
        self._resend_seconds = resend_seconds
        self._seen: set[str] = set()  # foreign runs of the last sweep
        self._gateways: dict[str, str] = {}  # that took these
        self._at_work: set[str] = set()
        self._tasks = Tasks()
        self._border = Border("caretaker")  # of one run: the others are looked after all the same
        directory.on_poll.append(self.look)

    async def start(self) -> None:
        """Takes over what stopped gateways left, then keeps watching."""
        self._runs.listen()
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
        self._gateways = {name: owner for name, owner in self._gateways.items() if name in foreign}
        for run in self._runs.local():
            if run.is_attended or (run.order is None and run.num_followers):
                await self._attend(run)  # before another gateway calls it an orphan
        await self._check_heartbeats()

    async def _adopt_abandoned(self, run_id: str) -> None:
        if not await self._is_abandoned(run_id):
            return
        try:
            run = await self._runs.adopt(run_id)
        except RunNotFound:
            del self._gateways[run_id]  # its stream is gone meanwhile: the next sweep sees that
            return
        if run is None:
            await self._runs.driver.telling.tell_ended(run_id)
            await self._runs.clear(run_id)
        else:
            log.info("run_adopted")

    async def _is_abandoned(self, run_id: str) -> bool:
        gateway = await self._gateway_of(run_id)
        if gateway is None:
            if run_id in self._seen:
                await self._bus.answered(self._bus.commands.srem(RUNS_LIVE_KEY, run_id))
            return False
        if gateway == self._bus.gateway_id:
            return run_id in self._seen  # ours, but its start failed half-way; once may be a start under way
        return await self._bus.get(gateway_lease_key(gateway)) is None

    async def _gateway_of(self, run_id: str) -> str | None:
        """Who took a foreign run. It never changes, and what tells it has the run's whole body."""
        if run_id not in self._gateways:
            accepted = fold(await self._bus.read(run_events_key(run_id), "0-0", 1)).accepted
            if accepted is None:
                return None
            self._gateways[run_id] = accepted.gateway
        return self._gateways[run_id]

    async def _attend(self, run: Run) -> bool:
        """Stands in for the run's own gateway; False when that one lives, or another stands in already."""
        gateway = run.state.accepted.gateway if run.state.accepted is not None else ""
        if gateway != self._bus.gateway_id and await self._bus.get(gateway_lease_key(gateway)) is not None:
            return False
        return await self._bus.hold(run_attendant_key(run.run_id), ATTEND_SECONDS)

    async def _sweep(self) -> None:
        with contextlib.suppress(BusLost):
            await self.sweep()

    async def _check_heartbeats(self) -> None:
        """What their specs say of runs whose callers were not heard in time."""
        runs = [run for run in self._runs.local() if run.is_ours and _needs_beats(run)]
        beating = await self._runs.keeper.beating([run.run_id for run in runs])
        for run in runs:
            if run.run_id not in beating and run.left.hold is None and run.left.cancel is None:
                with run.in_logs(), contextlib.suppress(RunNotFound, Conflict):
                    log.info("heartbeat_missed", then=run.state.spec.orphan)
                    await self._runs.orphan(run)

    def _next_step(self, run: Run, now: float) -> Coroutine[Any, Any, None] | None:
        """For a run of ours, or one that we may stand in for."""
        if not run.is_ours:
            return self._stand_in(run, now)
        state = run.state
        if state.is_on_engine:
            if self._directory.is_lost(state.engine_id, state.incarnation):
                return self._next_step_lost(run, now)
            run.lost_since = None
            if run.cancelled_attempt == state.attempt and now - run.since > CANCEL_SECONDS:
                return self._verdict(run, cancelled)
        if state.phase is Phase.WAITING and run.order is not None and not run.left.cancels_now:
            if self._directory.like(run.order.engine):
                run.lost_since = None
            elif self._waited(run, now) and not _is_over(run):
                return self._runs.driver.fail(run, "engine_lost", NO_ENGINE)
        if self._is_orphan(run, now):
            return self._cancel_orphan(run)
        return self._runs.driver.step(run) if self._runs.driver.has_step(run) else None

    def _stand_in(self, run: Run, now: float) -> Coroutine[Any, Any, None] | None:
        """For a run whose own gateway may be gone: asks about that where the run cannot go on by itself."""
        waits = run.state.phase in (Phase.WAITING, Phase.TURN_ENDED)
        lost = run.state.is_on_engine and self._directory.is_lost(run.state.engine_id, run.state.incarnation)
        is_orphan = not run.num_followers and now - run.since > self._orphan_seconds
        if not (waits or lost or is_orphan or run.cancel_requested or run.state.spec.is_detached):
            return None
        if run.asked_owner_at is not None and now - run.asked_owner_at < ASK_SECONDS:
            return None
        run.asked_owner_at = now
        return self._take_over(run)

    async def _take_over(self, run: Run) -> None:
        """Becomes the run's owner if nobody else is."""
        if not await self._attend(run):
            run.lost_since = None
            if not run.num_followers:
                run.since = time.monotonic()
            return
        await self._runs.driver.read_wishes(run)
        if run.state.spec.is_detached and run.order is None:
            try:
                await self._runs.making.take_over(run)
            except NoEngine:
                return  # the next look tries again
            except GatewayError as error:
                log.error("run_not_rebuilt", kind=error.kind)
                self._own(run)
                await self._runs.driver.fail(run, error.kind, error.message, retryable=False)
                return
            log.info("run_taken_over")
        if run.order is not None:
            await self._runs.driver.turns.send_again(run)
        self._own(run)
        await self._runs.driver.telling.retell(run)
        await self._runs.driver.look(run)  # a command that came meanwhile has woken nobody

    def _own(self, run: Run) -> None:
        run.is_attended = True
        for hear in self._runs.on_take_over:
            with self._border:
                hear(run)

    def _is_orphan(self, run: Run, now: float) -> bool:
        """A call of a gateway that is gone lives for a client that resumes it, and not for long."""
        is_call = run.is_attended and not run.state.spec.is_detached and not run.left.cancels_now
        return is_call and not run.num_followers and now - run.since > self._orphan_seconds

    async def _cancel_orphan(self, run: Run) -> None:
        run.cancel_requested = True
        await self._runs.driver.step(run)

    def _next_step_lost(self, run: Run, now: float) -> Coroutine[Any, Any, None] | None:
        state, left = run.state, run.left
        if left.cancels_now or _is_over(run):
            return self._verdict(run, cancelled)
        if left.hold is not None:
            return self._verdict(run, paused)
        if run.order is not None and state.attempt_tokens == 0 and run.num_resent < MAX_RESENT:
            engines = self._runs.engines_for(run.order)
            if engines:
                log.info("turn_sent_again", engine=engines[0].info.engine_id)
                run.num_resent += 1
                release = Release(run.run_id, engines[0], "resent")
                return self._runs.driver.turns.dispatch(run, release, state.attempt)
            if not self._waited(run, now):
                return None
        return self._runs.driver.fail(run, "engine_lost", ENGINE_LOST)

    async def _verdict(self, run: Run, make: Callable[[RunState], TurnEnd]) -> None:
        async with run.lock:
            await self._runs.driver.verdict(run, make)
        await self._runs.driver.step(run)

    def _waited(self, run: Run, now: float) -> bool:
        if run.lost_since is None:
            run.lost_since = now
        return now - run.lost_since > self._patience_seconds(run)

    def _patience_seconds(self, run: Run) -> float:
        spec = run.state.spec
        if not spec.is_detached:
            return self._resend_seconds
        if spec.queue_ttl_ms is not None:
            return spec.queue_ttl_ms / 1000
        return math.inf if spec.deadline is not None else self._runs.timeout_seconds(spec.flow_class)

    async def _do(self, run: Run, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (BusLost, RunNotFound, StreamGone):
            pass  # the next look tries again
        finally:
            self._at_work.discard(run.run_id)


def _is_over(run: Run) -> bool:
    """Whether a limit of its own ends it."""
    return run.view(time.time()).over is not None


def _needs_beats(run: Run) -> bool:
    spec = run.state.spec
    return spec.heartbeat_ms is not None and spec.orphan != "continue"
