"""Server-sent events out of bytes, however they were cut. Pure.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sse:
    """One event. `id` is None where the event itself has none."""

    data: bytes
    event: str = ""
    id: str | None = None


class SseReader:
    """Reads one connection."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._event = ""
        self._id: str | None = None

    def feed(self, data: bytes) -> Iterator[Sse]:
        """The events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield Sse(b"\n".join(self._data), self._event, self._id)
                self._clear()
                continue
            name, _, value = line.partition(b":")
            self._take(name, value.removeprefix(b" "))

    def _take(self, name: bytes, value: bytes) -> None:
        match name:
            case b"data":
                self._data.append(value)
            case b"event":
                self._event = value.decode(errors="replace")
            case b"id":
                self._id = value.decode(errors="replace")

    def _clear(self) -> None:
        self._data, self._event, self._id = [], "", None
