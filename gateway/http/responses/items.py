"""Input items as chat messages. What one answer was made of becomes one message again, as the model wrote it:
its reasoning, words and calls, so that the next prompt begins with the last one.

Knows nothing of what is stored: references are resolved before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from gateway.dialects.responses.ids import open_reasoning
from gateway.http.custom_tools import custom_arguments
from gateway.http.fields import bad_field, convert

from .body import RESPONSES_REMEDIES
from .tools import flat_name

MAX_OPENED_BYTES = 32 << 20
"""What the sealed reasoning of one body may unpack to, all together."""

Item = dict[str, Any]
ChatMessage = dict[str, Any]

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
KNOWN_ITEMS = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning or "
    "item_reference"
)
ONLY_TEXT = "a text part such as {'type': 'input_text', 'text': ...}: this model reads text only"


class _Message(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]] = ""


class _Call(Struct, frozen=True, kw_only=True):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None


class _CustomCall(Struct, frozen=True, kw_only=True):
    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None


class _Output(Struct, frozen=True, kw_only=True):
    call_id: str
    output: str | list[dict[str, Any]]


class _Reasoning(Struct, frozen=True, kw_only=True):
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] = []
    encrypted_content: str | None = None


def to_messages(items: Sequence[Item], instructions: str | None) -> list[ChatMessage]:
    """The conversation. Raises InvalidField naming the first item that cannot be taken."""
    dialogue = _Dialogue(instructions)
    for index, item in enumerate(items):
        dialogue.add(item, f"input[{index}]")
    messages = dialogue.end()
    if not messages:
        raise bad_field("input", [], remedy="a string or a list of items, not all empty")
    return messages


def item_type(item: Item) -> str | None:
    """Messages may come without a type."""
    found = item.get("type")
    if found is None and "role" in item:
        return "message"
    return found if isinstance(found, str) else None


class _Dialogue:
    """Chat messages so far, and the assistant's message that further items may still belong to."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[ChatMessage] = []
        self._answer: ChatMessage | None = None
        self._room = MAX_OPENED_BYTES
        if instructions:
            self._messages.append({"role": "system", "content": instructions})

    def add(self, item: Item, where: str) -> None:
        """One more item. Raises InvalidField."""
        given = {name: value for name, value in item.items() if value is not None}
        match item_type(given):
            case "message":
                self._add_message(_convert(given, _Message, where), where)
            case "reasoning":
                self._add_reasoning(_convert(given, _Reasoning, where), where)
            case "function_call":
                call = _convert(given, _Call, where)
                self._add_call(call.call_id, flat_name(call.namespace, call.name), call.arguments)
            case "custom_tool_call":
                custom = _convert(given, _CustomCall, where)
                name = flat_name(custom.namespace, custom.name)
                self._add_call(custom.call_id, name, custom_arguments(custom.input))
            case "function_call_output" | "custom_tool_call_output":
                output = _convert(given, _Output, where)
                content = _joined(output.output, f"{where}.output")
                self._put({"role": "tool", "tool_call_id": output.call_id, "content": content})
            case _:
                raise bad_field(f"{where}.type", given.get("type"), remedy=KNOWN_ITEMS)

    def end(self) -> list[ChatMessage]:
        """All messages."""
        self._close_answer()
        return self._messages

    def _add_message(self, message: _Message, where: str) -> None:
        content = _joined(message.content, f"{where}.content")
        if message.role != "assistant":
            self._put({"role": message.role, "content": content})
            return
        if self._answer is not None and not ("content" in self._answer or "tool_calls" in self._answer):
            self._answer["content"] = content
            return
        self._close_answer()
        self._answer = {"role": "assistant", "content": content}

    def _add_reasoning(self, reasoning: _Reasoning, where: str) -> None:
        """Our own reasoning comes back sealed, as text, or as the summary that it was told as."""
        sealed = reasoning.encrypted_content
        text = open_reasoning(sealed) if sealed else None
        if text is None:
            name = "content" if reasoning.content else "summary"
            text = _joined(reasoning.content or reasoning.summary, f"{where}.{name}")
        else:
            self._take_room(len(text), f"{where}.encrypted_content")
        if self._answer is not None and ("content" in self._answer or "tool_calls" in self._answer):
            self._close_answer()
        if text:
            before = (self._answer or {}).get("reasoning_content", "")
            self._answer = {"role": "assistant", "reasoning_content": before + text}

    def _take_room(self, num_chars: int, where: str) -> None:
        self._room -= num_chars
        if self._room < 0:
            remedy = f"left out: this conversation's reasoning is more than {MAX_OPENED_BYTES} bytes"
            raise bad_field(where, "sealed reasoning", remedy=remedy)

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        if self._answer is None:
            self._answer = {"role": "assistant"}
        function = {"name": name, "arguments": arguments}
        calls = self._answer.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _put(self, message: ChatMessage) -> None:
        """A message of somebody else. What systems say first is one message: templates take no second."""
        self._close_answer()
        first = self._messages[0] if len(self._messages) == 1 else None
        if first is not None and _is_system(first) and _is_system(message):
            texts = filter(None, [first["content"], message["content"]])
            self._messages = [{**first, "content": "\n\n".join(texts)}]
        else:
            self._messages.append(message)

    def _close_answer(self) -> None:
        if self._answer is not None:
            if "tool_calls" not in self._answer:
                self._answer.setdefault("content", "")
            self._messages.append(self._answer)
            self._answer = None


def _is_system(message: ChatMessage) -> bool:
    return message["role"] in ("system", "developer")


def _convert(item: Item, kind: type[Any], where: str) -> Any:
    return convert(item, kind, remedies=RESPONSES_REMEDIES, where=where)


def _joined(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    name = "refusal" if kind == "refusal" else "text"
    if kind not in TEXT_PARTS and kind != "refusal":
        raise bad_field(f"{where}.type", kind, remedy=ONLY_TEXT)
    text = part.get(name)
    if not isinstance(text, str):
        raise bad_field(f"{where}.{name}", text, remedy="a string")
    return text
