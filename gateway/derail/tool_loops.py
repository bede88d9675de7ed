"""Agents that call the same tools again and again though nothing comes of it: same arguments, same results.

Pure. Reads the messages of a prompt from their end, at most MAX_HISTORY calls of them, so it needs no memory
of earlier prompts. Keeps digests, never texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from gateway.text.parsing.parts import Call

from .rules import MAX_HISTORY, DerailRules

MAX_PENDING = 16
"""Calls of one answer that are looked at."""


@dataclass(frozen=True, slots=True)
class PastCall:
    """One tool call. Equal keys: same tool, same arguments. `result` is None until it is known."""

    name: str
    key: bytes
    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """The last calls came so many times. A period of 1 is one call, a longer one a cycle of them."""

    severity: Literal["warning", "critical"]
    period: int
    copies: int


def past_calls(messages: Sequence[Mapping[str, Any]]) -> tuple[PastCall, ...]:
    """The last calls that a chat's messages tell of, the oldest first. The chat API has checked them."""
    newest_first: list[PastCall] = []
    results: list[Mapping[str, Any]] = []  # of the assistant's message before them
    for message in reversed(messages):
        if message.get("role") == "tool":
            results.append(message)
            continue
        if message.get("tool_calls"):
            calls = _answered(message["tool_calls"], results[::-1])
            newest_first.extend(reversed(calls))
            if len(newest_first) >= MAX_HISTORY:
                break
        results = []
    return tuple(reversed(newest_first[:MAX_HISTORY]))


def asked_calls(calls: Iterable[Call]) -> list[PastCall]:
    """The whole calls of an answer."""
    return [PastCall(call.name, _key(call.name, call.arguments)) for call in calls if call.is_whole]


def tool_loop(known: Sequence[PastCall], asked: Sequence[PastCall], rules: DerailRules) -> ToolLoop | None:
    """What the calls of an answer repeat of those that have results; the worst of them."""
    calls = [*known[-MAX_HISTORY:], *asked[:MAX_PENDING]]
    num_known = len(calls) - len(asked[:MAX_PENDING])
    found = [_at(calls[:end], rules) for end in range(num_known + 1, len(calls) + 1)]
    loops = [loop for loop in found if loop is not None]
    return max(loops, key=lambda loop: (loop.severity == "critical", loop.copies), default=None)


def _at(calls: Sequence[PastCall], rules: DerailRules) -> ToolLoop | None:
    """The shortest cycle that these calls end in, if it came often enough."""
    if _is_polled(calls[-1].name, rules):
        return None
    for period in range(1, rules.max_call_cycle + 1):
        num_same = 0
        for index in range(len(calls) - 1, period - 1, -1):
            if not _is_same(calls[index], calls[index - period], rules):
                break
            num_same += 1
        copies = 1 + num_same // period
        if copies >= rules.warn_calls:
            is_critical = copies >= rules.critical_calls
            return ToolLoop("critical" if is_critical else "warning", period, copies)
    return None


def _is_same(newer: PastCall, older: PastCall, rules: DerailRules) -> bool:
    """Calls that were asked for together are no repetition: a die may be thrown five times at once."""
    if newer.key != older.key or older.result is None or _is_polled(older.name, rules):
        return False
    return newer.result is None or newer.result == older.result


def _is_polled(name: str, rules: DerailRules) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in rules.pollers)


def _answered(calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> list[PastCall]:
    """By their ids; results without one by their order."""
    named = {result["tool_call_id"]: result for result in results if result.get("tool_call_id")}
    nameless = iter([result for result in results if not result.get("tool_call_id")])
    found = []
    for call in calls:
        function, result = call["function"], named.get(call.get("id"))
        if result is None:
            result = next(nameless, None)
        told = None if result is None else _digest(_text(result.get("content")))
        found.append(PastCall(function["name"], _key(function["name"], function.get("arguments")), told))
    return found


def _key(name: str, arguments: Any) -> bytes:
    """Equal for equal arguments, however they are spaced and ordered."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return _digest(name, arguments)
    try:
        return _digest(name, msgspec.json.encode(value, order="deterministic"))
    except (UnicodeEncodeError, RecursionError):
        return _digest(name, repr(value))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _digest(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode(errors="replace")
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.digest()
