"""Follows runs, and takes the steps of those that are this gateway's: each decided in steps.py, written once.

Owns the one way in which a gateway writes into a run's stream. Knows no HTTP and no template.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import structlog

from gateway.bus import Bus, BusLost, Entry, StreamGone
from gateway.flow.places import Places
from gateway.tasks import Border, Tasks
from workers.messages import (
    RUN_END_ID,
    Cancel,
    Pause,
    RunEnded,
    Started,
    TurnEnd,
    encode,
    inbox_key,
)

from .astray import Astray
from .commands import Answered, ForkRun
from .ends import Told
from .event_ids import StreamGap, follows, id_pair
from .events import AnyEvent, decode, run_commands_key
from .forgetting import clear
from .keeping import Keeper
from .run import Run, RunEvent, closes_turn
from .state import Phase, RunState, cancelled, failed, fold, paused
from .steps import AskCaller, AskEngine, End, Enter, Fork, GoOn, Open, Refuse, Step, Verdict, next_step
from .telling import Telling
from .turns import Turns
from .wishes import note

GATEWAY_LOST = "The gateway that took this call stopped before it was sent to an engine. Send it again."

MakeChild = Callable[[ForkRun, Run, bytes], Awaitable[None]]
"""Starts the child of a run behind these tokens of it, unless it is there. Raises GatewayError."""

log = structlog.get_logger(__name__)


class Driver:
    """The runs that this gateway follows. `on_turn_end` functions hear of each turn's end once."""

    def __init__(self, bus: Bus, places: Places, keeper: Keeper, tasks: Tasks, make_child: MakeChild) -> None:
        self.runs: dict[str, Run] = {}
        self.on_turn_end: list[Callable[[Run], None]] = []
        self.is_closed = False  # sends nothing more
        self.make_child = make_child
        self.telling = Telling(bus, keeper, tasks)
        self.turns = Turns(bus, places, keeper, self)
        self.astray = Astray(bus, self)
        self._bus = bus
        self._places = places
        self._keeper = keeper
        self._tasks = tasks
        self._border = Border("on_end")

    def live(self, run_id: str) -> Run | None:
        """A run that it follows; None once that has ended: its stream may be gone by now."""
        run = self.runs.get(run_id)
        return None if run is None or run.state.phase is Phase.ENDED else run

    def follow(self, run: Run) -> None:
        """Follows a run to its end, whether or not a client reads it."""
        self.runs[run.run_id] = run
        run.task = self.spawn(run, self._drive(run))

    def enter(self, run: Run) -> None:
        """Into the line, at once: its place was reserved."""
        if self.runs.get(run.run_id) is not run:
            return  # its stream is gone: nobody would take it out again
        self._places.enter(run.run_id, self.turns.attempt_order(run), run.waited_seconds)
        self.release()

    def spawn(self, run: Run, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work for a run, in its own log context."""
        return self._tasks.spawn(work, run.in_logs())

    # Steps.

    def has_step(self, run: Run) -> bool:
        """Whether something is to be done for a run of ours."""
        if not run.is_ours:
            return False
        step = next_step(run.view(time.time()))
        if isinstance(step, Enter):
            return not self._is_entered(run)
        if isinstance(step, AskEngine):
            return self._asked(run, step) != run.state.attempt
        return step is not None

    async def step(self, run: Run) -> None:
        """Takes the steps that are to be taken now. Safe at any time and from anywhere. Raises BusLost."""
        async with run.lock:
            while run.is_ours and run.run_id in self.runs and not self.is_closed:
                await self._keep(run)
                await self.astray.examine(run)
                step = next_step(run.view(time.time()))
                if step is None or not await self._take_step(run, step):
                    return

    async def nudge(self, run: Run) -> None:
        """`step` by who has no way to do it again: what fails is left to the caretaker."""
        with contextlib.suppress(BusLost, StreamGone):
            await self.step(run)

    async def look(self, run: Run) -> None:
        """Reads what is wanted of a run, and does it. Raises BusLost."""
        await self.read_wishes(run)
        await self.step(run)

    async def read_wishes(self, run: Run) -> None:
        """Takes in the commands that were recorded since. Raises BusLost."""
        key = run_commands_key(run.run_id)
        entries = await self._bus.read(key, run.wishes.last_id)
        fresh = [entry for entry in entries if id_pair(entry.id) > id_pair(run.wishes.last_id)]
        run.wishes = note(run.wishes, fresh)

    async def answer(self, run: Run, *answers: Answered) -> None:
        """Records what became of commands. Raises BusLost."""
        for answered in answers:
            await self._bus.send(run_commands_key(run.run_id), encode(answered))
        await self.read_wishes(run)

    async def _take_step(self, run: Run, step: Step) -> bool:
        """True when the next one is to be looked for."""
        match step:
            case Enter():
                return await self._enter(run)
            case AskEngine():
                await self._ask_engine(run, step)
                return False
            case Verdict(what="cancel"):
                return await self.verdict(run, cancelled)
            case Verdict():
                return await self.verdict(run, paused)
            case End():
                return await self._end(run, step)
            case Refuse(commands=commands, error=error, message=message):
                answers = [Answered(command=name, error=error, message=message) for name in commands]
                await self.answer(run, *answers)
                return True
            case Fork() | GoOn() | Open() | AskCaller():
                return await self.turns.take(run, step)

    async def _enter(self, run: Run) -> bool:
        if run.order is None:
            return await self.verdict(run, lambda state: failed(state, "gateway_lost", GATEWAY_LOST))
        if self._is_entered(run):
            return False
        await self._keeper.look_at_tree(run)
        if not isinstance(next_step(run.view(time.time())), Enter):
            return True
        self._places.leave(run.run_id)  # it may have been released, and that step was lost
        if await self.turns.is_late(run):
            return True
        self.enter(run)
        return False

    def _is_entered(self, run: Run) -> bool:
        return run.is_released or run.waits_for_tree or self._places.is_waiting(run.run_id)

    def release(self) -> None:
        """Sends those next in line to the engines that have room."""
        if self.is_closed:
            return
        for run_id in self._places.expired():
            self.spawn(self.runs[run_id], self.turns.expire(self.runs[run_id]))
        for release in self._places.releases():
            run = self.runs[release.run_id]
            run.is_released = True
            self.spawn(run, self.turns.dispatch(run, release))

    def _asked(self, run: Run, step: AskEngine) -> int | None:
        return run.cancelled_attempt if step.what == "cancel" else run.paused_attempt

    async def _ask_engine(self, run: Run, step: AskEngine) -> None:
        state = run.state
        if self._asked(run, step) == state.attempt:
            return
        run.since = time.monotonic()
        await self.tell_engine(run, state, step.what)

    async def tell_engine(self, run: Run, state: RunState, what: str) -> None:
        """A Cancel or a Pause to the engine that has the run. Raises BusLost."""
        if what == "cancel":
            message = encode(Cancel(run_id=run.run_id, attempt=state.attempt))
        else:
            hold = run.left.hold
            seconds = hold.hold_seconds if hold is not None else None
            hold_seconds = state.spec.hold_seconds if seconds is None else seconds
            message = encode(Pause(run_id=run.run_id, attempt=state.attempt, hold_seconds=hold_seconds))
        await self._bus.send(inbox_key(state.engine_id or ""), message)
        if what == "cancel":
            run.cancelled_attempt = state.attempt
        else:
            run.paused_attempt = state.attempt

    async def verdict(self, run: Run, make: Callable[[RunState], TurnEnd]) -> bool:
        """Ends the attempt in the engine's place unless it has ended; fences what the engine may still say.
        For who holds the run's lock. Raises BusLost.
        """

        def decide(state: RunState) -> TurnEnd | None:
            is_open = state.phase in (Phase.WAITING, Phase.PAUSED) or state.is_on_engine
            return make(state) if is_open else None

        self._places.leave(run.run_id)
        return await self.write(run, decide)

    async def _end(self, run: Run, step: End) -> bool:
        """Keeps the result, then writes the end: unless a command came that the end has not seen."""
        await self._keeper.result(_told(run, step.ended), step.ended)
        quiet = (run_commands_key(run.run_id), run.wishes.last_id)
        if not await self.write(run, lambda state: step.ended, quiet=quiet):
            await self.read_wishes(run)
            entries = await self._bus.read(run.key, run.state.last_id)
            state = fold(entries, run.state)
            if not entries and not await self._bus.read(run.key, "0-0", 1):
                raise StreamGone(run.key)
            if state.ended is not None:  # another gateway was faster: its end stands
                await self._keeper.result(_told(run, state.ended), state.ended)
                return False
        return True

    async def _keep(self, run: Run) -> None:
        """What is to be kept of an attempt that has ended, before more follows; of others, their thoughts."""
        state = run.state
        if state.is_on_engine:
            await self._keeper.thought_so_far(run)
        ended = state.phase in (Phase.TURN_ENDED, Phase.PAUSED)
        if not ended or run.kept_attempt == state.attempt:
            return
        if state.phase is Phase.TURN_ENDED:
            await self._keeper.spent(run)
        else:
            await self._keeper.spent_so_far(run)
        if state.spec.is_detached or run.drops_partial:  # else they may come behind the end
            await self._keeper.ids(run)
        else:
            self.spawn(run, self._keeper.ids(run))
        run.kept_attempt = state.attempt

    # Writing.

    async def write(
        self,
        run: Run,
        make: Callable[[RunState], AnyEvent | None],
        *,
        quiet: tuple[str, str] | None = None,
    ) -> bool:
        """Writes an event that is made of the run's very state; None writes nothing. For who holds the lock.

        False when nothing was written: then what came in between is on its way. Raises BusLost.
        """
        if run.state.ended is not None:
            return False
        base = run.state  # followers may advance the run meanwhile
        before: list[Entry] = []
        choice: Entry | None = None

        def decide(entries: list[Entry]) -> Entry | None:
            nonlocal before, choice
            before = entries
            state = fold(entries, base)
            event = make(state) if state.ended is None else None
            if event is None:
                return None
            choice = Entry(RUN_END_ID if isinstance(event, RunEnded) else state.next_id, encode(event))
            return choice

        if not await self._bus.append_watched(run.key, base.last_id, decide, quiet=quiet):
            return False
        for entry in [*before, choice]:
            if entry is not None:
                self.take(run, entry)
        return True

    # Following.

    async def _drive(self, run: Run) -> None:
        follower = self._bus.follow(run.key, run.state.last_id)
        try:
            await self._step_surely(run)
            while run.state.phase is not Phase.ENDED:
                entry = await follower.next()
                phase, last_id = run.state.phase, run.state.last_id
                self.take(run, entry)
                if run.state.last_id != last_id and (run.state.phase is not phase or self._is_watched(run)):
                    await self._step_surely(run)
            log.info("run_ended", state=run.state.status)
            if run.is_ours:
                await self._surely(lambda: self.telling.finish(run))
            await self.clear(run.run_id)
        except StreamGone:
            log.warning("run_lost")
            await self._surely(lambda: self._keeper.spent_so_far(run))
            if run.state.is_on_engine and not self.is_closed:
                await self._surely(lambda: self.tell_engine(run, run.state, "cancel"))
            await self.clear(run.run_id)
        finally:
            follower.close()
            self._places.leave(run.run_id)
            del self.runs[run.run_id]
            self.release()

    def _tell(self, listeners: Sequence[Callable[[Run], None]], run: Run) -> None:
        for listener in listeners:
            with self._border:
                listener(run)

    def _is_watched(self, run: Run) -> bool:
        """Whether a limit may be reached between two phases."""
        return any(b.thinking_tokens is not None for b in (run.state.spec.budget, run.state.spec.tree_budget))

    async def _step_surely(self, run: Run) -> None:
        if run.is_ours:
            await self._surely(lambda: self.step(run))

    async def _surely(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await work()
            except BusLost:
                await self._bus.wait_available()

    def take(self, run: Run, entry: Entry) -> None:
        """An entry of the run's stream; older ones and our own are known already."""
        if id_pair(entry.id) <= id_pair(run.state.last_id):
            return
        event = decode(entry.message)
        if event is None:
            run.state = replace(run.state, last_id=entry.id)
            message = "The engine speaks a newer version of the bus: upgrade this gateway."
            self._fail(run, "upgrade_gateway", message, retryable=False)
            return
        if not follows(run.state.last_id, entry.id):
            gap = StreamGap(run.state.last_id, entry.id)
            log.error("run_gap", after=gap.after, before=gap.before)
            self._fail(run, "gap", str(gap))
        self._take_event(run, RunEvent(entry.id, event))

    def _fail(self, run: Run, error: str, message: str, *, retryable: bool = True) -> None:
        self.spawn(run, self.fail(run, error, message, retryable=retryable))

    async def fail(self, run: Run, error: str, message: str, *, retryable: bool = True) -> None:
        """A verdict that the turn has failed; while the bus is away it is the caretaker's."""
        try:
            async with run.lock:
                await self.verdict(run, lambda state: failed(state, error, message, retryable=retryable))
        except BusLost:
            log.warning("verdict_delayed")
        await self.nudge(run)

    def _take_event(self, run: Run, entry: RunEvent) -> None:
        run.advance(entry.id, entry.event)
        if run.state.phase is Phase.GENERATING:
            self._places.note_prefilled(run.run_id)
        if isinstance(entry.event, TurnEnd):
            self._places.settle(run.run_id, entry.event)
            self._places.leave(run.run_id)
        if closes_turn(entry.event):
            self._tell(self.on_turn_end, run)
        if run.is_ours:
            self.astray.hear(run, entry)
            self.telling.tell(run, entry)
        if isinstance(entry.event, Started) and entry.event.missed is not None:
            missed = entry.event.missed
            log.info(
                "prefix_missed", cause=missed.cause, tokens=missed.recomputed_tokens, position=missed.position
            )

    async def clear(self, run_id: str) -> None:
        """An ended run leaves the list of live ones; its events stay for an hour. Safe to repeat."""
        try:
            await clear(self._keeper.store, run_id)
        except BusLost:
            log.info("run_not_cleared")  # the caretaker finds it ended


def _told(run: Run, ended: RunEnded) -> Told:
    is_kept = not (ended.state == "cancelled" and run.drops_partial)
    return Told(run.run_id, run.state, run.transcript, run.derail, is_kept=is_kept)
