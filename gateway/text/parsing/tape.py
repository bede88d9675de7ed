"""Text that arrives in pieces, and the waits of those who read it.

A reader is a generator that yields where the text at hand does not decide what comes next. It decides only on
text that no further piece can change, so that the result is the same however the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from .parts import Part

T = TypeVar("T")
Steps = Generator[None, None, T]


class Tape:
    """What was not read yet, and the parts that were made of the rest."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        self.parts: list[Part] = []

    def drop(self, num_chars: int) -> None:
        """These are read."""
        self.text = self.text[num_chars:]

    def take(self, num_chars: int) -> str:
        """Reads so many."""
        taken = self.text[:num_chars]
        self.drop(num_chars)
        return taken


def blanks(tape: Tape, at: int = 0) -> Steps[int]:
    """The position of the first character from `at` on that is no white space."""
    while True:
        end = len(tape.text) - len(tape.text[at:].lstrip())
        if end < len(tape.text) or tape.is_over:
            return end
        yield


def one_of(tape: Tape, literals: Sequence[str], at: int = 0) -> Steps[str | None]:
    """The longest of the literals that stands at `at`; None: no one does."""
    longest = max(map(len, literals), default=0)
    while True:
        rest = tape.text[at : at + longest]
        if tape.is_over or not any(len(rest) < len(text) and text.startswith(rest) for text in literals):
            return max((text for text in literals if rest.startswith(text)), key=len, default=None)
        yield


def starts(tape: Tape, literal: str, at: int = 0) -> Steps[bool]:
    """Whether the literal stands at `at`."""
    return (yield from one_of(tape, (literal,), at)) is not None


def match_up_to(
    tape: Tape, pattern: re.Pattern[str], end: str, limit: int, at: int = 0
) -> Steps[re.Match[str] | None]:
    """The pattern's match at `at`, tried once `end` or `limit` characters are there."""
    while end not in tape.text[at : at + limit] and len(tape.text) < at + limit and not tape.is_over:
        yield
    return pattern.match(tape.text, at, at + limit)


def skip_newlines(tape: Tape) -> Steps[None]:
    """Reads line ends."""
    while True:
        tape.text = tape.text.lstrip("\n")
        if tape.text or tape.is_over:
            return
        yield


def close(tape: Tape, literal: str) -> Steps[None]:
    """Reads the literal and the white space before it, if it comes next; a part where the text ends."""
    position = yield from blanks(tape)
    if (yield from starts(tape, literal, position)):
        tape.drop(position + len(literal))
    elif tape.is_over and position < len(tape.text) and literal.startswith(tape.text[position:]):
        tape.drop(len(tape.text))


def copy_until(
    tape: Tape, literals: Sequence[str], part: Callable[[str], Part]
) -> Steps[tuple[str, str | None]]:
    """Copies text as parts up to the first of the literals, and reads that: the white space before it, which
    is not copied, and the literal; None at the end of the text.
    """
    pattern = re.compile("|".join(map(re.escape, literals))) if literals else None
    while True:
        found = pattern.search(tape.text) if pattern is not None else None
        end = found.start() if found else len(tape.text) - open_tail(tape.text, literals)
        words = tape.text[:end].rstrip() if literals or tape.is_over else tape.text
        if words:
            tape.parts.append(part(words))
        if found:
            tape.drop(found.end())
            return found.string[len(words) : end], found[0]
        tape.drop(len(words))
        if tape.is_over:
            return tape.take(len(tape.text)), None
        yield


def open_tail(text: str, literals: Iterable[str]) -> int:
    """How many of the last characters may be the start of a literal."""
    longest = 0
    for literal in literals:
        for num_chars in range(min(len(literal) - 1, len(text)), longest, -1):
            if literal.startswith(text[-num_chars:]):
                longest = num_chars
                break
    return longest
