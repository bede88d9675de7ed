"""Reads a turn: thinking first, then content and calls. What is no call after all is content, as written."""

from __future__ import annotations

import re

from .formats import Reading
from .json_calls import arguments_object, json_call
from .parts import CallBegun, CallEnded, Content, Part, Reasoning, Said
from .python_calls import python_calls
from .tape import Steps, Tape, blanks, close, copy_until, match_up_to, one_of, skip_newlines, starts
from .xml_calls import FUNCTION, xml_call

MAX_BROKEN = 16
"""After so many openings without a call the rest is content: a flood of them costs no more."""

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_PYTHON, _PYTHON_END = "<|tool_call_start|>", "<|tool_call_end|>"
_LLAMA = "<|python_tag|>"
_MARKERS = {
    "tagged": (_TAG,),
    "xml": (_TAG, FUNCTION),
    "mistral": (_MISTRAL,),
    "llama": (_LLAMA,),
    "python": (_PYTHON,),
}
_NAME_CHARS = 300
_NAME = re.compile(r"([\w.\-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?=\{)")


class Reader:
    """Reads one turn as its text comes. The sum of the parts does not depend on how the text was cut."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._tape = Tape()
        self._num_broken = 0
        self._has_called = self._is_cut = False
        self.has_dropped = False  # something after the first call, because only that is wanted
        self.open_at: int | None = (
            None  # where what may hold calls begins that the text so far has not closed
        )
        self.is_unclosed = False  # a tag or bracket of these calls is still to come
        self._num_fed = 0
        self._steps: Steps[None] | None = self._read()

    def feed(self, text: str) -> list[Part]:
        """The parts that became certain."""
        self._tape.text += text
        self._num_fed += len(text)
        return self._go_on()

    def end(self) -> list[Part]:
        """The turn is over: the last parts."""
        self._tape.is_over = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
        parts = [*self._tape.parts]
        self._tape.parts.clear()
        return self._cut(parts) if self._reading.only_first_call else parts

    def _read(self) -> Steps[None]:
        yield from self._think()
        tape = self._tape
        self._open("")
        has_called = yield from self._bare_calls()
        self._close()
        markers = _MARKERS[self._reading.calls] if self._reading.calls is not None else ()
        while True:
            blank, marker = yield from copy_until(tape, markers, Content)
            if marker is None:
                if blank.strip() or (blank and not has_called):
                    tape.parts.append(Content(blank))
                return
            self._open(marker)
            found = yield from self._calls(marker)
            self._close()
            if found:
                has_called = True
                continue
            tape.parts.append(Content(blank + marker))
            self._num_broken += 1
            if self._num_broken == MAX_BROKEN:
                markers = ()

    def _open(self, marker: str) -> None:
        """Calls may begin behind a marker that was just read."""
        self.open_at = self._num_fed - len(self._tape.text) - len(marker)

    def _close(self) -> None:
        self.open_at, self.is_unclosed = None, False

    def _think(self) -> Steps[None]:
        if self._reading.thinking is None:
            return
        opening, closing = self._reading.thinking
        position = yield from blanks(self._tape)
        if (yield from starts(self._tape, opening, position)):
            self._tape.drop(position + len(opening))
        elif not self._reading.is_thinking:
            return
        yield from skip_newlines(self._tape)
        rest, tag = yield from copy_until(self._tape, (closing,), Reasoning)
        if tag is None and rest:
            self._tape.parts.append(Reasoning(rest))
        yield from skip_newlines(self._tape)

    def _calls(self, marker: str) -> Steps[bool]:
        """The calls that a marker opens; False: there is none, and nothing was read after it."""
        match marker:
            case "<tool_call>":
                return (yield from self._tagged())
            case "<function=":
                self._tape.text = FUNCTION + self._tape.text
                found = yield from xml_call(self._tape, 0, self._reading)
                if not found:
                    self._tape.drop(len(FUNCTION))
                return found
            case "[TOOL_CALLS]":
                return (yield from self._mistral())
            case "<|python_tag|>":
                return (yield from self._json_calls(is_bare=False))
            case _:
                return (yield from self._python(0, _PYTHON_END))

    def _bare_calls(self) -> Steps[bool]:
        """Calls without a marker, which some models leave out and engines take for a control token: only at
        the start, and only of tools that there are.
        """
        tools = [*self._reading.tools]
        if self._reading.calls not in ("mistral", "llama", "python") or not tools:
            return False
        position = yield from blanks(self._tape)
        if self._reading.calls == "llama":
            return (yield from self._json_calls(is_bare=True))
        if self._reading.calls == "python":
            heads = [f"[{name}(" for name in tools]
            if (yield from one_of(self._tape, heads, position)) is None:
                return False
            return (yield from self._python(position, None))
        if (yield from starts(self._tape, "[", position)):
            return (yield from self._json_list(position, is_bare=True))
        return (yield from self._named_bare())

    def _tagged(self) -> Steps[bool]:
        self.is_unclosed = True
        found = yield from self._call_in_tag()
        if found:
            yield from close(self._tape, _TAG_END)
        return found

    def _call_in_tag(self) -> Steps[bool]:
        position = yield from blanks(self._tape)
        if self._reading.calls == "xml" and (yield from starts(self._tape, FUNCTION, position)):
            return (yield from xml_call(self._tape, position, self._reading))
        return (yield from json_call(self._tape, position))

    def _json_calls(self, *, is_bare: bool) -> Steps[bool]:
        """Objects one after the other, with semicolons between them."""
        names = self._reading.tools if is_bare else None
        found = False
        position = yield from blanks(self._tape)
        while (yield from json_call(self._tape, position, names, is_certain=not is_bare)):
            found = True
            position = yield from blanks(self._tape)
            if (yield from starts(self._tape, ";", position)):
                position = yield from blanks(self._tape, position + 1)
        return found

    def _mistral(self) -> Steps[bool]:
        position = yield from blanks(self._tape)
        if (yield from starts(self._tape, "[", position)):
            return (yield from self._json_list(position, is_bare=False))
        head = yield from match_up_to(self._tape, _NAME, "{", _NAME_CHARS + 1, position)
        if head is None:
            return False
        yield from self._named(head[1], head.end())
        yield from self._named_bare()
        return True

    def _json_list(self, at: int, *, is_bare: bool) -> Steps[bool]:
        names = self._reading.tools if is_bare else None
        found = False
        self.is_unclosed = True
        position = yield from blanks(self._tape, at + 1)
        while (yield from json_call(self._tape, position, names, is_certain=not is_bare)):
            found = True
            end = yield from blanks(self._tape)
            following = yield from one_of(self._tape, (",", "]"), end)
            if following == "]":
                self._tape.drop(end + 1)
                self.is_unclosed = False
            if following != ",":
                break
            position = yield from blanks(self._tape, end + 1)
        return found

    def _named_bare(self) -> Steps[bool]:
        """`name{...}` of tools that there are, one after the other."""
        found = False
        while True:
            position = yield from blanks(self._tape)
            name = yield from one_of(self._tape, [*self._reading.tools], position)
            if name is None:
                return found
            position += len(name)
            if (yield from starts(self._tape, "[ARGS]", position)):
                position += len("[ARGS]")
            if not (yield from starts(self._tape, "{", position)):
                return found
            yield from self._named(name, position)
            found = True

    def _named(self, name: str, position: int) -> Steps[None]:
        self._tape.drop(position)
        self._tape.parts.append(CallBegun(name))
        yield from arguments_object(self._tape)

    def _python(self, at: int, closing: str | None) -> Steps[bool]:
        """A list of calls up to the closing tag, or up to the end of the turn."""
        start, num_tried = at, 0
        while True:
            end = self._tape.text.find(closing, start) if closing is not None else -1
            if end < 0 and not self._tape.is_over:
                start = max(at, len(self._tape.text) - len(closing or ""))
                yield
                continue
            calls = python_calls(self._tape.text[at : end if end >= 0 else None])
            if calls is not None:
                self._tape.parts += calls
                self._tape.drop(end + len(closing or "") if end >= 0 else len(self._tape.text))
                return True
            num_tried += 1
            if end < 0 or num_tried == MAX_BROKEN:
                return False
            start = end + 1

    def _cut(self, parts: list[Part]) -> list[Part]:
        """Parts up to the end of the first call."""
        kept: list[Part] = []
        for part in parts:
            if self._is_cut or (isinstance(part, CallBegun) and self._has_called):
                self._is_cut = self.has_dropped = True
                continue
            self._has_called |= isinstance(part, CallBegun)
            self._is_cut = isinstance(part, CallEnded) and part.is_whole
            kept.append(part)
        return kept


def read(reading: Reading, text: str) -> Said:
    """What a whole turn said."""
    reader, said = Reader(reading), Said()
    said.add(reader.feed(text))
    said.add(reader.end())
    return said
