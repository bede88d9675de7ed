"""What a run's turns said, as ids and text, next to the fold that says where it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from gateway.dialects.answer import AnswerShape
from gateway.text.parsing import Content, Reader, Reasoning, Said, read
from gateway.text.parsing.open_calls import OpenCall, open_call
from workers.messages import Accepted, Finished, Tokens, TurnEnd

from .events import AnyEvent, TurnOpened, decode

_decode_shape = msgspec.msgpack.Decoder(AnswerShape).decode
_PLAIN = AnswerShape(endpoint="text")


def shape_of(request: bytes) -> AnswerShape:
    """How an answer is to be read; as plain text where its gateway did not say."""
    try:
        return _decode_shape(request)
    except msgspec.MsgspecError:
        return _PLAIN


@dataclass(slots=True)
class TurnText:
    """One turn. `added`: the messages that open it behind the turn before."""

    shape: AnswerShape = _PLAIN
    added: tuple[bytes, ...] = ()
    prompt_tokens: int = 0
    ids: bytearray = field(default_factory=bytearray)
    texts: list[str] = field(default_factory=list)
    kept_tokens: int | None = None  # that the next turn goes on behind; None: there is none yet
    thinking_tokens: int = 0
    _reader: Reader | None = None  # until the thinking is over

    @property
    def text(self) -> str:
        """As generated."""
        return "".join(self.texts)

    @property
    def kept_ids(self) -> bytes:
        """What the next turn's prompt has of it."""
        return bytes(self.ids if self.kept_tokens is None else self.ids[: 4 * self.kept_tokens])

    def said(self) -> Said:
        """Its text taken apart."""
        if self.shape.endpoint == "text":
            return Said(content=self.text)
        return read(self.shape.reading, self.text)

    def open_call(self, end: TurnEnd | None) -> OpenCall | None:
        """The tool call that it was cut off in; None where it was in none, or came to its end by itself."""
        is_whole = isinstance(end, Finished) and end.reason == "stop"
        return None if is_whole else open_call(self.shape.reading, self.text)

    def feed(self, event: Tokens) -> None:
        """More of it."""
        is_first = not self.ids
        self.ids += event.token_ids
        self.texts.append(event.text)
        if is_first and self.shape.reading.thinking is not None:
            self._reader = Reader(self.shape.reading)
        if self._reader is not None:
            self._count_thinking(event)

    def _count_thinking(self, event: Tokens) -> None:
        """To the event, not to the token: one may hold the end of thinking and the answer's first words."""
        assert self._reader is not None
        parts = self._reader.feed(event.text)
        if any(isinstance(part, Reasoning) for part in parts) or (
            not parts and (self.thinking_tokens or self.shape.reading.is_thinking)
        ):
            self.thinking_tokens += len(event.token_ids) // 4
        if any(not isinstance(part, Reasoning) for part in parts if not _is_blank(part)):
            self._reader = None


def _is_blank(part: object) -> bool:
    return isinstance(part, Content) and not part.text.strip()


class Transcript:
    """All turns of a run, the present one last. `past_calls`: whole tool calls of the turns before it."""

    def __init__(self) -> None:
        self.turns = [TurnText()]
        self.past_calls = 0
        self._past_thinking = 0

    @property
    def current(self) -> TurnText:
        """The last turn."""
        return self.turns[-1]

    @property
    def ends(self) -> list[int]:
        """How many tokens the run has at each turn's end, prompts included."""
        return [turn.prompt_tokens + len(turn.kept_ids) // 4 for turn in self.turns]

    @property
    def thinking_tokens(self) -> int:
        """Of the whole run."""
        return self._past_thinking + self.current.thinking_tokens

    def num_calls(self, said: Said) -> int:
        """Whole tool calls of the run, whose last turn said that."""
        return self.past_calls + whole_calls(said)

    def advance(self, event: AnyEvent) -> None:
        """One more event of the run."""
        match event:
            case Accepted(request=request, prompt_tokens=prompt_tokens):
                self.current.shape = shape_of(bytes(request))
                self.current.prompt_tokens = prompt_tokens
            case Tokens():
                self.current.feed(event)
            case TurnOpened(added=added, request=request, kept_tokens=kept):
                self.past_calls += whole_calls(self.current.said())
                self._past_thinking += self.current.thinking_tokens
                self.current.kept_tokens = kept
                self.turns.append(TurnText(shape_of(bytes(request)), added, event.prompt_tokens))

    def advance_over(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Further encoded (id, message) pairs."""
        for _, message in entries:
            if (event := decode(message)) is not None:
                self.advance(event)


def whole_calls(said: Said) -> int:
    """How many calls may be obeyed."""
    return sum(call.is_whole for call in said.calls)
