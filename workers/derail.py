"""When a turn has gone astray: exact cycles of tokens at its end, and tool calls opened without a close.

Sees the tokens and the text of one turn; knows neither engine nor tokenizer.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from .messages import Derail, DerailKind

MAX_EXCERPT_CHARACTERS = 200

_CLOSES: dict[str, tuple[str, ...]] = {
    "<tool_call>": ("</tool_call>",),
    "[TOOL_CALLS]": ("}",),
    "<|tool_call_start|>": ("<|tool_call_end|>",),
    "<|python_tag|>": ("}", ")"),
    "<function=": ("</function>",),
}
"""What opens a call in an answer's text, and what closes it: with a mark of its own or, where a family has
none, with the end of its arguments."""

_OPENED_BY = {
    close: tuple(opening for opening, closes in _CLOSES.items() if close in closes)
    for closes in _CLOSES.values()
    for close in closes
}
_MARKS = (*_CLOSES, *_OPENED_BY)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_MOST_CUT = max(map(len, _MARKS)) - 1


class DerailRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From where on an engine says that a turn has gone astray.

    max_period: longest cycle of tokens that is looked for at a turn's end.
    min_copies: so often a cycle has to stand there without a difference, at least.
    min_tokens: so many tokens its copies have to be in all, at least.
    every_tokens: generated tokens from one look to the next.
    max_open_calls: tool calls opened one after another, none of them closed, that are too many.
    """

    max_period: int = 256
    min_copies: int = 4
    min_tokens: int = 64
    every_tokens: int = 16
    max_open_calls: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError that names the field, its value and the remedy."""
        for name, least in (
            ("max_period", 1),
            ("min_copies", 2),
            ("min_tokens", 2),
            ("every_tokens", 1),
            ("max_open_calls", 2),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}: use {least} or more")


@dataclass(frozen=True, slots=True)
class Cycle:
    """The same tokens again and again, up to the end."""

    start: int  # index of the first token of the first copy
    period: int  # tokens of one copy


@dataclass(slots=True)
class _Flood:
    """Calls that were opened since the last one of their kind was closed."""

    first_token: int
    num_open: int = 0
    text: str = ""  # from the first of them on


class Watch:
    """Looks after one turn; tells each kind of derailment once. `decode` gives the text of tokens."""

    def __init__(self, rules: DerailRules, decode: Callable[[Sequence[int]], str]) -> None:
        self._rules = rules
        self._decode = decode
        self._num_looks = 0
        self._told: set[DerailKind] = set()
        self._floods: dict[str, _Flood] = {}  # by what opens the calls
        self._cut = ""  # text that may be the beginning of a mark

    def see(self, text: str, index: int) -> None:
        """Take text that became certain with the generated token of this index."""
        if not text:
            return
        for flood in self._floods.values():
            flood.text += text[: MAX_EXCERPT_CHARACTERS - len(flood.text)]
        text, end = self._cut + text, 0
        for match in _MARK.finditer(text):
            end = match.end()
            if match[0] in _CLOSES:
                flood = self._floods.setdefault(match[0], _Flood(index))
                flood.num_open += 1
                flood.text = flood.text or text[match.start() :][:MAX_EXCERPT_CHARACTERS]
            else:
                for opening in _OPENED_BY[match[0]]:
                    self._floods.pop(opening, None)
        self._cut = text[max(end, len(text) - _MOST_CUT) :]

    def look(self, generated: array[int]) -> Derail | None:
        """What is wrong with these tokens, if that was not told before and if it is time to look."""
        num_looks = len(generated) // self._rules.every_tokens
        if num_looks <= self._num_looks:
            return None
        self._num_looks = num_looks
        found = self._looped(generated) or self._flooded()
        if found is not None:
            self._told.add(found.derail)
        return found

    def resume(self, generated: array[int], *, was_told: bool) -> None:
        """Take what the turn generated before it was paused; was_told: and what was wrong with it by then."""
        every = self._rules.every_tokens
        num_looked_at = len(generated) - len(generated) % every
        for start in range(0, num_looked_at, every):
            self.see(self._decode(generated[start : start + every]), start)
        if was_told:
            self.look(generated[:num_looked_at])
        self._num_looks = num_looked_at // every
        self.see(self._decode(generated[num_looked_at:]), num_looked_at)

    def _looped(self, generated: array[int]) -> Derail | None:
        cycle = find_cycle(generated, self._rules) if "token_cycle" not in self._told else None
        if cycle is None:
            return None
        copy = generated[cycle.start : cycle.start + cycle.period]
        excerpt = self._decode(copy)[:MAX_EXCERPT_CHARACTERS]
        return Derail(derail="token_cycle", first_token=cycle.start, excerpt=excerpt)

    def _flooded(self) -> Derail | None:
        if "tool_flood" in self._told:
            return None
        for flood in self._floods.values():
            if flood.num_open >= self._rules.max_open_calls:
                return Derail(derail="tool_flood", first_token=flood.first_token, excerpt=flood.text)
        return None


def find_cycle(generated: array[int], rules: DerailRules) -> Cycle | None:
    """The shortest cycle that these tokens end in. Costs by the longest period, however many they are."""
    if len(generated) < rules.min_tokens:
        return None
    longest = max(rules.min_copies * rules.max_period, rules.min_tokens) + rules.every_tokens
    tail = generated[-longest:]
    data = tail.tobytes()
    for period in _candidates(data, tail.itemsize, rules):
        num_needed = max(rules.min_copies * period, rules.min_tokens)
        first, shift = len(data) - num_needed * tail.itemsize, period * tail.itemsize
        if first >= 0 and data[first + shift :] == data[first:-shift]:
            return Cycle(len(generated) - len(tail) + _first_of(tail, len(tail) - num_needed, period), period)
    return None


def _candidates(data: bytes, token_bytes: int, rules: DerailRules) -> Iterator[int]:
    """Periods, the shortest first, by which as many of the last tokens repeat as must in any cycle."""
    num_last = max(rules.min_tokens * (rules.min_copies - 1) // rules.min_copies, 1)
    last = len(data) - num_last * token_bytes
    lowest = max(last - rules.max_period * token_bytes, 0)
    found = last
    while found > lowest:
        found = data.rfind(data[last:], lowest, found + num_last * token_bytes - 1)
        if found >= 0 and (last - found) % token_bytes == 0:
            yield (last - found) // token_bytes


def _first_of(tail: array[int], first: int, period: int) -> int:
    """Where a cycle that holds from `first` on began."""
    while first and tail[first - 1] == tail[first - 1 + period]:
        first -= 1
    return first
