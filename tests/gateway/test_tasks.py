"""Borders: an unforeseen exception is logged by type and place, and what depends on the loop goes on."""

from __future__ import annotations

import asyncio

import pytest

from gateway.tasks import Border, Tasks, repeat
from tests.conftest import Logged

from .fake_engine import until


async def test_a_task_that_fails_is_told_without_its_text(logged: Logged) -> None:
    async def fail() -> None:
        raise ValueError("SECRET")

    tasks = Tasks()
    await asyncio.wait({tasks.spawn(fail())})
    await asyncio.sleep(0)
    (line,) = logged.lines("task_failed")
    assert line["exception"] == "ValueError"
    assert "SECRET" not in str(line)


async def test_a_loop_goes_on_after_a_fault_and_tells_it_once(logged: Logged) -> None:
    calls: list[int] = []

    async def step() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise KeyError("SECRET")

    tasks = Tasks()
    tasks.spawn(repeat(step, seconds=0.01, where="here"))
    await until(lambda: len(calls) > 4)
    await tasks.end()
    (line,) = logged.lines("fault")
    assert (line["where"], line["exception"]) == ("here", "KeyError")


async def test_a_border_lets_a_cancel_pass() -> None:
    with pytest.raises(asyncio.CancelledError), Border("here"):
        raise asyncio.CancelledError
