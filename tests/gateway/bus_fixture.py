"""A gateway's bus over the tests' real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.bus import Bus


@asynccontextmanager
async def connected(url: str, name: str = "g1") -> AsyncIterator[Bus]:
    """A started bus, stopped at the end."""
    bus = Bus(url, name)
    await bus.start()
    try:
        yield bus
    finally:
        await bus.stop()


class Clock:
    """A time that the test sets, in seconds."""

    def __init__(self, now: float = 1_000_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
