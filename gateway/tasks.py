"""Work that goes on behind the calls: tasks kept until they end, loops that outlive any one fault.

Owns the border at which an unforeseen exception is logged and stops. Knows no run and no bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any

import structlog

TELL_SECONDS = 60.0
FAULT_SECONDS = 0.5
"""Least pause of a loop after a fault."""

log = structlog.get_logger(__name__)


class Tasks:
    """Tasks of one part, kept until they end. A fault that one raises is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(
        self, work: Coroutine[Any, Any, None], about: contextlib.AbstractContextManager[None] | None = None
    ) -> asyncio.Task[None]:
        """Runs beside its starter. What it logs is `about` something of its own, not about its starter's."""

        def create() -> asyncio.Task[None]:
            with about or contextlib.nullcontext():
                task = asyncio.create_task(work)
                task.add_done_callback(self._note_end, context=contextvars.copy_context())
            return task

        task = contextvars.Context().run(create)
        self._tasks.add(task)
        return task

    async def finish(self) -> None:
        """Waits for the ends that they come to by themselves."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def end(self) -> None:
        """Cancels all and waits for their ends."""
        await end_tasks(self._tasks)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task_failed", **kind_and_place(error))


class Border:
    """`with border:` stops an unforeseen exception; what follows goes on. Each is logged once a minute."""

    def __init__(self, where: str) -> None:
        self.is_faulty = False
        """Whether what was inside last was stopped."""
        self._where = where
        self._told: dict[str, float] = {}  # monotonic seconds, by place and type

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_faulty = isinstance(error, Exception)  # others are a cancel, or the process's end
        if error is not None and self.is_faulty:
            self._tell(kind_and_place(error))
        return self.is_faulty

    def _tell(self, fault: dict[str, Any]) -> None:
        now, name = time.monotonic(), str(fault)
        if now - self._told.get(name, -TELL_SECONDS) >= TELL_SECONDS:
            self._told[name] = now
            log.error("fault", where=self._where, **fault)


async def repeat(step: Callable[[], Awaitable[None]], *, seconds: float, where: str) -> None:
    """Pauses and calls `step`, for ever, whatever it raises."""
    border = Border(where)
    while True:
        await asyncio.sleep(max(seconds, FAULT_SECONDS) if border.is_faulty else seconds)
        with border:
            await step()


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels tasks and waits for their ends. Repeated, because redis loses a cancel while it connects."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)


def kind_and_place(error: BaseException) -> dict[str, Any]:
    """For logs: an exception's type and place, never its text, which may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = [f"{frame.filename.rsplit('/', 2)[-1]}:{frame.lineno}:{frame.name}" for frame in frames]
    return {"exception": type(error).__name__, "frames": places}
