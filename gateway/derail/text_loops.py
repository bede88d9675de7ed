"""Text that says the same again and again, though not token by token: counters and the like may differ.

A pure fold over one answer's text, the same at every split of it. Each character is read once, and what is
remembered is bounded by `chunk_distance`. Knows no tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .rules import DerailRules

HEAD_CHARS = 200
"""So much of a line tells what it is."""
LEAST_SHARE = 0.7
"""Of the text from one time to the next that has been said before: a song's verse has less, a loop more."""
LEAST_LETTERS = 0.75
"""Of a line's characters that are letters or blanks, for it to be prose."""
MAX_EXCERPT_CHARS = 200

_FENCE = re.compile(r"\s{0,3}(?:```|~~~)")
_BORDER = re.compile(r"[^0-9A-Za-z]")
"""Where chunks end: behind words, and behind each character of scripts that write none apart."""
_NO_PROSE = re.compile(
    r"""\s*(?:[-*+•|<>{}\[\]"'`,;/#$%=0-9]      # lists, tables, markup, JSON, comments, numbers, times
    |[A-Z][a-z]{2}\s+\d+\s\d\d:)                # the date of a system's log
    |(?:\ {4}|\t)                               # code without a fence
    |.*\b(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL)\b  # a log's level
    |.*[{};]\s*$""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class TextLoop:
    """The text has been going round since the character `start` of the answer."""

    severity: Literal["warning", "critical"]
    start: int
    excerpt: str


@dataclass(slots=True)
class _Seen:
    """A chunk of prose: where it began to come back, how often, where last, and what was repeated by then."""

    start: int
    last: int
    num_repeated: int
    count: int = 1


class TextLoops:
    """Looks after one answer; tells each severity once."""

    def __init__(self, rules: DerailRules) -> None:
        self._rules = rules
        self._limits: list[tuple[Literal["warning", "critical"], int]] = [
            ("critical", rules.critical_chunks),
            ("warning", rules.warn_chunks),
        ]
        self._begun = ""  # a line that may still be anything
        self._is_prose: bool | None = None  # of the present line; None: not known yet
        self._in_fence = False
        self._position = 0  # characters looked at, prose or not
        self._recent = ""  # prose without a break, up to here
        self._seen: dict[str, _Seen] = {}
        self._order: deque[tuple[int, str]] = deque()  # where each chunk was seen, for forgetting
        self._num_repeated = 0  # characters of chunks that had been seen shortly before
        self._repeated_to = 0  # the last of them

    def feed(self, text: str) -> list[TextLoop]:
        """Takes more text in. What comes is told as soon as it is certain, and only then."""
        found: list[TextLoop] = []
        self._begun += text
        while self._begun:
            if self._is_prose is None and not self._judge():
                break
            line, newline, rest = self._begun.partition("\n")
            self._begun = rest
            found.extend(self._take(line + newline))
            if newline:
                self._is_prose = None
        return found

    def end(self) -> list[TextLoop]:
        """No more text comes: the last line is what it is."""
        if self._is_prose is not None or not self._begun:
            return []
        self._decide(self._begun)
        rest, self._begun = self._begun, ""
        return list(self._take(rest))

    def _judge(self) -> bool:
        """Whether it is known what the line is."""
        end = self._begun.find("\n", 0, HEAD_CHARS)
        if end < 0 and len(self._begun) < HEAD_CHARS:
            return False
        self._decide(self._begun[:end] if end >= 0 else self._begun[:HEAD_CHARS])
        return True

    def _decide(self, head: str) -> None:
        is_fence = _FENCE.match(head) is not None
        if is_fence:
            self._in_fence = not self._in_fence
        self._is_prose = not (is_fence or self._in_fence) and is_prose(head)

    def _take(self, text: str) -> Iterator[TextLoop]:
        if not self._is_prose:
            self._position += len(text)
            if text.strip():
                self._recent = ""
            return
        size = self._rules.chunk_chars
        before = self._recent
        whole = before + text
        start, self._position = self._position - len(before), self._position + len(text)
        for match in _BORDER.finditer(whole, max(len(before), size - 1)):
            end = match.end()
            if (loop := self._look(whole[end - size : end], start + end)) is not None:
                yield loop
        self._recent = whole[1 - size :]

    def _look(self, chunk: str, position: int) -> TextLoop | None:
        """At the chunk that ends there."""
        seen = self._seen.get(chunk)
        self._forget(position - self._rules.chunk_distance)
        self._order.append((position, chunk))
        if seen is None or position - seen.last > self._rules.chunk_distance:
            self._seen[chunk] = _Seen(position - len(chunk), position, self._num_repeated)
            return None
        self._num_repeated += min(len(chunk), position - self._repeated_to)
        self._repeated_to = position
        share = (self._num_repeated - seen.num_repeated) / (position - seen.last)
        seen.last, seen.num_repeated, seen.count = position, self._num_repeated, seen.count + 1
        if share < LEAST_SHARE:
            return None
        for index, (severity, limit) in enumerate(self._limits):
            if seen.count >= limit:
                del self._limits[index:]
                return TextLoop(severity, seen.start, chunk[:MAX_EXCERPT_CHARS])
        return None

    def _forget(self, before: int) -> None:
        while self._order and self._order[0][0] < before:
            position, chunk = self._order.popleft()
            if self._seen[chunk].last == position:
                del self._seen[chunk]


def is_prose(head: str) -> bool:
    """Whether a line that begins so is running text, and no list, table, code, data or log."""
    if _NO_PROSE.match(head):
        return False
    num_letters = sum(character.isalpha() or character.isspace() for character in head)
    return num_letters >= LEAST_LETTERS * len(head)
