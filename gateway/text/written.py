"""Tool calls as the model wrote them: a client that takes an answer apart and sends it back as `tool_calls`,
its keys in another order maybe, means the text that was generated.

Its thinking may be sent back or not: it is the same answer. Pure: knows no tokens and no template.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .parsing import CallBegun, Content, Reader, Reading, Said

MAX_CHARS = 16 << 20
"""Of all remembered answers together."""

MAX_TEXT_CHARS = 65_536
"""A longer answer with calls is not remembered."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_TAKEN_APART = ("tool_calls", *_REASONING_NAMES)
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Restored:
    """A conversation with answers put back as they were written. It may stand for the caller's when their
    renderings differ in whole spans only, and those read one of `spans`.
    """

    messages: list[Message]
    spans: frozenset[str]


@dataclass(frozen=True, slots=True)
class Written:
    """A remembered answer. `opening`: the prompt's last words that belong to it, an opened thought."""

    prefix: str
    text: str
    opening: str = ""

    @property
    def span(self) -> str:
        """Its whole span in a prompt."""
        return self.prefix + self.text

    @property
    def num_chars(self) -> int:
        """What it costs to remember."""
        return len(self.prefix) + len(self.text)


class WrittenCalls:
    """Answers that called tools, by what they say. Bounded, the least recently used forgotten.

    One thread learns; others may restore meanwhile, for each step of theirs on the table is atomic.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._answers: OrderedDict[bytes, Written] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def learn(
        self, prefix: str, text: str, reading: Reading, *, scope: bytes, said_before: bytes = b""
    ) -> None:
        """An answer of this scope; `prefix` is the prompt's plain text that it continues. It counts after the
        same words for good, elsewhere until the next such answer.
        """
        tag = reading.thinking[0] if reading.thinking is not None and reading.is_thinking else ""
        answer = Written(prefix, text, prefix[prefix.rfind(tag) :] if tag else "")
        is_kept = answer.num_chars <= MAX_TEXT_CHARS and tag in prefix
        said = _take_apart(text, reading) if is_kept else None
        if said is None:
            return
        calls = [_call({"name": call.name, "arguments": _decode(call.arguments)}) for call in said.calls]
        for reasoning in {"", said.reasoning}:
            for before in {b"", said_before}:
                self._put(_digest(scope, before, reasoning, said.content, calls), answer)

    def _put(self, key: bytes, answer: Written) -> None:
        previous = self._answers.pop(key, None)
        self._num_chars += answer.num_chars - (previous.num_chars if previous is not None else 0)
        self._answers[key] = answer
        while self._num_chars > self._max_chars:
            self._num_chars -= self._answers.popitem(last=False)[1].num_chars

    def _get(self, key: bytes) -> Written | None:
        answer = self._answers.get(key)
        if answer is not None:
            with contextlib.suppress(KeyError):  # forgotten meanwhile
                self._answers.move_to_end(key)
        return answer

    def remembered(
        self, messages: Sequence[Message], links: Sequence[bytes], *, scope: bytes
    ) -> dict[int, Written]:
        """The answers that messages are, by the messages' index. `links`: see `said_links`."""
        found: dict[int, Written] = {}
        if not self._answers:
            return found
        for index, (message, before) in enumerate(zip(messages, links, strict=False)):
            if message["role"] != "assistant" or not message.get("tool_calls"):
                continue
            calls = [_call(call.get("function")) for call in message["tool_calls"]]
            reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name)), "")
            if None in calls or not isinstance(reasoning, str):
                continue
            content = message.get("content") or ""
            answer = self._get(_digest(scope, before, reasoning, content, calls))
            answer = answer or self._get(_digest(scope, b"", reasoning, content, calls))
            if answer is not None:
                found[index] = answer
        return found


def said_links(messages: Sequence[Message]) -> list[bytes]:
    """A digest of what was said before each message, and last before what comes next. Thoughts do not count:
    clients leave them out later.
    """
    links = [b""]
    for message in messages:
        functions = [call.get("function") for call in message.get("tool_calls") or ()]
        calls = [_call(function) or function for function in functions]
        said = [message["role"], (message.get("content") or "").strip(), calls]
        links.append(hashlib.blake2b(links[-1] + _encode_sorted(said), digest_size=16).digest())
    return links


def restore(messages: Sequence[Message], answers: Mapping[int, Written]) -> Restored | None:
    """The messages with each answer put back as its text; None where there is none."""
    restored = list(messages)
    for index, answer in answers.items():
        kept = {name: value for name, value in messages[index].items() if name not in _TAKEN_APART}
        restored[index] = {**kept, "content": answer.opening + answer.text}
    spans = frozenset(answer.span for answer in answers.values())
    return Restored(restored, spans) if answers else None


def _take_apart(text: str, reading: Reading) -> Said | None:
    """None unless there are calls, all whole, and nothing else follows them or is left out."""
    reader, said = Reader(reading), Said()
    parts = reader.feed(text) + reader.end()
    said.add(parts)
    first = next((index for index, part in enumerate(parts) if isinstance(part, CallBegun)), None)
    if first is None or reader.has_dropped or not all(call.is_whole for call in said.calls):
        return None
    follows = any(isinstance(part, Content) for part in parts[first:])
    return None if follows else said


def _call(function: Any) -> Message | None:
    """Name and arguments of a call whose arguments are an object."""
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), dict):
        return None
    return {"name": function.get("name"), "arguments": function["arguments"]}


def _digest(
    scope: bytes, before: bytes, reasoning: str, content: str, calls: Sequence[Message | None]
) -> bytes:
    said = _encode_sorted([before.hex(), reasoning.strip(), content.strip(), calls])
    return hashlib.blake2b(scope + said, digest_size=16).digest()
