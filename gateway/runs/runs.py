"""Runs: starts them, sends their turns to engines, follows each to its end and writes that end.

Holds no state of a run that its stream does not, apart from the order of one that it started; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Container, Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from gateway.bus import Bus, BusLost, Entry, StreamGone
from gateway.errors import NoEngine, RunNotFound
from gateway.flow.directory import Directory, EngineView
from gateway.flow.places import Order, Places, Reservation, submit_of
from gateway.tasks import Border, Tasks
from workers.messages import (
    RUN_END_ID,
    RUNS_LIVE_KEY,
    Accepted,
    Cancel,
    CancelAgents,
    Dispatched,
    RunEnded,
    Started,
    TurnEnd,
    encode,
    event_id,
    inbox_key,
    run_events_key,
)

from .event_ids import StreamGap, follows, id_pair
from .events import decode
from .run import Run, RunEvent
from .state import Phase, RunState, advance, cancelled, end_of, failed, fold

__all__ = ["Order", "Run", "RunEvent", "Runs"]

EXPIRE_SECONDS = 3600
"""How long an ended run's events can still be read."""

GONE = "The message bus lost the events of this run. Send the call again."

log = structlog.get_logger(__name__)


class Runs:
    """The runs that this gateway follows. `on_turn_end` functions hear of each turn's end once."""

    def __init__(self, bus: Bus, directory: Directory, *, max_waiting: int = 64) -> None:
        self.on_turn_end: list[Callable[[Run], None]] = []
        self._bus = bus
        self._places = Places(directory, max_waiting)
        self._runs: dict[str, Run] = {}
        self._tasks = Tasks()
        self._border = Border("on_turn_end")
        self._stopping = False  # takes no new runs
        self._closed = False  # sends nothing more
        directory.on_poll.append(self.release)

    # For the HTTP side.

    def reserve(self, engine: EngineView) -> Reservation:
        """A place in line while a call is prepared. Raises Overloaded or NoEngine."""
        self._check_open()
        return self._places.reserve(engine)

    async def start(self, order: Order, place: Reservation | None = None) -> str:
        """The new run's id (`run-<32 hex>`) once it is in line, in the reserved place or a further one.

        Raises Overloaded or NoEngine.
        """
        self._check_open()
        with place or self.reserve(order.engine):
            run = await self._create(order)
        with run.in_logs():
            log.info("run_started", num_prompt_tokens=order.prompt_tokens, max_tokens=order.max_tokens)
        self._follow(run)
        self._places.enter(run.run_id, order)
        self.release()
        return run.run_id

    async def events(self, run_id: str) -> AsyncIterator[RunEvent]:
        """Events from the start to RunEnded inclusive; close it with `aclosing`. Raises RunNotFound at the
        first step. A run of which the bus has lost events ends in Failed (`run_lost` or `gap`).
        """
        run = await self.adopt(run_id)
        follower = self._bus.follow(run_events_key(run_id), "0-0")
        if run is not None:
            run.num_followers += 1
        before = "0-0"
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
            if run is not None:
                run.num_followers -= 1
                run.since = time.monotonic()

    async def cancel(self, run_id: str) -> None:
        """Ends the run wherever it is; the first end wins. Safe to repeat; raises RunNotFound. Returns when
        the Cancel is on its way; while the bus is lost, at once: it is sent when the bus returns.
        """
        run = await self.adopt(run_id)
        if run is None:
            return
        if not run.cancel_requested:
            run.cancel_requested, run.since = True, time.monotonic()
        await asyncio.wait({self._spawn(run, self.send_cancel(run))}, timeout=2.0)

    @property
    def num_waiting(self) -> int:
        """Runs in this gateway's lines."""
        return self._places.num_waiting

    @property
    def num_live(self) -> int:
        """Runs that this gateway follows."""
        return len(self._runs)

    async def cancel_agents(self, root: CancelAgents, agents: Container[str]) -> int:
        """Ends the runs of `root` and of its descendants, of which this gateway knows `agents`, and tells all
        living engines to do the same. How many runs were told here. Safe to repeat.
        """
        told = [
            run
            for run in self.local()
            if run.order is not None
            and (run.order.tenant, run.order.names.session) == (root.tenant, root.session)
            and (not root.agent or run.order.names.agent in agents)
        ]
        message = encode(root)
        await asyncio.gather(
            *(self.cancel(run.run_id) for run in told),
            *(self._bus.send(inbox_key(engine_id), message) for engine_id in self._places.living()),
        )
        return len(told)

    # For the caretaker.

    def local(self) -> list[Run]:
        """The runs that this gateway follows."""
        return list(self._runs.values())

    def engines_for(self, order: Order) -> list[EngineView]:
        """Living, ready engines that could take the order, the least busy first."""
        return sorted(self._places.others(order), key=lambda engine: engine.stats.num_running)

    async def adopt(self, run_id: str) -> Run | None:
        """Follows another gateway's run (or finds our own); None when it has ended. Raises RunNotFound."""
        if run_id not in self._runs:
            entries = await self._bus.read(run_events_key(run_id), "0-0")
            if not entries:
                raise RunNotFound(run_id)
            state = fold(entries)
            if state.phase is Phase.ENDED:
                return None
            if run_id not in self._runs:
                self._follow(Run(run_id, state, order=None))
        return self._runs.get(run_id)

    def is_adrift(self, run: Run) -> bool:
        """Accepted here, but neither in line nor on its way to an engine: that step failed half-way."""
        return run.order is not None and not run.is_released and not self._places.is_waiting(run.run_id)

    def release(self) -> None:
        """Sends those next in line to the engines that have room."""
        if self._closed:
            return
        for release in self._places.releases():
            run = self._runs[release.run_id]
            run.is_released = True
            self._spawn(run, self.dispatch(run, release.engine))

    async def dispatch(self, run: Run, engine: EngineView) -> None:
        """Sends the turn as a new attempt, unless the run has a token or an end; waits for a lost bus."""
        try:
            async with run.lock:
                while run.run_id in self._runs:
                    try:
                        await self._try_dispatch(run, engine)
                        break
                    except BusLost:
                        await self._bus.wait_available()
        finally:
            run.is_released = False
        if run.cancel_requested:
            await self.send_cancel(run)

    async def send_cancel(self, run: Run) -> None:
        """The next step of a requested cancel: out of the line, or a Cancel to the engine. Safe to repeat."""
        if self._places.leave(run.run_id):
            await self.write_verdict(run, cancelled(run.state))
            return
        async with run.lock:
            if run.state.is_on_engine and run.cancelled_attempt != run.state.attempt:
                await self._tell_engine(run, run.state)

    async def write_verdict(self, run: Run, verdict: TurnEnd) -> None:
        """Ends the turn in the engine's place unless it has ended; fences what the engine may still say."""

        def decide(entries: list[Entry]) -> Entry | None:
            state = fold(entries, run.state)
            if state.turn_end is not None or state.ended is not None:
                return None
            return Entry(state.next_id, encode(verdict))

        self._places.leave(run.run_id)
        async with run.lock:
            if run.state.turn_end is not None or run.state.ended is not None:
                return
            try:
                await self._bus.append_watched(run.key, run.state.last_id, decide)
            except BusLost:
                log.warning("verdict_delayed")

    async def clear(self, run_id: str) -> None:
        """An ended run leaves the list of live ones; its events stay for an hour. Safe to repeat."""
        pipeline = self._bus.commands.pipeline(transaction=False)
        pipeline.srem(RUNS_LIVE_KEY, run_id)
        pipeline.expire(run_events_key(run_id), EXPIRE_SECONDS)
        try:
            await self._bus.execute(pipeline)
        except BusLost:
            log.info("run_not_cleared")  # the caretaker finds it ended

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more runs, gives the open ones a moment, then ends its own with an error."""
        self._stopping = True
        await self._wait_for_ends(grace_seconds)
        with contextlib.suppress(TimeoutError):  # the bus may be away
            async with asyncio.timeout(2.0):
                await asyncio.gather(*(self._end_for_stop(run) for run in self.local()))
        await self._wait_for_ends(1.0)
        self._closed = True
        await self._tasks.end()

    # Inside.

    def _check_open(self) -> None:
        if self._stopping:
            raise NoEngine("The server is stopping. Send the call again in a few seconds.")
        if not self._bus.available:
            raise BusLost

    async def _end_for_stop(self, run: Run) -> None:
        if run.state.accepted is not None and run.state.accepted.gateway == self._bus.gateway_id:
            message = "The server is stopping. Send the call again when it is back."
            state = run.state
            with run.in_logs():
                await self.write_verdict(run, failed(state, "server_stopping", message))
            if state.is_on_engine:
                await self._tell_engine(run, state)  # after the verdict, or its end might come first

    async def _tell_engine(self, run: Run, state: RunState) -> None:
        message = encode(Cancel(run_id=run.run_id, attempt=state.attempt))
        with contextlib.suppress(BusLost):  # the caretaker comes again
            await self._bus.send(inbox_key(state.engine_id or ""), message)
            run.cancelled_attempt = state.attempt

    async def _create(self, order: Order) -> Run:
        """Claims the run id: the stream exists from here on."""
        accepted = Accepted(
            model=order.engine.info.model_id,
            engine_id=order.engine.info.engine_id,
            created=int(time.time()),
            prompt_tokens=len(order.token_ids) // 4,
            gateway=self._bus.gateway_id,
            request=msgspec.Raw(order.request),
        )
        run_id = f"run-{uuid.uuid4().hex}"
        run = Run(run_id, advance(RunState(), event_id(0, 1), accepted), order)
        await self._bus.answered(self._bus.commands.sadd(RUNS_LIVE_KEY, run_id))
        await self._bus.append(run.key, run.state.last_id, encode(accepted), create=True)
        return run

    async def _try_dispatch(self, run: Run, engine: EngineView) -> None:
        order, info = run.order, engine.info
        if run.state.turn_end is not None or run.state.ended is not None:
            return
        dispatched = Dispatched(engine_id=info.engine_id, incarnation=info.incarnation)
        state = run.state

        def decide(entries: list[Entry]) -> Entry | None:
            nonlocal state
            state = fold(entries, run.state)
            if state.num_tokens or state.turn_end is not None or state.ended is not None:
                return None
            return Entry(state.next_id, encode(dispatched))

        if order is None or not await self._bus.append_watched(run.key, run.state.last_id, decide):
            return
        run.state = state
        run.advance(state.next_id, dispatched)
        self._places.move(run.run_id, engine)
        submit = submit_of(order, run.run_id, run.state.attempt, info)
        await self._bus.send(inbox_key(info.engine_id), encode(submit))

    def _follow(self, run: Run) -> None:
        self._runs[run.run_id] = run
        run.task = self._spawn(run, self._drive(run))

    async def _drive(self, run: Run) -> None:
        """Follows a run to its end, whether or not a client reads it."""
        follower = self._bus.follow(run.key, run.state.last_id)
        try:
            if run.state.phase is Phase.TURN_ENDED:
                await self._end(run)
            while run.state.phase is not Phase.ENDED:
                self._take(run, await follower.next())
                if run.state.phase is Phase.TURN_ENDED:
                    self._places.leave(run.run_id)
                    for listener in self.on_turn_end:
                        with self._border:
                            listener(run)
                    await self._end(run)
            log.info("run_ended", state=run.state.ended.state if run.state.ended is not None else None)
            await self.clear(run.run_id)
        except StreamGone:
            log.warning("run_lost")
            await self.send_cancel(run)
            await self.clear(run.run_id)
        finally:
            follower.close()
            self._places.leave(run.run_id)
            del self._runs[run.run_id]
            self.release()

    def _take(self, run: Run, entry: Entry) -> None:
        if id_pair(entry.id) <= id_pair(run.state.last_id):
            return  # our own Dispatched, and what came before it
        event = decode(entry.message)
        if event is None:
            run.state = replace(run.state, last_id=entry.id)
            message = "The engine speaks a newer version of the bus: upgrade this gateway."
            verdict = failed(run.state, "upgrade_gateway", message, retryable=False)
            self._spawn(run, self.write_verdict(run, verdict))
            return
        if not follows(run.state.last_id, entry.id):
            gap = StreamGap(run.state.last_id, entry.id)
            log.error("run_gap", after=gap.after, before=gap.before)
            self._spawn(run, self.write_verdict(run, failed(run.state, "gap", str(gap))))
        run.advance(entry.id, event)
        if run.state.phase is Phase.GENERATING:
            self._places.note_prefilled(run.run_id)
        if isinstance(event, Started) and event.missed is not None:
            missed = event.missed
            log.info(
                "prefix_missed", cause=missed.cause, tokens=missed.recomputed_tokens, position=missed.position
            )

    async def _end(self, run: Run) -> None:
        """Writes the run's end; when another gateway was faster, its end stands."""
        if run.state.turn_end is None:
            return
        ended = encode(end_of(run.state.turn_end))
        while True:
            try:
                written = await self._bus.append(run.key, RUN_END_ID, ended)
                if not written and not await self._bus.read(run.key, "0-0", 1):
                    raise StreamGone(run.key)
                return
            except BusLost:
                await self._bus.wait_available()

    async def _wait_for_ends(self, seconds: float) -> None:
        if tasks := [run.task for run in self.local() if run.task is not None]:
            await asyncio.wait(tasks, timeout=seconds)

    def _spawn(self, run: Run, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.spawn(work, run.in_logs())
