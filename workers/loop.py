"""The engine thread: takes messages, runs steps, sends events, until it is told to stop.

Owns the order of things at a step border. Knows neither MLX nor redis.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import structlog

from metrics.logs import about_run

from .bus import Bus
from .counters import EngineCounts
from .messages import (
    Cancel,
    CancelAgents,
    EngineInfo,
    EngineStats,
    Failed,
    Note,
    Pause,
    Submit,
    ToEngine,
    TokenizerBundle,
)
from .turn import TurnEvent

IDLE_CHECK_SECONDS = 2.0
"""An engine that had nothing to do for so long checks its own accounts, once."""

STUCK_FACTOR = 10.0
STUCK_FLOOR_SECONDS = 5.0
STUCK_UNPREDICTED_SECONDS = 60.0
"""A first step has nothing to be predicted from, and may compile kernels."""

log = structlog.get_logger(__name__)


class StepEngine(Protocol):
    """What the loop needs of workers.engine.Engine."""

    step_started_at: float | None
    step_predicted_seconds: float | None

    @property
    def has_work(self) -> bool: ...
    @property
    def rest_seconds(self) -> float: ...
    @property
    def idle_seconds(self) -> float | None: ...
    def submit(self, submit: Submit) -> None: ...
    def cancel(self, cancel: Cancel) -> None: ...
    def pause(self, pause: Pause) -> None: ...
    def cancel_agents(self, cancel: CancelAgents) -> None: ...
    def note(self, note: Note) -> None: ...
    def step(self) -> list[TurnEvent]: ...
    def rest(self) -> None: ...
    def abandon(self) -> None: ...
    def check_integrity(self) -> None: ...
    def stats(self) -> EngineCounts: ...


@dataclass(frozen=True, slots=True)
class Memory:
    """What the model library holds, in bytes."""

    active_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded engine, ready to be put on a bus. `memory` is called on the engine thread."""

    engine: StepEngine
    info: EngineInfo
    bundle: TokenizerBundle
    memory: Callable[[], Memory] = Memory


class EngineLoop:
    """`run` belongs to the thread that loaded the model; `stop` may be called from any."""

    def __init__(self, parts: Parts, url: str) -> None:
        self._engine = parts.engine
        self._memory = parts.memory
        self._stopping = threading.Event()
        self._is_checked = False  # since the last turn
        self._counts = parts.engine.stats()
        self._memory_now = parts.memory()
        self._bus = Bus(url, parts.info, parts.bundle, self._stats)

    def run(self) -> None:
        """Serves until `stop`. Raises BusError at the start, and whatever a broken engine raises."""
        self._bus.begin()
        try:
            while not self._stopping.is_set():
                if self._bus.is_lost:
                    self._begin_again()
                else:
                    self._turn_round()
            reason = "the engine is stopping: send the call again"
            self._bus.fail_open_turns("engine_stopping", reason)
        except BaseException:
            self._bus.fail_open_turns("engine_failed", "the engine broke and restarts: send the call again")
            raise
        finally:
            self._bus.close()

    def stop(self) -> None:
        """Ends `run` at the next step border; running turns end with a retryable error."""
        self._stopping.set()
        self._bus.stop()

    def _turn_round(self) -> None:
        for message in self._bus.receive(self._patience()):
            self._take(message)
        if self._stopping.is_set() or self._bus.is_lost:
            return
        if self._engine.has_work:
            self._is_checked = False
            self._bus.wait_for_room()
            events = self._engine.step()
            self._bus.send(events)
            _log_failures(events)
        else:
            self._engine.rest()
            if not self._is_checked:
                self._engine.check_integrity()
                self._is_checked = True
        self._counts, self._memory_now = self._engine.stats(), self._memory()

    def _patience(self) -> float | None:
        if self._engine.has_work:
            return self._engine.rest_seconds
        if not self._is_checked:
            return IDLE_CHECK_SECONDS
        return self._engine.idle_seconds

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, CancelAgents):
            log.debug("taken", kind="cancelagents", session=message.session, agent=message.agent)
            self._engine.cancel_agents(message)
            return
        session = message.agent if isinstance(message, Submit) else ""
        with about_run(message.run_id, session):
            log.debug("taken", kind=type(message).__name__.lower(), attempt=message.attempt)
            if isinstance(message, Submit):
                self._engine.submit(message)
            elif isinstance(message, Cancel):
                self._engine.cancel(message)
            elif isinstance(message, Note):
                self._engine.note(message)
            else:
                self._engine.pause(message)

    def _begin_again(self) -> None:
        self._engine.abandon()
        self._counts = self._engine.stats()
        self._bus.begin_again()

    def _stats(self, incarnation: int) -> EngineStats:
        """On the lease's thread."""
        age = _age(self._engine.step_started_at)
        reason = self._why_not_ready(age)
        return EngineStats(
            incarnation=incarnation,
            ready=not reason,
            reason=reason,
            step_age_seconds=age,
            active_memory_bytes=self._memory_now.active_bytes,
            peak_memory_bytes=self._memory_now.peak_bytes,
            **asdict(self._counts),
        )

    def _why_not_ready(self, age: float) -> str:
        if self._stopping.is_set():
            return "stopping"
        return why_stuck(age, self._engine.step_predicted_seconds)


def _log_failures(events: list[TurnEvent]) -> None:
    for told in events:
        if isinstance(told.event, Failed):
            with about_run(told.run_id):
                log.info("turn failed", error=told.event.error, problem=told.event.message)


def why_stuck(age_seconds: float, predicted_seconds: float | None) -> str:
    """Why an engine with such a step in flight is not ready; empty: it is."""
    if predicted_seconds is None:
        limit, expected = STUCK_UNPREDICTED_SECONDS, "unknown"
    else:
        limit = max(STUCK_FLOOR_SECONDS, STUCK_FACTOR * predicted_seconds)
        expected = f"{predicted_seconds:.2f} s"
    return f"a step runs for {age_seconds:.0f} s, expected {expected}" if age_seconds > limit else ""


def _age(started_at: float | None) -> float:
    return 0.0 if started_at is None else max(0.0, time.monotonic() - started_at)
