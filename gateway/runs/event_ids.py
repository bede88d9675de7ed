"""Stream ids `<attempt>-<sequence>` as numbers: which is later, and is one missing between two. Pure."""

from __future__ import annotations

from workers.messages import RUN_END_ID


def id_pair(entry_id: str) -> tuple[int, int]:
    """Attempt and sequence, for comparing."""
    attempt, _, sequence = entry_id.partition("-")
    return int(attempt), int(sequence)


class StreamGap(Exception):
    """Two entries were read one after the other between which the bus has lost some."""

    def __init__(self, after: str, before: str) -> None:
        super().__init__(
            f"The message bus lost the events between {after} and {before} of this run. Send the call again."
        )
        self.after = after
        self.before = before


def follows(before: str, entry_id: str) -> bool:
    """Whether an entry read after `before` ("0-0": the first) is the next: no hole within an attempt.

    A run's end follows anything. So does a new attempt, which may cut off an older one anywhere.
    """
    if entry_id == RUN_END_ID:
        return True
    last_attempt, last_sequence = id_pair(before)
    attempt, sequence = id_pair(entry_id)
    return sequence == (last_sequence + 1 if attempt == last_attempt else 1)
