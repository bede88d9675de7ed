"""Runs without a bus or an engine: they play a script of events, and remember what was asked of them."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.errors import NoEngine, Overloaded, RunNotFound, UnknownModel
from gateway.flow.classes import NORMAL, FlowHints
from gateway.flow.directory import Directory, EngineView
from gateway.flow.places import Reservation
from gateway.runs import outcomes
from gateway.runs.commands import CancelMode
from gateway.runs.runs import Order, Run, RunEvent, Runs
from gateway.runs.spec import RunSpec
from gateway.runs.state import RunState, advance
from gateway.runs.talk import Conversation
from workers.messages import (
    RUN_END_ID,
    Accepted,
    CancelAgents,
    Cancelled,
    Dispatched,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Finished,
    KVFacts,
    RunEnded,
    Started,
    Timings,
    TokenizerBundle,
    Tokens,
    Usage,
)

Script = Callable[[Order], Sequence[Event | float]]


def words(*texts: str, reason: str = "stop") -> Script:
    """Each text as one Tokens event, then the end. A script's floats are pauses in seconds."""

    def play(order: Order) -> list[Event | float]:
        num_prompt = len(order.token_ids) // 4
        usage = Usage(prompt_tokens=num_prompt, cached_tokens=num_prompt // 2, completion_tokens=len(texts))
        tokens = [Tokens(token_ids=array("I", [300]).tobytes(), text=text) for text in texts]
        return [*tokens, Finished(reason=reason, usage=usage, timings=Timings())]

    return play


@dataclass
class FakeRun:
    order: Order
    events: list[RunEvent]
    more: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: bool = False

    def add(self, event: Event, event_id: str | None = None) -> None:
        entry_id = event_id or f"1-{len(self.events)}"
        self.events.append(RunEvent(entry_id, event))
        self.more.set()
        self.more = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return isinstance(self.events[-1].event, RunEnded)


class FakeRuns(Runs):
    """Plays `script` for each order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.runs: dict[str, FakeRun] = {}
        self.cancelled: list[str] = []
        self.cancelled_agents: list[tuple[CancelAgents, Container[str]]] = []
        self.refuse: Exception | None = None
        self.start_seconds = 0.0
        self.read_seconds = 0.0  # before a reader sees the first event
        self.is_full = False
        self.num_reserved = 0
        self.num_starting = 0
        self.on_take_over: list[Callable[[Run], None]] = []
        self._players: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        return 0

    @property
    def num_live(self) -> int:
        return sum(not run.is_over for run in self.runs.values())

    @property
    def last(self) -> FakeRun:
        return [*self.runs.values()][-1]

    def reserve(self, engine: EngineView, flow: FlowHints = NORMAL) -> Reservation:
        if self.is_full:
            raise Overloaded(3)
        self.num_reserved += 1

        def give_back() -> None:
            self.num_reserved -= 1

        return Reservation(give_back)

    async def start(
        self,
        order: Order,
        place: Reservation | None = None,
        spec: RunSpec | None = None,
        conversation: Conversation | None = None,
    ) -> str:
        self.num_starting += 1
        await asyncio.sleep(self.start_seconds)
        if self.refuse is not None:
            raise self.refuse
        run_id = f"run-{uuid.uuid4().hex}"
        info = order.engine.info
        accepted = Accepted(
            model=info.model_id,
            engine_id=info.engine_id,
            created=int(time.time()),
            prompt_tokens=len(order.token_ids) // 4,
            request=msgspec.Raw(order.request),
        )
        self.runs[run_id] = FakeRun(order, [RunEvent("0-1", accepted)])
        player = asyncio.create_task(self._play(self.runs[run_id]))
        self._players.add(player)
        player.add_done_callback(self._players.discard)
        return run_id

    async def events(self, run_id: str, after: str = "0-0") -> AsyncIterator[RunEvent]:
        if run_id not in self.runs:
            raise RunNotFound(run_id)
        run = self.runs[run_id]
        await asyncio.sleep(self.read_seconds)
        position = 0
        while True:
            while position == len(run.events):
                await run.more.wait()
            yield run.events[position]
            if isinstance(run.events[position].event, RunEnded):
                return
            position += 1

    async def state(self, run_id: str) -> RunState:
        if run_id not in self.runs:
            raise RunNotFound(run_id)
        state = RunState()
        for entry in self.runs[run_id].events:
            state = advance(state, entry.id, entry.event)
        return state

    async def cancel(
        self,
        run_id: str,
        mode: CancelMode = "now",
        *,
        tree: bool = False,
        keep_partial: bool = True,
        command: str = "",
        seconds: float = 0.0,
    ) -> outcomes.Cancelled:
        run = self.runs[run_id]
        self.cancelled.append(run_id)
        if not run.is_over:
            run.is_cancelled = True
            run.add(Cancelled(usage=Usage(), timings=Timings()))
            run.add(RunEnded(state="cancelled"), RUN_END_ID)
        return outcomes.Cancelled("cancelled", mode)

    async def cancel_agents(self, root: CancelAgents, agents: Container[str]) -> int:
        self.cancelled_agents.append((root, agents))
        told = [run_id for run_id, run in self.runs.items() if not run.is_over]
        for run_id in told:
            await self.cancel(run_id)
        return len(told)

    async def close(self) -> None:
        for player in self._players:
            player.cancel()
        await asyncio.gather(*self._players, return_exceptions=True)

    async def _play(self, run: FakeRun) -> None:
        run.add(Dispatched(engine_id="e", incarnation=1))
        run.add(Started(worker=0, cached_tokens=1))
        for item in self.script(run.order):
            if isinstance(item, float):
                await asyncio.sleep(item)
            elif run.is_cancelled:
                return
            else:
                run.add(item)
        match run.events[-1].event:
            case Finished():
                run.add(RunEnded(state="completed"), RUN_END_ID)
            case Failed():
                run.add(RunEnded(state="failed"), RUN_END_ID)


class FakeDirectory(Directory):
    """A fixed list of engines."""

    def __init__(self, *views: EngineView) -> None:
        self.views = list(views)

    def engines(self) -> list[EngineView]:
        return self.views

    def find(self, model: str) -> EngineView:
        for view in self.views:
            if view.alive and view.info.model_id == model:
                return view
        if not self.views:
            raise NoEngine("No engine is running now.")
        raise UnknownModel(model, [view.info.model_id for view in self.views])


def engine_view(
    tokenizer: TokenizerBundle, *, context_length: int = 512, vocab_size: int = 600, **stats: Any
) -> EngineView:
    """A living engine with this tokenizer."""
    info = EngineInfo(
        engine_id="e",
        incarnation=1,
        model_id="tiny",
        digest="d",
        context_length=context_length,
        num_workers=4,
        vocab_size=vocab_size,
        kv=KVFacts(dtype="int8", bytes_per_token=12240.0, page_tokens=64, num_pages=128, pool_bytes=1 << 20),
        device="cpu",
        weights="float32",
        blas="openblas",
        created=1,
    )
    return EngineView(info, EngineStats(incarnation=1, **{"ready": True, **stats}), True, tokenizer)
