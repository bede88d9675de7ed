"""What callers want of a run and has not been done: a pure fold over its commands, next to its state."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

from .commands import (
    Answered,
    CancelRun,
    Command,
    ForkRun,
    PauseRun,
    RespondRun,
    ResumeRun,
    SteerRun,
    decode_command,
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """Commands in their order, each id once. `last_id`: of the last entry that was read."""

    commands: tuple[Command, ...] = ()
    ids: frozenset[str] = field(default_factory=frozenset)
    answered: frozenset[str] = field(default_factory=frozenset)  # refused, or done without an event
    last_id: str = "0-0"

    def left(self, obeyed: Container[str]) -> Left:
        """What is still to be done."""
        open_commands = [
            command
            for command in self.commands
            if command.command not in obeyed and command.command not in self.answered
        ]
        return Left(
            cancel=_strongest([c for c in open_commands if isinstance(c, CancelRun)]),
            hold=self._hold(),
            resumes=tuple(c.command for c in open_commands if isinstance(c, ResumeRun)),
            steers=tuple(c for c in open_commands if isinstance(c, SteerRun)),
            responses=tuple(c for c in open_commands if isinstance(c, RespondRun)),
            forks=tuple(c for c in open_commands if isinstance(c, ForkRun)),
        )

    def _hold(self) -> PauseRun | None:
        """The pause that still counts: a resume, or a steer that is to act now, goes on."""
        hold = None
        for command in self.commands:
            match command:
                case PauseRun():
                    hold = command
                case ResumeRun() | SteerRun(when="now") if command.command not in self.answered:
                    hold = None
        return hold


@dataclass(frozen=True, slots=True)
class Left:
    """The open commands, by what they ask for."""

    cancel: CancelRun | None = None
    hold: PauseRun | None = None
    resumes: tuple[str, ...] = ()
    steers: tuple[SteerRun, ...] = ()
    responses: tuple[RespondRun, ...] = ()
    forks: tuple[ForkRun, ...] = ()

    @property
    def cancels_now(self) -> bool:
        """Not at the turn's end."""
        return self.cancel is not None and self.cancel.mode == "now"

    @property
    def forks_now(self) -> tuple[ForkRun, ...]:
        """From the next border on."""
        return tuple(fork for fork in self.forks if fork.at.is_now)

    @property
    def forks_past(self) -> bool:
        """Whether some leave at a point that lies behind."""
        return any(not fork.at.is_now for fork in self.forks)

    @property
    def steers_now(self) -> bool:
        """A text is to be put before the model at the next border."""
        return any(steer.when == "now" for steer in self.steers)


def note(wishes: Wishes, entries: Iterable[tuple[str, bytes]]) -> Wishes:
    """The wishes after further entries of the commands' stream."""
    for entry_id, message in entries:
        wishes = replace(wishes, last_id=entry_id)
        match decode_command(message):
            case None:
                continue
            case Answered(command=command, error=error, applied=applied):
                if error or applied:
                    wishes = replace(wishes, answered=wishes.answered | {command})
            case command if command.command not in wishes.ids:
                wishes = replace(
                    wishes, commands=(*wishes.commands, command), ids=wishes.ids | {command.command}
                )
    return wishes


def _strongest(cancels: list[CancelRun]) -> CancelRun | None:
    return next((c for c in cancels if c.mode == "now"), cancels[0] if cancels else None)
