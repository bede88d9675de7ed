"""Runs as the HTTP side sees them: started, read, and told what is wanted of them.

The façade of the room within the room: driver.py follows and takes steps, verbs.py records commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import replace

import msgspec
import structlog

from gateway.bus import Bus, BusLost, StreamGone
from gateway.errors import NoEngine, RunNotFound
from gateway.flow.classes import NORMAL, FlowClass, FlowHints
from gateway.flow.directory import Directory, EngineView
from gateway.flow.outlook import NO_OUTLOOK, Outlook
from gateway.flow.places import Order, Places, Reservation
from gateway.store.store import Store, store_in
from gateway.tasks import Border, Tasks, repeat
from workers.messages import (
    RUNS_LIVE_KEY,
    Accepted,
    CancelAgents,
    encode,
    event_id,
)

from .astray import Astray
from .cancelling import Cancelling
from .commands import CancelMode, CancelRun, PauseRun, ToolOutput, When
from .driver import Driver
from .event_ids import id_pair
from .keeping import Keeper
from .making import Making, spec_of
from .outcomes import Alive, Cancelled, Forked, Paused, Responded, Resumed, Steered
from .reading import NOTHING, read_events, read_newest, read_state, read_whole
from .recording import Recorder
from .run import Run, RunEvent
from .spec import Budget, ForkPoint, RunSpec, encode_spec
from .state import Phase, RunState
from .stopping import end_calls
from .talk import Conversation, Talk
from .verbs import Verbs

__all__ = ["Order", "Run", "RunEvent", "Runs"]

log = structlog.get_logger(__name__)


class Runs:
    """The runs that this gateway follows. `on_turn_end` functions hear of each turn's end once, those of
    `on_take_over` of runs that it goes on with in place of their own gateway; `talk` makes detached runs, and
    is given by the HTTP side.
    """

    talk: Talk | None = None

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        *,
        max_waiting: int = 64,
        places: Places | None = None,
        store: Store | None = None,
    ) -> None:
        self.keeper = Keeper(store or store_in(bus))
        self._bus = bus
        self._places = places or Places(directory, max_waiting)
        self._tasks = Tasks()
        self._border = Border("listen")
        self._making = Making(bus, self.keeper, self)
        self._driver = Driver(bus, self._places, self.keeper, self._tasks, self._making.child)
        self._recorder = Recorder(bus, self)
        self._cancelling = Cancelling(bus, self.keeper)
        self._verbs = Verbs(self._recorder, self._making, self.keeper)
        self.on_take_over: list[Callable[[Run], None]] = []
        self._stopping = False  # takes no new runs
        directory.on_poll.append(self._driver.release)

    # For the HTTP side.

    @property
    def on_turn_end(self) -> list[Callable[[Run], None]]:
        """Functions that hear of each turn's end."""
        return self._driver.on_turn_end

    @property
    def astray(self) -> Astray:
        """Where detectors are added, and what they find goes."""
        return self._driver.astray

    def reserve(self, engine: EngineView, flow: FlowHints = NORMAL) -> Reservation:
        """A place in line while a call is prepared. Raises Overloaded or NoEngine."""
        self._check_open()
        return self._places.reserve(engine, flow)

    async def start(
        self,
        order: Order,
        place: Reservation | None = None,
        spec: RunSpec | None = None,
        conversation: Conversation | None = None,
    ) -> str:
        """A call's id (`run-<32 hex>`) once it is in line, in the reserved place or a further one.

        `conversation`: how it goes on; None: it has one turn. Raises Overloaded or NoEngine, and BudgetSpent
        where the tree that its names belong to has no room for it.
        """
        self._check_open()
        spec = await self.keeper.in_tree(spec or spec_of(order), order.prompt_tokens)
        return await self.launch(f"run-{uuid.uuid4().hex}", order, spec, conversation, place)

    async def launch(
        self,
        run_id: str,
        order: Order,
        spec: RunSpec,
        conversation: Conversation | None,
        place: Reservation | None = None,
    ) -> str:
        """Claims the run's id, puts it in line and follows it; a run of that id is left as it is."""
        self._check_open()
        with place or self.reserve(order.engine, order.flow):
            run = await self._accept(run_id, order, spec)
        if run is None or run_id in self._driver.runs:
            return run_id
        run.conversation = conversation
        with run.in_logs():
            log.info("run_started", num_prompt_tokens=order.prompt_tokens, max_tokens=order.max_tokens)
        self._driver.follow(run)
        if spec.tree_budget == Budget():  # else its first step looks first what its tree has left
            self._driver.enter(run)
        return run_id

    async def create(self, spec: RunSpec, run_id: str = "") -> str:
        """A detached run's id once it is in line. Raises InvalidField, Overloaded or NoEngine.

        `run_id`: chosen by the caller (`run-<32 hex>`), so that a claim can name it. A run that exists
        already is left as it is.
        """
        self._check_open()
        run_id = run_id or f"run-{uuid.uuid4().hex}"
        if spec.fork is not None:
            return (await self.fork(spec.fork, spec, run_id=run_id)).run_id
        return await self._making.create(spec, run_id)

    async def events(self, run_id: str, after: str = "0-0") -> AsyncIterator[RunEvent]:
        """Events behind an id up to RunEnded inclusive; close it with `aclosing`. Raises RunNotFound at the
        first step. A run of which the bus has lost events ends in Failed (`run_lost` or `gap`).
        """
        run = await self.adopt(run_id)
        if run is not None:
            run.num_followers += 1
        try:
            async with contextlib.aclosing(read_events(self._bus, run_id, after)) as events:
                async for event in events:
                    yield event
        finally:
            if run is not None:
                run.num_followers -= 1
                run.since = time.monotonic()

    async def state(self, run_id: str) -> RunState:
        """The fold over its events; of a run whose events have expired, what its result tells. Raises
        RunNotFound.
        """
        run = self._driver.live(run_id)
        if run is not None:
            return await read_newest(self._bus, run_id, run.state)
        state: RunState | None = await read_state(self._bus, run_id)
        if state == NOTHING:
            state = await self.keeper.state_of(run_id)
        if state is None or state.accepted is None:
            raise RunNotFound(run_id)
        return state

    # What becomes of a run.

    async def cancel(
        self,
        run_id: str,
        mode: CancelMode = "now",
        *,
        tree: bool = False,
        keep_partial: bool = True,
        command: str = "",
        seconds: float = 0.0,
    ) -> Cancelled:
        """Ends a run, and with `tree` all that descend from it. Returns when that is on its way, or after its
        end if that comes within so many seconds; while the bus is lost, at once: it is sent when it returns.
        """
        wish = CancelRun(command=command, mode=mode, keep_partial=keep_partial)
        num_runs = 1
        if tree:
            root, cancel_one = await self.state(run_id), lambda name: self._cancel(name, wish)
            below = await self._cancelling.below(run_id, root, cancel_one)
            num_runs = below + (root.phase is not Phase.ENDED)
        return replace(await self._cancel(run_id, wish, seconds), num_runs=num_runs)

    async def _cancel(self, run_id: str, wish: CancelRun, seconds: float = 0.0) -> Cancelled:
        run = self._driver.runs.get(run_id)
        is_plain = wish.mode == "now" and wish.keep_partial
        if run is not None and is_plain and not (run.is_ours and run.state.spec.is_detached):
            run.cancel_requested, run.since = True, time.monotonic()
            if run.is_ours:  # it ends with this gateway: nobody else need know
                await asyncio.wait({self._driver.spawn(run, self._driver.nudge(run))}, timeout=2.0)
                return Cancelled(run.state.status, wish.mode)
        return await self._verbs.cancel(run_id, wish, seconds)

    async def pause(self, run_id: str, hold_seconds: float | None = None, *, command: str = "") -> Paused:
        """Stops it at the next border."""
        return await self._verbs.pause(run_id, hold_seconds, command)

    async def resume(self, run_id: str, *, command: str = "") -> Resumed:
        """Goes on with a paused run."""
        return await self._verbs.resume(run_id, command)

    async def steer(self, run_id: str, text: str, when: When = "now", *, command: str = "") -> Steered:
        """Puts a text before the model as the user's."""
        return await self._verbs.steer(run_id, text, when, command)

    async def respond(
        self, run_id: str, outputs: Sequence[ToolOutput] = (), text: str = "", *, command: str = ""
    ) -> Responded:
        """Gives a run in input_required what it waits for."""
        return await self._verbs.respond(run_id, outputs, text, command)

    async def fork(self, at: ForkPoint, spec: RunSpec, *, run_id: str = "", command: str = "") -> Forked:
        """A child of the run `at.run`; `spec.body` holds the messages that go on behind the parent's."""
        self._check_open()
        return await self._verbs.fork(at, spec, run_id, command)

    async def heartbeat(self, run_id: str) -> Alive:
        """The caller is still there."""
        return await self._verbs.heartbeat(run_id)

    def outlook(self, run_id: str, state: RunState) -> Outlook:
        """When the run's answer may begin, and its place in line, as far as this gateway has it in hand. What
        is expected of the newest state is nothing to tell of one before it.
        """
        run = self._driver.runs.get(run_id)
        if run is not None and id_pair(state.last_id) < id_pair(run.state.last_id):
            return NO_OUTLOOK
        left_tokens = None if state.worker is None else state.prompt_tokens - state.processed_tokens
        return self._places.outlook(run_id, left_tokens)

    @property
    def num_waiting(self) -> int:
        """Runs in this gateway's lines."""
        return self._places.num_waiting

    @property
    def num_live(self) -> int:
        """Runs that this gateway follows."""
        return len(self._driver.runs)

    async def cancel_agents(self, root: CancelAgents, agents: Container[str]) -> int:
        """Ends the runs of `root` and of its descendants, of which this gateway knows `agents`, and tells all
        living engines to do the same. How many runs were told. Safe to repeat.
        """
        return await self._cancelling.agents(root, agents, self._places.living(), self.cancel)

    # For the caretaker and the recorder.

    def local(self) -> list[Run]:
        """The runs that this gateway follows."""
        return list(self._driver.runs.values())

    @property
    def driver(self) -> Driver:
        """What takes their steps."""
        return self._driver

    @property
    def making(self) -> Making:
        """What rebuilds runs of gateways that are gone."""
        return self._making

    def mine(self, run_id: str) -> Run | None:
        """The run, if this gateway takes its steps."""
        run = self._driver.runs.get(run_id)
        return run if run is not None and run.is_ours else None

    def look(self, run: Run) -> None:
        """Reads its commands and obeys, beside the caller."""
        self._driver.spawn(run, self._look(run))

    def listen(self) -> None:
        """From here on other gateways can tell this one of commands."""
        self._tasks.spawn(repeat(self._listen, seconds=0.5, where="listen"))

    def engines_for(self, order: Order) -> list[EngineView]:
        """Living, ready engines that could take the order, the least busy first."""
        return sorted(self._places.others(order), key=lambda engine: engine.stats.num_running)

    def timeout_seconds(self, flow_class: FlowClass) -> float:
        """How long a turn of the class may wait in line."""
        return self._places.timeout_seconds(flow_class)

    async def orphan(self, run: Run) -> None:
        """Does to a run whose caller is not heard any more what its spec says."""
        command = f"orphan-{run.state.last_id}"
        match run.state.spec.orphan:
            case "cancel":
                await self._recorder.record(run.run_id, CancelRun(command=command))
            case "pause":
                await self._recorder.record(run.run_id, PauseRun(command=command))

    async def adopt(self, run_id: str) -> Run | None:
        """Follows another gateway's run (or finds our own); None when it has ended. Raises RunNotFound."""
        if self._driver.live(run_id) is None:
            state, transcript = await read_whole(self._bus, run_id)
            if state == NOTHING:
                raise RunNotFound(run_id)
            if state.phase is Phase.ENDED:
                return None
            if run_id not in self._driver.runs:
                self._driver.follow(Run(run_id, state, order=None, transcript=transcript))
        return self._driver.runs.get(run_id)

    async def clear(self, run_id: str) -> None:
        """An ended run leaves the list of live ones."""
        await self._driver.clear(run_id)

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more runs, gives the open ones a moment, then ends its calls with an error. Detached runs
        go on at the next gateway that looks.
        """
        self._stopping = True
        await end_calls(self._driver, grace_seconds)
        await self._tasks.end()

    # Inside.

    def _check_open(self) -> None:
        if self._stopping:
            raise NoEngine("The server is stopping. Send the call again in a few seconds.")
        if not self._bus.available:
            raise BusLost

    async def _accept(self, run_id: str, order: Order, spec: RunSpec) -> Run | None:
        """Claims the run id: the stream exists from here on. None: it does already."""
        kept = spec if spec.is_detached else msgspec.structs.replace(spec, body=b"")
        now = time.time()
        accepted = Accepted(
            model=order.engine.info.model_id,
            engine_id=order.engine.info.engine_id,
            created=int(now),
            at=now,
            prompt_tokens=order.prompt_tokens,
            gateway=self._bus.gateway_id,
            request=msgspec.Raw(order.request),
            spec=encode_spec(kept),
            system_tokens=order.system_tokens,
            turn_tokens=order.turn_tokens,
        )
        run = Run(run_id, RunState(), order)
        run.advance(event_id(0, 1), accepted)
        await self._bus.answered(self._bus.commands.sadd(RUNS_LIVE_KEY, run_id))
        if not await self._bus.append(run.key, run.state.last_id, encode(accepted), create=True):
            return None
        await self.keeper.name_tree(run)
        if spec.heartbeat_ms is not None:
            await self.keeper.beat(run_id, spec.heartbeat_ms)
        self.keeper.tell(run, RunEvent(run.state.last_id, accepted))
        self._driver.spawn(run, self._list(run))
        return run

    async def _list(self, run: Run) -> None:
        with contextlib.suppress(BusLost):  # then lists lack it, and nothing else
            await self.keeper.accepted(run)
            await self.keeper.flush(run)

    async def _look(self, run: Run) -> None:
        with contextlib.suppress(BusLost, StreamGone):  # the caretaker looks again
            await self._driver.look(run)

    async def _listen(self) -> None:
        with contextlib.suppress(BusLost):
            await self._recorder.listen(self._on_command)

    async def _on_command(self, run_id: str) -> None:
        run = self.mine(run_id)
        if run is not None:
            self.look(run)
