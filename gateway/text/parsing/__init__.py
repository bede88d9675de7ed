"""A turn's text as reasoning, content and tool calls. Pure: knows no tokens, no HTTP and no model.

`Reading` says how a turn is to be read and is kept with its run, `Reader` reads it piece by piece, `Said` is
what it said: the same however the text was cut.
"""

from __future__ import annotations

from .formats import CallFormat, Reading, call_format, parameter_types, thinking_tags, types_of
from .parts import (
    Arguments,
    Call,
    CallBegun,
    CallDropped,
    CallEnded,
    Content,
    Part,
    Reasoning,
    Said,
    Spoken,
    joined,
)
from .reader import Reader, read

__all__ = [
    "Arguments",
    "Call",
    "CallBegun",
    "CallDropped",
    "CallEnded",
    "CallFormat",
    "Content",
    "Part",
    "Reader",
    "Reading",
    "Reasoning",
    "Said",
    "Spoken",
    "call_format",
    "joined",
    "parameter_types",
    "read",
    "thinking_tags",
    "types_of",
]
