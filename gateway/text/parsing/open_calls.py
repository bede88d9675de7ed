"""Where the tool call begins that a cut-off turn left open. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import Reading
from .parts import Said
from .reader import Reader, read

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
    """The call within which the text ends, be it before its closing tag; None: there is none.

    Of several calls in one list the whole list is open.
    """
    if reading.calls is None:
        return None
    reader, said = Reader(reading), Said()
    said.add(reader.feed(text))
    start = reader.open_at
    if start is None:
        return None
    calls = said.calls[len(read(reading, text[:start]).calls) :]
    if not calls:
        return OpenCall(start, "") if text.startswith(_OPENINGS[reading.calls], start) else None
    if reader.is_unclosed or not calls[-1].is_over:
        return OpenCall(start, calls[-1].name)
    return None
