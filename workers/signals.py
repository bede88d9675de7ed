"""Why a process should stop: a signal, or a supervisor that is gone. Knows nothing of what it stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import structlog

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger(__name__)


class StopWatch:
    """Before `arm` a signal ends the process by SystemExit(0) in the main thread, where it must be made.

    Signals reach the watching thread through a pipe that the interpreter's C code writes to: neither a long
    call in the main thread nor a lock that it holds can keep them from being seen.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._patience_seconds = 0.0
        self._finished = threading.Event()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._await_signal, name="signals", daemon=True).start()

    def watch_supervisor(self, descriptor: int) -> None:
        """Stops when the other end of this inherited pipe closes."""
        threading.Thread(target=self._await_end, args=(descriptor,), name="supervisor", daemon=True).start()

    def arm(self, stop: Callable[[], None], *, patience_seconds: float) -> None:
        """From now on a signal calls `stop`, in a thread; what is not `finished` in time is cut off."""
        self._patience_seconds = patience_seconds
        self._stop = stop

    def finished(self) -> None:
        """The stop is done; nobody is hurried any more."""
        self._finished.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop is None:
            raise SystemExit(0)
        os.write(self._write_end, b"\0")  # the C code's byte may have been read before `arm`

    def _await_signal(self) -> None:
        os.read(self._read_end, 1)
        while self._stop is None:
            os.read(self._read_end, 1)
        log.info("stopping")
        self._stop()
        if not self._finished.wait(self._patience_seconds):
            log.error("a step does not end; leaving without it")
            os._exit(1)

    def _await_end(self, descriptor: int) -> None:
        try:
            while os.read(descriptor, 64):
                pass
        except OSError as error:
            log.warning("the supervisor's pipe cannot be read", error=str(error))
        log.info("the supervisor is gone")
        os.kill(os.getpid(), signal.SIGTERM)
