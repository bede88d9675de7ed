"""A run's events folded into what its caller gets, before any API gives it words. Pure.

A call that its turn left open is dropped when another turn begins; one that was over is told, and stays.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gateway.errors import GatewayError, TurnFailed
from gateway.runs.events import AnyEvent, TurnOpened
from gateway.text.parsing import (
    CallDropped,
    CallEnded,
    Content,
    Part,
    Reader,
    Reading,
    Reasoning,
    Said,
    joined,
)
from gateway.text.tokenizer import unpack_token_ids
from workers.messages import (
    Accepted,
    Cancelled,
    ChosenLogprob,
    Derail,
    Derailed,
    Dispatched,
    Failed,
    Finished,
    Paused,
    Progress,
    RunEnded,
    Started,
    Tokens,
    TurnEnd,
    Usage,
)

Endpoint = Literal["chat", "text", "responses", "messages", "run"]


class AnswerShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the caller wants the answer. Kept in the run's Accepted event, so that a resume looks the same."""

    endpoint: Endpoint
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    tenant: str = ""
    reading: Reading = Reading()  # how the text is taken apart; text completions are not
    echo: dict[str, Any] = {}  # of the request: what the dialect's answer repeats

    @property
    def is_detached(self) -> bool:
        """Whether the answer was asked for in the background: it outlives its readers."""
        return bool(self.echo.get("background"))


_decode_shape = msgspec.msgpack.Decoder(AnswerShape).decode


class Answer:
    """The fold over one run's events. Feed them in order; each returns the parts that became certain."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.shape = AnswerShape(endpoint="chat")
        self.accepted: Accepted | None = None
        self.token_ids = array("I")  # of the present turn
        self.num_processed = 0  # prompt tokens so far, cached ones included
        self.num_cached = 0  # of the present turn's prompt
        self.num_thinking = 0  # generated tokens of all turns that came while reasoning was read
        self.turn_end: TurnEnd | None = None
        self.run_end: RunEnded | None = None
        self.derail: Derail | None = None
        self.is_stopped = False  # its reader has asked the turn to end
        self.said = Said()
        self.logprobs: list[ChosenLogprob] = []
        self._turn = 1
        self._usage_before = Usage()  # of earlier turns
        self._num_calls_before = 0  # likewise
        self._reader = Reader(self.shape.reading)
        self._held: list[Part] = []  # a call's end, as long as a steer would still drop that call
        self._is_thinking: bool | None = None  # None: the turn has not begun to, and may; False: no more
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The present turn's, as generated."""
        return "".join(self._texts)

    @property
    def turn(self) -> int:
        """The run's present turn, from 1: text, ids and turn_end are its."""
        return self._turn

    @property
    def ended(self) -> bool:
        return self.run_end is not None

    @property
    def is_read(self) -> bool:
        """Whether the text is taken apart into reasoning, content and calls."""
        return self.shape.endpoint != "text"

    @property
    def num_prompt_tokens(self) -> int:
        return self.accepted.prompt_tokens if self.accepted is not None else 0

    @property
    def usage(self) -> Usage:
        """Of all turns."""
        before, now = self._usage_before, self.turn_end.usage if self.turn_end is not None else Usage()
        return _sum(before, now)

    @property
    def is_complete(self) -> bool:
        """Whether all was said that the caller wants, though the turn goes on: the first call, say."""
        return self._reader.has_dropped

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`, of the last turn. An answer that ends within a call is cut short,
        by whatever: the call is not whole. A derailed one was cut short as well; `derail` says so.
        """
        reason = self.turn_end.reason if isinstance(self.turn_end, Finished) else "stop"
        if reason != "stop":
            return "length"
        calls = self.said.calls[self._num_calls_before :]
        if not calls:
            return reason
        if not calls[-1].is_over:
            return "length"
        return "tool_calls" if any(call.is_whole for call in calls) else reason

    def feed(self, event: AnyEvent) -> list[Part]:
        """Takes an event in."""
        match event:
            case Accepted():
                self.accepted = event
                self.shape = _decode_shape(event.request)
                self._reader = Reader(self.shape.reading)
            case TurnOpened():
                return self._open_turn(event)
            case Dispatched(turn=turn):
                return self._begin_turn(turn)
            case Started(cached_tokens=num_tokens):
                self.num_processed = self.num_cached = num_tokens
            case Progress(processed_tokens=num_tokens):
                self.num_processed = num_tokens
            case Tokens():
                return self._feed_tokens(event)
            case Derailed(what=derail):
                self.derail = derail
            case Paused():
                self.turn_end = event
            case Finished() | Cancelled() | Failed() | RunEnded():
                return self._end(event)
        return []

    def _end(self, event: Finished | Cancelled | Failed | RunEnded) -> list[Part]:
        match event:
            case Cancelled(usage=usage, timings=timings) if self.is_complete:
                self.turn_end = Finished(reason="stop", usage=usage, timings=timings)
            case RunEnded():
                self.run_end = event
                self.turn_end = self._unless_stopped()
            case _:
                self.turn_end = self._unless_short(event)
        return self._last_parts()

    def failure(self) -> GatewayError | None:
        """Why the run ended without an answer; None if it did not end, or ended well."""
        if self.run_end is not None and self.run_end.error:
            return TurnFailed(self.run_end.error, self.run_end.message, retryable=False)
        match self.turn_end:
            case Finished():
                return None
            case Cancelled():
                return TurnFailed("cancelled", "The run was cancelled.", retryable=False)
            case Failed(error=error, message=message, retryable=retryable, retry_after=seconds):
                return TurnFailed(error, message, retryable=retryable, retry_after=seconds)
        if not self.ended:
            return None
        return TurnFailed("internal_error", "The run ended without saying why.")

    def _last_parts(self) -> list[Part]:
        """What only the turn's end makes certain."""
        return self._add(self._reader.end()) if self.is_read else []

    def _open_turn(self, opened: TurnOpened) -> list[Part]:
        """Another turn is to come: what the turn before has begun last may be no part of the answer."""
        if opened.dropped_call is not None:
            self._reader, self._held = Reader(Reading()), []
        parts = self._last_parts()
        with contextlib.suppress(msgspec.MsgspecError):  # a gateway that did not say
            self.shape = _decode_shape(opened.request)
        return parts

    def _begin_turn(self, turn: int) -> list[Part]:
        """A further turn of the run, or the same one sent again."""
        parts: list[Part] = []
        if turn != self._turn:
            parts = [*self._last_parts(), *self._drop_call()]
            self._turn = turn
            self._usage_before = self.usage
            self._num_calls_before = len(self.said.calls)
            self._reader = Reader(self.shape.reading)
            self._is_thinking = None
            self._texts.clear()
            del self.token_ids[:]
        self.turn_end = None
        return parts

    def _drop_call(self) -> list[Part]:
        """The turn's last call, if it is not over."""
        calls = self.said.calls[self._num_calls_before :]
        return self._add([CallDropped()]) if calls and not calls[-1].is_over else []

    def _unless_short(self, end: TurnEnd) -> TurnEnd:
        """Tokens sent = tokens in usage; otherwise the text that came is not the whole answer."""
        num_counted = end.usage.completion_tokens
        if not isinstance(end, Finished) or len(self.token_ids) == num_counted:
            return end
        message = f"Of {num_counted} generated tokens {len(self.token_ids)} arrived. Send the call again."
        return Failed(error="gap", message=message, retryable=True, usage=end.usage, timings=end.timings)

    def _unless_stopped(self) -> TurnEnd | None:
        """A detector of the gateway has ended the run: what there is of the last turn is the answer."""
        end = self.turn_end
        is_stopped = self.run_end is not None and self.run_end.state == "derailed"
        if is_stopped and isinstance(end, Finished | Cancelled):
            return Finished(reason="derailed", usage=end.usage, timings=end.timings)
        return end

    def _feed_tokens(self, event: Tokens) -> list[Part]:
        self.token_ids.extend(unpack_token_ids(event.token_ids))
        self._texts.append(event.text)
        self.logprobs.extend(event.logprobs)
        parts = self._add(self._reader.feed(event.text)) if self.is_read else []
        if self.shape.reading.thinking is not None and self._is_thinking is not False:
            self._count_thinking(event, parts)
        return parts

    def _count_thinking(self, event: Tokens, parts: Sequence[Part]) -> None:
        """To the event, not to the token: one may hold the end of thinking and the answer's first words."""
        said = [part for part in parts if not (isinstance(part, Content) and not part.text.strip())]
        thinks_on = not parts and (self._is_thinking or self.shape.reading.is_thinking)
        if thinks_on or any(isinstance(part, Reasoning) for part in said):
            self._is_thinking = True
            self.num_thinking += len(event.token_ids) // 4
        if any(not isinstance(part, Reasoning) for part in said):
            self._is_thinking = False

    def _add(self, parts: Sequence[Part]) -> list[Part]:
        fresh = joined([*self._held, *parts])
        is_held = self._reader.is_unclosed and bool(fresh) and isinstance(fresh[-1], CallEnded)
        self._held = [fresh.pop()] if is_held else []
        self.said.add(fresh)
        return fresh


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
    )
