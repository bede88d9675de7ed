"""Tool calls as the model wrote them: a client that takes an answer apart and sends it back as `tool_calls`,
its keys in another order maybe, means the text that was generated.

Pure: knows the common JSON form of calls, no tokens and no template.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_ANSWERS = 4096
MAX_TEXT_CHARS = 65_536
"""A longer answer with calls is not remembered."""

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_encode_sorted = msgspec.json.Encoder(order="sorted").encode

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Restored:
    """A conversation with answers put back as they were written. `spans`: the texts that prove it when they
    occur in the rendered prompt as whole spans.
    """

    messages: list[Message]
    spans: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Answer:
    prefix: str
    text: str


class WrittenCalls:
    """Answers that called tools, by what they say. Bounded, the least recently used forgotten."""

    def __init__(self, max_answers: int = MAX_ANSWERS) -> None:
        self._max_answers = max_answers
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()

    def learn(self, prefix: str, text: str, *, scope: bytes) -> None:
        """An answer of this scope; `prefix` is the prompt's plain text that it continues."""
        content, calls = _take_apart(text) if len(text) <= MAX_TEXT_CHARS else (text, None)
        if not calls:
            return
        key = _digest(scope, content, calls)
        self._answers[key] = _Answer(prefix, text)
        self._answers.move_to_end(key)
        while len(self._answers) > self._max_answers:
            self._answers.popitem(last=False)

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
            answer = self._answers.get(_digest(scope, message.get("content") or "", calls))
            if answer is not None and None not in calls:
                yield index, answer


def _take_apart(text: str) -> tuple[str, list[Message | None] | None]:
    """The words before the calls, and the calls; None unless nothing else follows them."""
    first = _CALL.search(text)
    if first is None or _CALL.sub("", text[first.start() :]).strip():
        return text, None
    calls: list[Message | None] = []
    for found in _CALL.finditer(text):
        try:
            calls.append(_call(msgspec.json.decode(found[1])))
        except (msgspec.DecodeError, RecursionError):
            return text, None
    return text[: first.start()], None if None in calls else calls


def _call(function: Any) -> Message | None:
    """Name and arguments of a call whose arguments are an object."""
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), dict):
        return None
    return {"name": function.get("name"), "arguments": function["arguments"]}


def _digest(scope: bytes, content: str, calls: Sequence[Message | None]) -> bytes:
    said = _encode_sorted([content.strip(), calls])
    return hashlib.blake2b(scope + said, digest_size=16).digest()
