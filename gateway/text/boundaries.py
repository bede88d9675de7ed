"""Where a prompt's system part ends and where its generation prompt begins, in spans that tokens never cross.

Compares digests of spans; knows no template and no tokens. What it cannot tell exactly is not told: 0.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_FRAMES = 256
MAX_FRAME_SPANS = 4096
"""Of a longer system part nothing is told: a hostile one has as many spans as bytes."""

PROBE = "\U0001fffe"
"""A user's message that no real one begins with (a noncharacter): prompts part from it there."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What all prompts with the same system text, tools and variables have in common, as digests of spans."""

    head: tuple[bytes, ...] = ()  # of a prompt with the probe
    tail: tuple[bytes, ...] = ()  # the generation prompt; empty: there is none, or it shares a span

    @classmethod
    def of(cls, asked: Sequence[bytes], bare: Sequence[bytes]) -> Frame:
        """From the probe's prompt with and without a generation prompt."""
        if len(asked) > MAX_FRAME_SPANS:
            return cls()
        tail = asked[len(bare) :] if common_length(asked, bare) == len(bare) else ()
        return cls(tuple(asked), tuple(tail))

    def system_end(self, keys: Sequence[bytes]) -> int:
        """How many leading spans are system text and tools (with what opens the next message)."""
        return common_length(self.head, keys)

    def turn_end(self, keys: Sequence[bytes]) -> int:
        """How many leading spans come before the generation prompt; 0: not told."""
        start = len(keys) - len(self.tail)
        return start if self.tail and start >= 0 and tuple(keys[start:]) == self.tail else 0


class Frames:
    """Frames by the digest of what makes them, the least recently used forgotten. Threads may share it."""

    def __init__(self, max_frames: int = MAX_FRAMES) -> None:
        self._max_frames = max_frames
        self._frames: OrderedDict[bytes, Frame] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Frame | None:
        """The frame, if it is remembered."""
        with self._lock:
            if key in self._frames:
                self._frames.move_to_end(key)
            return self._frames.get(key)

    def put(self, key: bytes, frame: Frame) -> None:
        """Remembers it."""
        with self._lock:
            self._frames[key] = frame
            while len(self._frames) > self._max_frames:
                self._frames.popitem(last=False)


def common_length(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """How many leading spans both have."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
