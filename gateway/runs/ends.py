"""What an ended run came to, as it is kept: a pure function of its events."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from msgspec import Raw, structs

from gateway.store.results import ResultCall, ResultError, RunResult
from gateway.text.parsing import Said
from workers.messages import Derail, Failed, Finished, RunEnded, encode

from .events import CallAsked
from .spec import encode_spec
from .state import RunState
from .transcript import Transcript, TurnText


def call_id(run_id: str, turn: int, index: int) -> str:
    """A tool call's id: the same at each replay, and that of the dialects where the run has one turn."""
    name = f"{run_id}/{index}" if turn == 1 else f"{run_id}/{turn}/{index}"
    return f"call_{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"


def calls_of(run_id: str, turn: int, said: Said) -> tuple[CallAsked, ...]:
    """The whole calls of a turn."""
    return tuple(
        CallAsked(id=call_id(run_id, turn, index), name=call.name, arguments=call.arguments)
        for index, call in enumerate(said.calls)
        if call.is_whole
    )


@dataclass(frozen=True, slots=True)
class Told:
    """A run's events, folded."""

    run_id: str
    state: RunState
    transcript: Transcript
    derail: Derail | None = None  # what a gateway's detector found
    is_kept: bool = True  # what it has said


def result_of(told: Told, ended: RunEnded, now: float) -> RunResult:
    """The result of a run that ends so; `now` in unix seconds. What was said is kept, however short, unless
    its caller has cancelled it and does not want that.
    """
    state, turn = told.state, _last_words(told.transcript)
    said = turn.said()
    number = told.transcript.turns.index(turn) + 1
    calls = calls_of(told.run_id, number, said)
    result = RunResult(
        state=ended.state,
        accepted=_accepted(state),
        text=said.content,
        reasoning=said.reasoning,
        calls=tuple(ResultCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls),
        finish_reason=_reason(state, calls),
        usage=state.usage,
        thinking_tokens=told.transcript.thinking_tokens,
        tool_calls=told.transcript.num_calls(told.transcript.current.said()),
        timings=state.timings,
        turns=state.turn,
        ends=tuple(told.transcript.ends),
        checkpoints={str(name): position for name, position in state.checkpoints.items()},
        attempts=state.attempt,
        started=state.accepted_at,
        ended=now,
        derail=state.derail or told.derail,
        error=_error(state, ended),
        is_partial=ended.state != "completed",
    )
    if told.is_kept:
        return result
    derail = None if result.derail is None else structs.replace(result.derail, excerpt="")
    return structs.replace(result, text="", reasoning="", calls=(), derail=derail, is_dropped=True)


def _accepted(state: RunState) -> bytes:
    """Its first event without what may be large: the body, its schema and how its answer is read."""
    if state.accepted is None:
        return b""
    spec = structs.replace(state.spec, body=b"", result_schema=b"")
    kept = structs.replace(state.accepted, spec=encode_spec(spec), request=Raw(b"\xc0"))
    return encode(kept)


def _last_words(transcript: Transcript) -> TurnText:
    """The last turn that said something: one that was cut off before its first token has no result."""
    return next((turn for turn in reversed(transcript.turns) if turn.ids), transcript.current)


def _reason(state: RunState, calls: tuple[CallAsked, ...]) -> str | None:
    if not isinstance(state.turn_end, Finished):
        return None
    return "tool_calls" if calls and state.turn_end.reason == "stop" else state.turn_end.reason


def _error(state: RunState, ended: RunEnded) -> ResultError | None:
    if ended.error:
        return ResultError(code=ended.error, message=ended.message)
    match state.turn_end:
        case Failed(error=error, message=message, retryable=retryable):
            return ResultError(code=error, message=message, retryable=retryable)
    return None
