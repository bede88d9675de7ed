"""What a turn's text is made of, in the order in which it becomes certain, and the whole of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the words for the caller."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The next call; Arguments up to the next CallBegun are its own."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, as JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is over; a call without this part was cut off. `is_whole`: its arguments are a JSON object."""

    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class CallDropped:
    """The call that was begun comes to no end, and what follows is said without it: no reader's part."""


Spoken = Reasoning | Content | CallBegun | Arguments | CallEnded
Part = Spoken | CallDropped


@dataclass(slots=True)
class Call:
    """One call of a tool. `arguments` is JSON text, an object if `is_whole`. Not `is_over`: cut off.
    `is_dropped`: it keeps its place, but is no part of what was said.
    """

    name: str
    arguments: str = ""
    is_over: bool = False
    is_whole: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class Said:
    """The sum of a turn's parts."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Takes further parts in, in order."""
        for part in parts:
            match part:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegun(name):
                    self.calls.append(Call(name))
                case Arguments(text):
                    self.calls[-1].arguments += text
                case CallEnded(is_whole):
                    self.calls[-1].is_over = True
                    self.calls[-1].is_whole = is_whole
                case CallDropped():
                    self.calls[-1].is_dropped = True


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts, neighbours of one kind as one."""
    result: list[Part] = []
    for part in parts:
        match (result[-1] if result else None), part:
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Arguments(before), Arguments(text):
                result[-1] = Arguments(before + text)
            case _:
                result.append(part)
    return result
