"""The end of a gateway that stops: its calls get a moment, then an error; runs go on at the next gateway.

Writes through the driver only.
"""

from __future__ import annotations

import asyncio
import contextlib

from gateway.bus import BusLost

from .driver import Driver
from .run import Run

MESSAGE = "The server is stopping. Send the call again when it is back."


async def end_calls(driver: Driver, grace_seconds: float) -> None:
    """Waits so long for the calls of this gateway to end by themselves, then ends them. After that the driver
    sends nothing more.
    """
    await _wait_for_ends(driver, grace_seconds)
    with contextlib.suppress(TimeoutError):  # the bus may be away
        async with asyncio.timeout(2.0):
            await asyncio.gather(*(_end(driver, run) for run in _calls(driver)))
    await _wait_for_ends(driver, 1.0)
    driver.is_closed = True


def _calls(driver: Driver) -> list[Run]:
    mine = [run for run in driver.runs.values() if run.order is not None and run.state.accepted is not None]
    return [run for run in mine if not run.state.spec.is_detached]


async def _end(driver: Driver, run: Run) -> None:
    state = run.state
    with run.in_logs():
        await driver.fail(run, "server_stopping", MESSAGE)
    if state.is_on_engine:
        with contextlib.suppress(BusLost):  # after the verdict, or its end comes first
            await driver.tell_engine(run, state, "cancel")


async def _wait_for_ends(driver: Driver, seconds: float) -> None:
    if tasks := [run.task for run in _calls(driver) if run.task is not None]:
        await asyncio.wait(tasks, timeout=seconds)
