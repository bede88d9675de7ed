"""The threads beside the engine's: none dies in silence. Knows nothing of what they do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


def watched_thread(name: str, body: Callable[[], None], on_broken: Callable[[str], None]) -> threading.Thread:
    """A daemon thread, not started yet. What leaves `body` is logged, then `on_broken` hears the name."""

    def run() -> None:
        try:
            body()
        except Exception:  # the border of one thread: the engine ends and is started again
            log.exception("a thread broke", thread=name)
            on_broken(name)

    return threading.Thread(target=run, name=name, daemon=True)
