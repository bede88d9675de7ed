"""A gateway whose event loop is watched from inside: how late it is, and which piece of work held it longest.

`python -m bench.loop_probe DESCRIPTOR gateway FLAGS`: a line sent to the socket DESCRIPTOR is answered with
what was seen since the line before, as JSON. loop_stall.py uses it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import time
from asyncio import events
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from gateway.__main__ import main

BEAT_SECONDS = 0.001
LOOK_SECONDS = 0.003


@dataclass(slots=True)
class Seen:
    """Since the last question, in seconds. `lag`: how late a timer was at most; `held`: by one callback."""

    lag: float = 0.0
    held: float = 0.0
    held_cpu: float = 0.0  # processor's time of the callback that used most
    collected: float = 0.0  # by one run of the garbage collector, in whichever thread: all others wait
    place: str = ""  # where a callback was when it had held the loop long; with the looker only


class Probe:
    """Watches the loop that runs in this thread."""

    def __init__(self, *, looks: bool) -> None:
        self.seen = Seen()
        self._began = 0.0  # of the callback that runs; 0: none does
        self._collects_since = 0.0
        self._thread = threading.get_ident()
        self._places: dict[str, int] = {}
        if looks:
            threading.Thread(target=self._look, daemon=True).start()

    def install(self) -> None:
        """Times each callback of every loop of this thread, and starts the beat with the loop."""
        plain, probe = events.Handle._run, self
        is_beating = False

        def timed(handle: events.Handle) -> None:
            nonlocal is_beating
            if not is_beating:
                is_beating = True
                probe._beat(asyncio.get_running_loop(), time.monotonic())
            began, cpu = time.perf_counter(), time.thread_time()
            probe._began = began
            plain(handle)
            probe._began = 0.0
            seen = probe.seen
            seen.held = max(seen.held, time.perf_counter() - began)
            seen.held_cpu = max(seen.held_cpu, time.thread_time() - cpu)

        gc.callbacks.append(self._on_collection)
        events.Handle._run = timed  # type: ignore[method-assign, assignment]

    def answer(self, control: socket.socket) -> None:
        """Answers questions for ever."""
        with control.makefile("rw") as lines:
            for _ in lines:
                seen, self.seen = self.seen, Seen()
                seen.place = "; ".join(sorted(self._places, key=lambda at: -self._places[at])[:3])
                self._places.clear()
                lines.write(json.dumps(asdict(seen)) + "\n")
                lines.flush()

    def _beat(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = time.monotonic()
        self.seen.lag = max(self.seen.lag, now - due)
        loop.call_at(now + BEAT_SECONDS, self._beat, loop, now + BEAT_SECONDS)

    def _on_collection(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._collects_since = time.perf_counter()
        else:
            self.seen.collected = max(self.seen.collected, time.perf_counter() - self._collects_since)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            began = self._began
            if began and time.perf_counter() - began > 2 * LOOK_SECONDS:
                frame = sys._current_frames().get(self._thread)
                place = _place(frame)
                self._places[place] = self._places.get(place, 0) + 1


def _place(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None and len(names) < 6:
        name = frame.f_code.co_filename.rsplit("/", 1)[-1]
        names.append(f"{name}:{frame.f_lineno}:{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


def ask(control: socket.socket) -> Seen:
    """What the probe behind a socket has seen since it was asked last."""
    control.sendall(b"\n")
    told = b""
    while not told.endswith(b"\n"):
        told += control.recv(65_536)
    fields: dict[str, Any] = json.loads(told)
    return Seen(**fields)


if __name__ == "__main__":
    descriptor, *arguments = sys.argv[1:]
    probe = Probe(looks="--where" in arguments)
    probe.install()
    control = socket.socket(fileno=int(descriptor))
    threading.Thread(target=probe.answer, args=[control], daemon=True).start()
    sys.exit(main([argument for argument in arguments if argument != "--where"]))
