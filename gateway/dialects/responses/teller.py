"""OpenAI's Responses API: the events of a stream, and the response object that they add up to.

Format: the types of OpenAI's own client, `openai.types.responses`. What Codex needs of it: a `type` and a
rising `sequence_number` in all data, `output_item.added` before any part, keep-alives as data, and an end.

A call that comes to no end is never told as done, since clients run every call that is: it keeps its
`output_index`, and the final output holds what was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.derail.body import derail_body
from gateway.dialects.answer import Answer
from gateway.dialects.frames import Body, Frame, Silence
from gateway.dialects.openai import call_id, chat_logprob
from gateway.errors import KINDS, GatewayError
from gateway.text.parsing import Arguments, CallBegun, CallDropped, CallEnded, Content, Part, Reasoning
from workers.messages import Finished, Tokens

from .echo import unpack
from .ids import item_id, response_id
from .items import Call, CustomCall, Event, FunctionCall, Item, Message, OpenItem, Status, Thought

CODES = {
    "context_length_exceeded": "context_length_exceeded",
    "context_exceeded": "context_length_exceeded",
    "invalid_request_error": "invalid_prompt",
    "rate_limit_error": "rate_limit_exceeded",
}
"""By an error's kind or type."""

LASTING = frozenset(kind for kind, traits in KINDS.items() if not traits.retryable) - {"internal_error"}
"""Kinds of which another try has the same end, and `cancelled`, which was wanted. Codex sends again whatever
has none of the first two codes, and shows the message of `invalid_prompt`.
"""


def error_code(error: GatewayError) -> str:
    """OpenAI's word for why a response failed."""
    rest = "invalid_prompt" if error.kind in LASTING else "server_error"
    return CODES.get(error.kind) or CODES.get(error.type, rest)


class ResponsesTeller:
    """POST /v1/responses."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._echo = unpack(answer.shape.echo)
        self._id = response_id(answer.run_id)
        self._num_events = 0
        self._num_items = 0  # that have begun
        self._num_calls = 0
        self._output: list[Item] = []  # those that are over
        self._open: OpenItem | None = None
        self._logprobs: list[Any] = []  # of text that is still held back
        self._final: Body | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response may be read later."""
        return self._echo.is_stored

    def begin(self) -> list[Frame]:
        created = self.snapshot("queued" if self._echo.is_background else "in_progress")
        return self._frames(
            [
                Event("response.created", {"response": created}),
                Event("response.in_progress", {"response": {**created, "status": "in_progress"}}),
            ]
        )

    def more(self, parts: Sequence[Part], tokens: Tokens | None) -> list[Frame]:
        if self._echo.shows_logprobs and tokens is not None:
            self._logprobs += [chat_logprob(entry) for entry in tokens.logprobs]
        events = [event for part in parts for event in self._tell(part)]
        if not (self._open is None or isinstance(self._open, Message)):
            self._logprobs.clear()
        return self._frames(events)

    def silence(self) -> Silence:
        """Data, since Codex counts no comments. It repeats the last number: it is no event of the answer."""
        number = max(0, self._num_events - 1)
        return Silence(frames=[Frame({"type": "keepalive", "sequence_number": number}, event="keepalive")])

    def end(self) -> list[Frame]:
        is_whole = self._answer.finish_reason != "length"
        events = self._close("completed" if is_whole else "incomplete")
        final = self._finish("completed" if is_whole else "incomplete")
        return self._frames([*events, Event(f"response.{final['status']}", {"response": final})])

    def fail(self, error: GatewayError) -> list[Frame]:
        frames = [] if self._num_events else self.begin()
        events = self._close("incomplete")
        final = self._finish("cancelled" if error.kind == "cancelled" else "failed", error)
        return [*frames, *self._frames([*events, Event("response.failed", {"response": final})])]

    def body(self) -> Body:
        if self._final is None:
            self.end()
        assert self._final is not None
        return self._final

    def snapshot(self, status: str) -> Body:
        """The response before its end, as far as it has come."""
        output = [*self._output] if self._open is None else [*self._output, self._open.body()]
        return self._object(status, output)

    def _tell(self, part: Part) -> list[Event]:
        match part:
            case Reasoning(text):
                return [*self._opened(Thought), *self._add(text)]
            case Content(text):
                return [*self._opened(Message), *self._add(text)]
            case CallBegun(name):
                return [*self._close("completed"), *self._begin(self._new_call(name))]
            case Arguments(text):
                return self._add(text)
            case CallEnded():
                return self._end_item("completed")
            case CallDropped():
                self._open = None
                return []

    def _add(self, text: str) -> list[Event]:
        assert self._open is not None
        logprobs: list[Any] = []
        if isinstance(self._open, Message):
            logprobs, self._logprobs = self._logprobs, []
        return self._open.add(text, logprobs)

    def _opened(self, kind: type[Thought] | type[Message]) -> list[Event]:
        """The events after which an item of that kind is open."""
        if isinstance(self._open, kind):
            return []
        closing = self._close("completed")
        index = self._num_items
        if kind is Message:
            return [*closing, *self._begin(Message(item_id("msg", self._id, index), index))]
        thought = Thought(
            item_id("rs", self._id, index),
            index,
            is_summary=self._echo.shows_summary,
            is_sealed=self._echo.is_encrypted,
        )
        return [*closing, *self._begin(thought)]

    def _new_call(self, name: str) -> Call:
        called_as, index = self._echo.called_as(name), self._num_items
        own_id = call_id(self._answer, self._num_calls)
        self._num_calls += 1
        if called_as.is_custom:
            place = item_id("ctc", self._id, index)
            return CustomCall(place, index, called_as=called_as, call_id=own_id)
        return FunctionCall(item_id("fc", self._id, index), index, called_as=called_as, call_id=own_id)

    def _begin(self, item: OpenItem) -> list[Event]:
        self._open = item
        self._num_items += 1
        return item.begin()

    def _close(self, status: Status) -> list[Event]:
        """An open call was cut off, for its own end closes it: it is left out."""
        if isinstance(self._open, (FunctionCall, CustomCall)):
            self._open = None
        return self._end_item(status)

    def _end_item(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        events, item = self._open.end(status)
        self._output.append(item)
        self._open = None
        return events

    def _finish(self, status: str, error: GatewayError | None = None) -> Body:
        answer = self._answer
        final = self._object(status, [*self._output])
        final["usage"] = self._usage()
        if status == "incomplete":
            final["incomplete_details"] = {"reason": self._cut_by}
        if error is not None:
            final["error"] = {"code": error_code(error), "message": error.message, "type": error.kind}
        if answer.derail is not None:
            final["tetrarch"] = {"derail": derail_body(answer.derail)}
        self._final = final
        return final

    @property
    def _cut_by(self) -> str:
        end = self._answer.turn_end
        is_derailed = isinstance(end, Finished) and end.reason == "derailed"
        return "derailed" if is_derailed else "max_output_tokens"

    def _object(self, status: str, output: list[Item]) -> Body:
        accepted = self._answer.accepted
        assert accepted is not None
        return {
            "id": self._id,
            "object": "response",
            "created_at": accepted.created,
            "status": status,
            "background": self._echo.is_background,
            "error": None,
            "incomplete_details": None,
            "model": accepted.model,
            "output": output,
            "store": self._echo.is_stored,
            "usage": None,
            **self._echo.shown,
        }

    def _usage(self) -> Body:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_thinking},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _frames(self, events: Sequence[Event]) -> list[Frame]:
        frames = []
        for event in events:
            data = {"type": event.type, "sequence_number": self._num_events, **event.fields}
            frames.append(Frame(data, event=event.type))
            self._num_events += 1
        return frames
