"""One run as a gateway follows it: its state, what was ordered, who reads it, and when it got how far.

Decides nothing: runs.py and caretaker.py do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from gateway.flow.places import Order
from metrics.logs import about_run
from workers.messages import Dispatched, Started, Tokens, run_events_key

from .events import AnyEvent
from .state import RunState, advance


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One entry of a run's stream. `id` (`<attempt>-<sequence>`) is what a client resumes from."""

    id: str
    event: AnyEvent


@dataclass(slots=True)
class Run:
    """One live run that this gateway follows; for this room's caretaker, not for the HTTP side."""

    run_id: str
    state: RunState
    order: Order | None  # None: started by another gateway
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one writer of dispatches and verdicts
    task: asyncio.Task[None] | None = None
    num_followers: int = 0
    is_released: bool = False  # on its way from the line to an engine
    num_resent: int = 0  # attempts after an engine was lost
    cancel_requested: bool = False
    cancelled_attempt: int | None = None  # the attempt whose engine was sent a Cancel
    since: float = field(default_factory=time.monotonic)  # adopted, left by its last follower, or cancelled
    lost_since: float | None = None  # no engine can be expected to end it, or to take it
    asked_at: float = field(default_factory=time.monotonic)
    worker_at: float | None = None  # when the attempt got its worker, as seen here
    token_at: float | None = None  # when its first token came

    @property
    def key(self) -> str:
        """Its stream."""
        return run_events_key(self.run_id)

    @property
    def queue_seconds(self) -> float | None:
        """From the call to its worker; None: it has none, or the call came to another gateway."""
        return self._seconds_to(self.worker_at)

    @property
    def first_token_seconds(self) -> float | None:
        """From the call to its first token; None: there is none, or the call came to another gateway."""
        return self._seconds_to(self.token_at)

    def advance(self, entry_id: str, event: AnyEvent) -> None:
        """One more event of its stream."""
        self.state = advance(self.state, entry_id, event)
        match event:
            case Dispatched():
                self.worker_at = None
            case Started():
                self.worker_at = time.monotonic()
            case Tokens() if self.token_at is None:
                self.token_at = time.monotonic()

    def in_logs(self) -> contextlib.AbstractContextManager[None]:
        """Lines inside are about this run."""
        return about_run(self.run_id, self.order.names.session if self.order is not None else "")

    def _seconds_to(self, moment: float | None) -> float | None:
        return None if moment is None or self.order is None else moment - self.asked_at
