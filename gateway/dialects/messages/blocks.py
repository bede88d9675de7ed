"""The content blocks of an answer as they come, and the events that open, fill and close them. Pure.

A call is told once it is over: its input must be an object in a whole answer and in a stream alike. So one
that is cut off or dropped is told by neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from gateway.dialects.frames import Body, Frame
from gateway.text.parsing import Arguments, CallBegun, CallDropped, CallEnded, Content, Part, Reasoning

from .signature import sign

Kind = Literal["thinking", "text", "tool_use"]


@dataclass(slots=True)
class Block:
    """One block."""

    kind: Kind
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def frame(kind: str, **fields: object) -> Frame:
    """An event, whose type its data repeats."""
    return Frame({"type": kind, **fields}, event=kind)


class Blocks:
    """All blocks of one answer. Equal parts make equal events. `shows_thoughts`: their text is sent."""

    def __init__(self, run_id: str, *, shows_thoughts: bool) -> None:
        self._run_id = run_id
        self._shows_thoughts = shows_thoughts
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._call: Block | None = None  # one that is not over yet

    def add(self, parts: Sequence[Part], num_tokens: int) -> list[Frame]:
        """Takes parts in; `num_tokens` brought them, or more of a thought that is not shown."""
        frames: list[Frame] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    frames += self._fill("thinking", text, num_tokens)
                case Content(text):
                    frames += self._fill("text", text, num_tokens)
                case CallBegun(name):
                    self._call = Block("tool_use", name)
                    frames += self.close()
                case Arguments(text):
                    assert self._call is not None
                    self._call.pieces.append(text)
                case CallEnded(is_whole):
                    frames += self._end_call(is_whole=is_whole)
                case CallDropped():
                    self._call = None
        return frames

    def close(self) -> list[Frame]:
        """Closes the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        index, frames = len(self._blocks) - 1, []
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature(block)}
            frames.append(frame("content_block_delta", index=index, delta=delta))
        return [*frames, frame("content_block_stop", index=index)]

    def bodies(self) -> list[Body]:
        """The blocks of a whole answer: what the events add up to."""
        return [self._body(index, block) for index, block in enumerate(self._blocks)]

    def _end_call(self, *, is_whole: bool) -> list[Frame]:
        """A call whose input cannot be read is told as text. One that is cut off comes to no end: clients
        would run it.
        """
        call, self._call = self._call, None
        assert call is not None
        if is_whole:
            opening = self._begin(Block("tool_use", call.name))
            return [opening, *self._fill("tool_use", call.text, 0), *self.close()]
        return [*self._fill("text", f"{call.name} {call.text}", 0), *self.close()]

    def _begin(self, block: Block) -> Frame:
        self._blocks.append(block)
        self._open = block
        index = len(self._blocks) - 1
        return frame("content_block_start", index=index, content_block=self._empty(index, block))

    def _fill(self, kind: Kind, text: str, num_tokens: int) -> list[Frame]:
        if not text:
            return []
        frames = []
        if self._open is None or self._open.kind != kind:
            frames = [*self.close(), self._begin(Block(kind))]
        assert self._open is not None
        self._open.pieces.append(text)
        delta = self._delta(kind, text, num_tokens)
        return [*frames, frame("content_block_delta", index=len(self._blocks) - 1, delta=delta)]

    def _delta(self, kind: Kind, text: str, num_tokens: int) -> Body:
        if kind == "text":
            return {"type": "text_delta", "text": text}
        if kind == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        if self._shows_thoughts:
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "thinking_delta", "thinking": "", "estimated_tokens": num_tokens}

    def _empty(self, index: int, block: Block) -> Body:
        match block.kind:
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                return {"type": "text", "text": ""}
            case "tool_use":
                return {
                    "type": "tool_use",
                    "id": tool_use_id(self._run_id, index),
                    "name": block.name,
                    "input": {},
                }

    def _body(self, index: int, block: Block) -> Body:
        empty = self._empty(index, block)
        match block.kind:
            case "thinking":
                shown = block.text if self._shows_thoughts else ""
                return {**empty, "thinking": shown, "signature": self._signature(block)}
            case "text":
                return {**empty, "text": block.text}
            case "tool_use":
                return {**empty, "input": msgspec.json.decode(block.text)}

    def _signature(self, block: Block) -> str:
        return sign(self._run_id, block.text, carries_text=not self._shows_thoughts)


def tool_use_id(run_id: str, index: int) -> str:
    """The same in every telling; `index` is the block's."""
    return f"toolu_{hashlib.blake2b(f'{run_id} {index}'.encode(), digest_size=12).hexdigest()}"
