"""The process that looks after the embedded Valkey server, which cannot watch a supervisor itself.

Ends it when asked to, or when the supervisor is gone; ends itself when the server has.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from .paths import Home
from .valkey import EmbeddedValkey

LOOK_SECONDS = 0.5


def guard_bus(home: Home, memory_bytes: int, supervisor: int | None, say: Callable[[str], None]) -> int:
    """0 after a stop that was asked for, 1 when the server ended by itself. Raises BusError."""
    reader, writer = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(writer, b"."))
    server = EmbeddedValkey(home, memory_bytes)
    server.start()
    if server.moved_aside is not None:
        say(f"the bus could not read its data; it starts empty, the old data is in {server.moved_aside}")
    watched = [reader] if supervisor is None else [reader, supervisor]
    try:
        while server.is_alive():
            if select.select(watched, [], [], LOOK_SECONDS)[0]:  # a signal, or the supervisor's end
                return 0
        say("the bus stopped by itself")
        return 1
    finally:
        server.stop()
