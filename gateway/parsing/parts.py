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
    """The call's arguments are a whole JSON object. A call without this part was cut off or is broken."""


Part = Reasoning | Content | CallBegun | Arguments | CallEnded


@dataclass(slots=True)
class Call:
    """One call of a tool. `arguments` is JSON text, an object if `is_whole`."""

    name: str
    arguments: str = ""
    is_whole: bool = False


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
                case CallEnded():
                    self.calls[-1].is_whole = True
