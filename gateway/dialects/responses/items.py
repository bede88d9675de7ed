"""The items of a response while they are told: each makes the events of its beginning, parts and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.dialects.custom_calls import custom_input

from .echo import CalledAs
from .ids import seal_reasoning

Status = Literal["in_progress", "completed", "incomplete"]
Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One event without its number."""

    type: str
    fields: dict[str, Any]


@dataclass(slots=True)
class OpenItem:
    """What the kinds of items share. `index` is its place in the response's output."""

    id: str
    index: int
    text: str = ""

    def begin(self) -> list[Event]:
        """The item appears, with its first part where it has parts."""
        return [Event("response.output_item.added", {"output_index": self.index, "item": self.body()})]

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        """More of its text."""
        raise NotImplementedError

    def end(self, status: Status) -> tuple[list[Event], Item]:
        """The item is whole, or as whole as it gets; its last form comes along."""
        item = self.body(status)
        return [Event("response.output_item.done", {"output_index": self.index, "item": item})], item

    def body(self, status: Status = "in_progress") -> Item:
        """The item as it is now."""
        raise NotImplementedError

    def _event(self, kind: str, **fields: Any) -> Event:
        return Event(f"response.{kind}", {"item_id": self.id, "output_index": self.index, **fields})


@dataclass(slots=True)
class Message(OpenItem):
    """Words for the user."""

    logprobs: list[Any] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return [*OpenItem.begin(self), self._event("content_part.added", content_index=0, part=_part("", []))]

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        self.text += text
        self.logprobs += logprobs
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))]

    def end(self, status: Status) -> tuple[list[Event], Item]:
        events, item = OpenItem.end(self, status)
        part = item["content"][0]
        told = [
            self._event("output_text.done", content_index=0, text=self.text, logprobs=part["logprobs"]),
            self._event("content_part.done", content_index=0, part=part),
        ]
        return [*told, *events], item

    def body(self, status: Status = "in_progress") -> Item:
        content = [_part(self.text, list(self.logprobs))] if self.text or status != "in_progress" else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class Thought(OpenItem):
    """Reasoning: as its own text, or as the summary that the caller asked for, which is the same text."""

    is_summary: bool = False
    is_sealed: bool = False

    def begin(self) -> list[Event]:
        added = "reasoning_summary_part.added" if self.is_summary else "content_part.added"
        return [*OpenItem.begin(self), self._event(added, **self._place, part=self._part(""))]

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        self.text += text
        return [self._event(f"{self._kind}.delta", **self._place, delta=text)]

    def end(self, status: Status) -> tuple[list[Event], Item]:
        events, item = OpenItem.end(self, status)
        done = "reasoning_summary_part.done" if self.is_summary else "content_part.done"
        told = [
            self._event(f"{self._kind}.done", **self._place, text=self.text),
            self._event(done, **self._place, part=self._part(self.text)),
        ]
        return [*told, *events], item

    def body(self, status: Status = "in_progress") -> Item:
        parts = [self._part(self.text)] if self.text or status != "in_progress" else []
        item: Item = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        item["summary" if self.is_summary else "content"] = parts
        if self.is_sealed:
            item["encrypted_content"] = seal_reasoning(self.text) if status != "in_progress" else ""
        return item

    @property
    def _kind(self) -> str:
        return "reasoning_summary_text" if self.is_summary else "reasoning_text"

    @property
    def _place(self) -> dict[str, int]:
        return {"summary_index" if self.is_summary else "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text" if self.is_summary else "reasoning_text", "text": text}


@dataclass(slots=True, kw_only=True)
class FunctionCall(OpenItem):
    """A call with a JSON object."""

    called_as: CalledAs
    call_id: str

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        self.text += text
        return [self._event("function_call_arguments.delta", delta=text)]

    def end(self, status: Status) -> tuple[list[Event], Item]:
        events, item = OpenItem.end(self, status)
        name = self.called_as.name
        return [self._event("function_call_arguments.done", name=name, arguments=self.text), *events], item

    def body(self, status: Status = "in_progress") -> Item:
        return _call(self, "function_call", status, {"arguments": self.text})


@dataclass(slots=True, kw_only=True)
class CustomCall(OpenItem):
    """A call with text. The model wrote it as the one field of an object: it is told when that is whole."""

    called_as: CalledAs
    call_id: str

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        self.text += text
        return []

    def end(self, status: Status) -> tuple[list[Event], Item]:
        events, item = OpenItem.end(self, status)
        told = [
            self._event("custom_tool_call_input.delta", delta=item["input"]),
            self._event("custom_tool_call_input.done", input=item["input"]),
        ]
        return [*told, *events], item

    def body(self, status: Status = "in_progress") -> Item:
        said = custom_input(self.text) if status == "completed" else ""
        return _call(self, "custom_tool_call", status, {"input": said})


Call = FunctionCall | CustomCall


def _call(call: Call, kind: str, status: Status, said: dict[str, str]) -> Item:
    item = {"id": call.id, "type": kind, "status": status, "call_id": call.call_id}
    item |= {"name": call.called_as.name, **said}
    if call.called_as.namespace is not None:
        item["namespace"] = call.called_as.namespace
    return item


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
