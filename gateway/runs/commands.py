"""The words of verbs: what callers want of a run, recorded by any gateway, and what its owner answered.

A command is known by its id: recorded twice it counts once. Types only.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from workers.messages import VERSION, Derail, Message

from .spec import ForkPoint

CancelMode = Literal["graceful", "now"]
When = Literal["now", "next_turn", "queue"]


class ToolOutput(Struct, frozen=True, kw_only=True):
    """The result of one tool call, as text."""

    call_id: str
    output: str


class CancelRun(Message, frozen=True, kw_only=True):
    """End the run: at once, or at the end of its turn. `derail`: a detector asks; the run ends derailed.
    `keep_partial`: whether what the run had said is kept as its result, if this is what ends it.
    """

    command: str
    mode: CancelMode = "now"
    keep_partial: bool = True
    derail: Derail | None = None


class PauseRun(Message, frozen=True, kw_only=True):
    """Stop at the next border and keep what was computed for so long; the run itself stays paused."""

    command: str
    hold_seconds: float | None = None  # None: as the run's spec says


class ResumeRun(Message, frozen=True, kw_only=True):
    """Go on where it was paused."""

    command: str


class SteerRun(Message, frozen=True, kw_only=True):
    """Put a text before the model as the user's."""

    command: str
    text: str
    when: When = "now"


class RespondRun(Message, frozen=True, kw_only=True):
    """What a run in input_required waits for."""

    command: str
    outputs: tuple[ToolOutput, ...] = ()
    text: str = ""


class ForkRun(Message, frozen=True, kw_only=True):
    """Make a child of a live run. `spec` is the child's RunSpec, `run_id` its id."""

    command: str
    at: ForkPoint
    run_id: str
    spec: bytes


class Answered(Message, frozen=True, kw_only=True):
    """What became of a command. `error` is an error kind; then nothing was done."""

    command: str
    applied: str = ""  # how it was taken: the verb's own word
    turn: int = 0  # that it acted on, or that it opens
    tokens: int = 0  # of a fork: the parent's tokens that it begins with
    dropped_call: str | None = None  # of a fork: as in ForkPoint
    error: str = ""
    message: str = ""


Command = CancelRun | PauseRun | ResumeRun | SteerRun | RespondRun | ForkRun

_decode = msgspec.msgpack.Decoder(Command | Answered).decode


def decode_command(message: bytes) -> Command | Answered | None:
    """None for what a newer gateway wrote, or what is none of ours."""
    try:
        command = _decode(message)
    except msgspec.MsgspecError:
        return None
    return command if command.v <= VERSION else None
