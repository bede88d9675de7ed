"""How long and how often the client tries again. Pure: clock and chance come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .errors import Refused, TetrarchError


@dataclass(frozen=True, slots=True)
class Patience:
    """`seconds` without any success before the client gives up; a gateway's restart takes few."""

    seconds: float = 120.0
    first_seconds: float = 0.1  # between the first two tries; then twice as long each time
    most_seconds: float = 5.0


class Tries:
    """The tries of one call, or of one stream since it last heard something."""

    def __init__(self, patience: Patience, clock: Callable[[], float], draw: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock  # monotonic seconds
        self._draw = draw  # a number from 0 to 1
        self.succeeded()

    def succeeded(self) -> None:
        """Begins anew."""
        self._since = self._clock()
        self._failures = 0

    def delay(self, error: TetrarchError | None) -> float | None:
        """Seconds until the next try; None: give up.

        The server's Retry-After is kept to, and up to a quarter more: many that wait must not come at once.
        """
        if isinstance(error, Refused) and not error.is_retryable:
            return None
        longest = min(
            self._patience.most_seconds, self._patience.first_seconds * 2 ** min(self._failures, 30)
        )
        self._failures += 1
        seconds = longest * (0.5 + self._draw() / 2)
        if isinstance(error, Refused) and error.retry_after is not None:
            seconds = error.retry_after * (1 + self._draw() / 4)
        is_over = self._clock() + seconds - self._since > self._patience.seconds
        return None if is_over else seconds
