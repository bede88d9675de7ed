"""Where the tool call begins that a cut-off turn left open. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import Reading
from .parts import Content, Said
from .reader import Reader

_OPENINGS: dict[str, tuple[str, ...]] = {
    "tagged": ("<tool_call>",),
    "xml": ("<tool_call>", "<function="),
    "mistral": ("[TOOL_CALLS]",),
    "llama": ("<|python_tag|>",),
    "python": ("<|tool_call_start|>",),
}


@dataclass(frozen=True, slots=True)
class OpenCall:
    """`start`: the index of its first character, marker included. `name` is "" before it was told."""

    start: int
    name: str


def open_call(reading: Reading, text: str) -> OpenCall | None:
    """The call within which the text ends; None: there is none."""
    if reading.calls is None:
        return None
    reader, said = Reader(reading), Said()
    said.add(reader.feed(text))
    if said.calls and not said.calls[-1].is_over:
        return OpenCall(_start(reading, text, len(said.calls) - 1), said.calls[-1].name)
    tail = "".join(part.text for part in reader.end() if isinstance(part, Content))
    found = [tail.find(opening) for opening in _OPENINGS[reading.calls] if opening in tail]
    return OpenCall(len(text) - len(tail) + min(found), "") if found and text.endswith(tail) else None


def _start(reading: Reading, text: str, num_closed: int) -> int:
    """The first opening behind so many whole calls: those within a call's arguments stand in an open one.

    0 where the call has no opening of its own: such calls are the whole turn.
    """
    for start in _openings(reading, text):
        said = Said()
        said.add(Reader(reading).feed(text[:start]))
        if len(said.calls) == num_closed and all(call.is_over for call in said.calls):
            return start
    return 0


def _openings(reading: Reading, text: str) -> list[int]:
    found = []
    for opening in _OPENINGS[reading.calls or "tagged"]:
        start = text.find(opening)
        while start >= 0:
            found.append(start)
            start = text.find(opening, start + 1)
    return sorted(found)
