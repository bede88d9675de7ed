"""What verbs answer: how a command was taken. Types only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .commands import CancelMode, When

Status = Literal[
    "queued",
    "prefilling",
    "decoding",
    "paused",
    "input_required",
    "completed",
    "failed",
    "cancelled",
    "expired",
    "rejected",
    "derailed",
]
"""A run's public state; the last six are final."""

FINAL: tuple[Status, ...] = ("completed", "failed", "cancelled", "expired", "rejected", "derailed")


@dataclass(frozen=True, slots=True)
class Cancelled:
    """`status` is the one that won, or the present one while the end is still to come."""

    status: Status
    mode: CancelMode
    num_runs: int = 1  # told to end; more than one for a tree


@dataclass(frozen=True, slots=True)
class Paused:
    """`status` is not yet "paused" when the engine has not reached a border within the wait."""

    status: Status
    hold_seconds: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """Both counts are None until the run has a worker again."""

    status: Status
    cached_tokens: int | None = None  # of the prompt and of what it had generated
    recomputed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Steered:
    """`applied` may be "next_turn" where "now" was asked for: the turn had ended first."""

    status: Status
    applied: When
    turn: int | None = None  # that begins with the text; None: not yet opened


@dataclass(frozen=True, slots=True)
class Responded:
    """The turn that goes on with the answer."""

    status: Status
    turn: int


@dataclass(frozen=True, slots=True)
class Forked:
    """The child. `parent_tokens` of its prompt are the parent's; the counts come with its worker.
    `dropped_call`: the tool call that the parent had not ended, and that the child therefore has not.
    """

    run_id: str
    parent_tokens: int
    cached_tokens: int | None = None
    recomputed_tokens: int | None = None
    dropped_call: str | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """The caller's next heartbeat is due within so many seconds; None: none is asked for."""

    status: Status
    due_seconds: float | None = None
