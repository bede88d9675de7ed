"""Tool calls as the model wrote them: a client that takes an answer apart and sends it back as `tool_calls`,
its keys in another order maybe, means the text that was generated.

Pure: knows the common JSON form of calls, no tokens and no template.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_CHARS = 16 << 20
"""Of all remembered answers together."""

MAX_TEXT_CHARS = 65_536
"""A longer answer with calls is not remembered."""

_OPENING = re.compile(r"\s*<tool_call>\s*(?=\{)")
_CLOSING = re.compile(r"\s*</tool_call>")
_find_end = json.JSONDecoder().raw_decode
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_encode_sorted = msgspec.json.Encoder(order="sorted").encode

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Restored:
    """A conversation with answers put back as they were written. It may stand for the caller's when their
    renderings differ in whole spans only, and those read one of `spans`.
    """

    messages: list[Message]
    spans: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Answer:
    prefix: str
    text: str

    @property
    def num_chars(self) -> int:
        return len(self.prefix) + len(self.text)


class WrittenCalls:
    """Answers that called tools, by what they say. Bounded, the least recently used forgotten. Threads may
    share it.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def learn(self, prefix: str, text: str, *, scope: bytes) -> None:
        """An answer of this scope; `prefix` is the prompt's plain text that it continues."""
        answer = _Answer(prefix, text)
        said = _take_apart(text) if answer.num_chars <= MAX_TEXT_CHARS else None
        if said is None:
            return
        with self._lock:
            self._put(_digest(scope, *said), answer)

    def _put(self, key: bytes, answer: _Answer) -> None:
        previous = self._answers.pop(key, None)
        self._num_chars += answer.num_chars - (previous.num_chars if previous is not None else 0)
        self._answers[key] = answer
        while self._num_chars > self._max_chars:
            self._num_chars -= self._answers.popitem(last=False)[1].num_chars

    def _get(self, key: bytes) -> _Answer | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def restore(self, messages: Sequence[Message], *, scope: bytes) -> Restored | None:
        """The messages with each remembered answer as its text; None where there is none."""
        restored = list(messages)
        spans: set[str] = set()
        for index, answer in self._remembered(messages, scope):
            kept = {name: value for name, value in messages[index].items() if name != "tool_calls"}
            restored[index] = {**kept, "content": answer.text}
            spans.add(answer.prefix + answer.text)
        return Restored(restored, frozenset(spans)) if spans else None

    def _remembered(self, messages: Sequence[Message], scope: bytes) -> Iterator[tuple[int, _Answer]]:
        if not self._answers:
            return
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not message.get("tool_calls"):
                continue
            if any(message.get(name) for name in _REASONING_NAMES):
                continue  # told apart from the content: whether it is what was written is not known here
            calls = [_call(call.get("function")) for call in message["tool_calls"]]
            if None in calls:
                continue
            answer = self._get(_digest(scope, message.get("content") or "", calls))
            if answer is not None:
                yield index, answer


def _take_apart(text: str) -> tuple[str, list[Message | None]] | None:
    """The words before the calls, and the calls; None unless there are any and nothing else follows them."""
    found = first = _OPENING.search(text)
    calls: list[Message | None] = []
    end = 0
    while found is not None:
        try:
            _, end = _find_end(text, found.end())
            calls.append(_call(msgspec.json.decode(text[found.end() : end])))
        except (ValueError, RecursionError):
            return None
        closing = _CLOSING.match(text, end)
        if closing is None:
            return None
        end = closing.end()
        found = _OPENING.match(text, end)
    if first is None or None in calls or text[end:].strip():
        return None
    return text[: first.start()], calls


def _call(function: Any) -> Message | None:
    """Name and arguments of a call whose arguments are an object."""
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), dict):
        return None
    return {"name": function.get("name"), "arguments": function["arguments"]}


def _digest(scope: bytes, content: str, calls: Sequence[Message | None]) -> bytes:
    said = _encode_sorted([content.strip(), calls])
    return hashlib.blake2b(scope + said, digest_size=16).digest()
