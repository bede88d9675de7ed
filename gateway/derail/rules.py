"""From where on the gateway says that a run has gone astray, and what it then does. Settings only."""

from __future__ import annotations

import msgspec

NOTE = (
    "You have made the same tool calls again and again, with the same results. They will not change: try "
    "another way, or say what you are missing."
)

MAX_HISTORY = 64
"""Tool calls that are looked back."""


class DerailRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits come in twos: of a warning, and of what is critical and ends a run that nobody watches.

    warn_calls: the same tool with the same arguments and result so many times, or a cycle of such calls.
    critical_calls: so many times are critical.
    max_call_cycle: longest cycle of tool calls that is looked for.
    pollers: names of tools, comma-separated, that may be called again and again; * stands for anything.
    chunk_chars: characters of the pieces of text whose return is counted.
    warn_chunks: a piece stands so many times in an answer, and most of what is between has been said before.
    critical_chunks: so many times are critical.
    chunk_distance: characters from one time to the next, at most.
    stall_seconds: a turn on a worker gets no token for so long though its engine computes; four times that
    is critical.
    unattended: sessions, comma-separated, that nobody watches; * stands for anything.
    note: what the model of a run reads next to the results of calls that it repeats; empty: nothing.
    """

    warn_calls: int = 3
    critical_calls: int = 5
    max_call_cycle: int = 4
    pollers: tuple[str, ...] = ("wait", "wait_*", "*__wait", "*_wait", "*_poll", "*_get_result")
    chunk_chars: int = 50
    warn_chunks: int = 10
    critical_chunks: int = 20
    chunk_distance: int = 1000
    stall_seconds: float = 30.0
    unattended: tuple[str, ...] = ()
    note: str = NOTE

    def __post_init__(self) -> None:
        """Raises ValueError that names the field, its value and the remedy."""
        for name, least in (
            ("warn_calls", 2),
            ("critical_calls", self.warn_calls),
            ("max_call_cycle", 1),
            ("chunk_chars", 10),
            ("warn_chunks", 3),
            ("critical_chunks", self.warn_chunks),
            ("chunk_distance", self.chunk_chars),
            ("stall_seconds", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}: use {least} or more")
        if self.critical_calls * self.max_call_cycle > MAX_HISTORY:
            raise ValueError(
                f"critical_calls is {self.critical_calls} and max_call_cycle {self.max_call_cycle}: "
                f"{MAX_HISTORY} calls are looked back, so choose a product of that or less"
            )
