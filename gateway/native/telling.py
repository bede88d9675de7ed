"""One run's events told in the native API's words, text and calls included. A replay tells the same. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from gateway.dialects.answer import Answer
from gateway.dialects.frames import Body, Frame, Silence
from gateway.errors import GatewayError
from gateway.flow.outlook import NO_OUTLOOK, Outlook
from gateway.http.shapes import Error
from gateway.runs.ends import call_id
from gateway.runs.events import AnyEvent
from gateway.runs.state import RunState, advance
from gateway.runs.told import Gap, Lifecycle, RunProgress, Told, progress, tell
from gateway.text.parsing import Arguments, CallBegun, CallDropped, CallEnded, Content, Reasoning, Spoken
from workers.messages import Dispatched, Failed, Progress

LOST = ("gap", "run_lost")
"""Kinds of failure that mean: what came between is not to be had."""


class TokenText(Told, frozen=True, kw_only=True, tag="token"):
    """More of the answer."""

    turn: int
    text: str


class Thinking(Told, frozen=True, kw_only=True, tag="thinking"):
    """More of the reasoning."""

    turn: int
    text: str


class ToolCallBegun(Told, frozen=True, kw_only=True, tag="tool_call.begun"):
    """A call of this tool begins."""

    turn: int
    id: str
    name: str


class ToolCallDelta(Told, frozen=True, kw_only=True, tag="tool_call.delta"):
    """More of its arguments, as JSON text."""

    turn: int
    id: str
    arguments: str


class ToolCallMade(Told, frozen=True, kw_only=True, tag="tool_call"):
    """The whole call. Not `whole`: its arguments are no JSON object."""

    turn: int
    id: str
    name: str
    arguments: str
    whole: bool


PublicEvent = TokenText | Thinking | ToolCallBegun | ToolCallDelta | ToolCallMade | Lifecycle


class StreamFailed(Struct, frozen=True, tag_field="type", tag="error"):
    """The stream ends here, what it tells of does not: read on behind the last id."""

    error: Error


class KeepAlive(Struct, frozen=True, tag_field="type", tag="keepalive"):
    """The session's stream is still there."""


StreamedEvent = PublicEvent | StreamFailed
SessionEvent = StreamedEvent | KeepAlive


class RunTeller:
    """Tells one run. Feed it all events from the first. `look`: what is to be expected of it in a state."""

    def __init__(self, run_id: str, look: Callable[[RunState], Outlook] = lambda state: NO_OUTLOOK) -> None:
        self.run_id = run_id
        self.state = RunState()
        self._look = look
        self._told_pos: int | None = None  # the last place in line that was told
        self._answer = Answer(run_id)
        self._turn = 1  # whose text comes: the last that was sent to an engine
        self._num_calls = 0  # of the whole run
        self._past_calls = 0  # of the turns before this one

    def feed(self, event_id: str, event: AnyEvent) -> list[PublicEvent]:
        """What one event tells."""
        before, turn = self.state.last_id, self._turn
        parts = self._answer.feed(event)
        told: list[PublicEvent] = [
            self._part(part, turn) for part in parts if not isinstance(part, CallDropped)
        ]  # which the event that opened the turn has told
        self.state = advance(self.state, event_id, event)
        if isinstance(event, Dispatched) and self.state.turn != turn:
            self._turn, self._past_calls = self.state.turn, self._num_calls
        if isinstance(event, Failed) and event.error in LOST:
            told.append(Gap(run=self.run_id, after=before, before=event_id))
        if isinstance(event, Progress):
            return [*told, self._progress()]
        return [*told, *tell(self.run_id, event, self.state)]

    def silence(self) -> Silence:
        """A keep-alive that tells how far it is."""
        return Silence(frames=frames([self._progress()]))

    def news(self) -> list[Frame]:
        """How far it is, if its place in line is another than the one that was told."""
        before, told = self._told_pos, self._progress()
        return [] if told.queue_pos in (None, before) else frames([told])

    def _progress(self) -> RunProgress:
        told = progress(self.run_id, self.state, self._look(self.state))
        self._told_pos = told.queue_pos
        return told

    def fail(self, error: GatewayError) -> list[Frame]:
        """The stream ends here, the run does not: read on behind the last id."""
        return failure_frames(error)

    def _part(self, part: Spoken, turn: int) -> PublicEvent:
        run = self.run_id
        match part:
            case Content(text):
                return TokenText(run=run, turn=turn, text=text)
            case Reasoning(text):
                return Thinking(run=run, turn=turn, text=text)
            case CallBegun(name):
                self._num_calls += 1
                return ToolCallBegun(run=run, turn=turn, id=self._call_id(turn), name=name)
            case Arguments(text):
                return ToolCallDelta(run=run, turn=turn, id=self._call_id(turn), arguments=text)
            case CallEnded(is_whole):
                call = self._answer.said.calls[self._num_calls - 1]
                return ToolCallMade(
                    run=run,
                    turn=turn,
                    id=self._call_id(turn),
                    name=call.name,
                    arguments=call.arguments,
                    whole=is_whole,
                )

    def _call_id(self, turn: int) -> str:
        return call_id(self.run_id, turn, self._num_calls - self._past_calls - 1)


def frames(events: Sequence[Told]) -> list[Frame]:
    """As server-sent events, named by their types."""
    return [Frame(msgspec.json.encode(event), event=_type_of(event)) for event in events]


def failure_frames(error: GatewayError) -> list[Frame]:
    """A stream's failure."""
    body: Body = {"type": "error", **error.body()}
    return [Frame(body, event="error")]


def _type_of(event: Told) -> str:
    tag = type(event).__struct_config__.tag
    assert isinstance(tag, str)
    return tag
