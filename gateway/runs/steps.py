"""A run's next step, from where it is and what is wanted of it. Pure, and the same whoever asks and when.

Decides for the run's owner only; what becomes of a run without one is the caretaker's. Knows no bus.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.text.parsing import Said
from workers.messages import Cancelled, Failed, Finished, RunEnded

from .commands import RespondRun, SteerRun
from .events import Cause
from .state import Phase, RunState, end_of
from .transcript import whole_calls
from .wishes import Left

ONE_TURN = "A run of this kind has one turn only: send another call."


@dataclass(frozen=True, slots=True)
class Enter:
    """Into the line, if it is not there."""


@dataclass(frozen=True, slots=True)
class AskEngine:
    """Tell the engine to end the attempt, or to pause it."""

    what: str  # "cancel" or "pause"


@dataclass(frozen=True, slots=True)
class Verdict:
    """End the attempt in the engine's place."""

    what: str  # "cancel" or "pause"


@dataclass(frozen=True, slots=True)
class GoOn:
    """A paused turn waits for a worker again."""

    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """Another turn, with what these commands bring."""

    cause: Cause
    steers: tuple[SteerRun, ...] = ()
    response: RespondRun | None = None


@dataclass(frozen=True, slots=True)
class AskCaller:
    """The run waits for its caller; `with_calls`: for the results of the turn's calls."""

    with_calls: bool


@dataclass(frozen=True, slots=True)
class Fork:
    """Make the children that are asked for."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """These commands cannot be obeyed."""

    commands: tuple[str, ...]
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class End:
    """Write the run's end."""

    ended: RunEnded


Step = Enter | AskEngine | Verdict | GoOn | Open | AskCaller | Fork | Refuse | End


@dataclass(frozen=True, slots=True)
class View:
    """A run as its owner sees it."""

    state: RunState
    left: Left
    over: RunEnded | None = None  # a limit that is reached
    short: RunEnded | None = None  # the limit that cut the turn short, if its reason is `length`
    overdrawn: RunEnded | None = None  # the limit that the turn has left behind it
    said: Said | None = None  # by the turn, where it has ended
    can_continue: bool = True  # whether further turns can be made
    can_fork: bool = True  # whether its tokens are known here


def next_step(view: View) -> Step | None:
    """None: nothing is to be done until something happens."""
    refusal = _refusal(view)
    if refusal is not None:
        return refusal
    if view.left.forks_past:
        return Fork()
    match view.state.phase:
        case Phase.WAITING:
            return _waiting(view)
        case Phase.DISPATCHED | Phase.PREFILLING | Phase.GENERATING:
            return _on_engine(view)
        case Phase.PAUSED:
            return _paused(view)
        case Phase.TURN_ENDED:
            return _turn_ended(view)
        case Phase.INPUT_REQUIRED:
            return _input_required(view)
        case Phase.ENDED:
            return None


def _refusal(view: View) -> Refuse | None:
    left = view.left
    if view.state.phase is not Phase.INPUT_REQUIRED and left.responses:
        names = tuple(response.command for response in left.responses)
        return Refuse(names, "no_input_required", "The run waits for no input: see its status.")
    if not view.can_continue and left.steers:
        names = tuple(steer.command for steer in left.steers)
        return Refuse(names, "cannot_continue", ONE_TURN)
    if not view.can_fork and left.forks:
        names = tuple(fork.command for fork in left.forks)
        return Refuse(names, "cannot_continue", "The gateway that had this call's tokens is gone.")
    return None


def _waiting(view: View) -> Step:
    left = view.left
    untouched = left.cancel is not None and view.state.turn_tokens == 0
    if view.over is not None or left.cancels_now or untouched:
        return Verdict("cancel")
    if left.hold is not None or left.forks_now or left.steers_now:
        return Verdict("pause")
    return Enter()


def _on_engine(view: View) -> Step | None:
    left = view.left
    if view.over is not None or left.cancels_now:
        return AskEngine("cancel")
    if left.hold is not None or left.forks_now or left.steers_now:
        return AskEngine("pause")
    return None


def _paused(view: View) -> Step | None:
    left = view.left
    if view.over is not None or left.cancel is not None:
        return Verdict("cancel")
    if left.forks_now:
        return Fork()
    if left.steers_now:
        return Open("steer", tuple(steer for steer in left.steers if steer.when == "now"))
    return GoOn(left.resumes) if left.hold is None else None


def _turn_ended(view: View) -> Step:
    left = view.left
    match view.state.turn_end:
        case Finished(reason="derailed") if view.state.spec.derail == "stop":
            return End(RunEnded(state="derailed"))
        case Finished(reason="length") if view.short is not None:
            return End(view.short)
        case Finished():
            return _finished(view)
        case Cancelled() as end:
            return End(view.over or _cancel_end(left) or end_of(end))
        case Failed() as end:
            return End(_rejection(view.state, end) or end_of(end))
    raise AssertionError(view.state)


def _rejection(state: RunState, end: Failed) -> RunEnded | None:
    """The end of a run that no engine was ever given, and that none ever could."""
    if state.incarnation is not None or end.retryable:
        return None
    return RunEnded(state="rejected", error=end.error, message=end.message)


def _finished(view: View) -> Step:
    spec, left = view.state.spec, view.left
    calls = spec.kind == "run" and view.said is not None and whole_calls(view.said) > 0
    goes_on = calls or bool(left.steers) or spec.on_end == "await_input"
    if left.forks_now:
        return Fork()
    if (stopped := _cancel_end(left)) is not None:
        return End(stopped)
    over = view.overdrawn or (view.over if goes_on else None)
    if over is not None:
        return End(over)
    if left.cancel is not None and goes_on:
        return End(_cancel_end(left) or RunEnded(state="cancelled"))
    if calls:
        return AskCaller(with_calls=True)
    if left.steers:
        return _open_next(left)
    if spec.on_end == "await_input":
        return AskCaller(with_calls=False)
    return End(RunEnded(state="completed"))


def _cancel_end(left: Left) -> RunEnded | None:
    """The end that a detector's cancel asks for."""
    derailed = left.cancel is not None and left.cancel.derail is not None
    return RunEnded(state="derailed") if derailed else None


def _input_required(view: View) -> Step | None:
    left = view.left
    if view.over is not None:
        return End(view.over)
    if left.cancel is not None:
        return End(_cancel_end(left) or RunEnded(state="cancelled"))
    if left.forks_now:
        return Fork()
    if left.responses:
        return Open("respond", _next_steers(left), left.responses[0])
    return _open_next(left) if left.steers and not view.state.calls else None


def _open_next(left: Left) -> Open:
    """The texts that were to come with the next turn, or the first of those with a turn of their own."""
    together = _next_steers(left)
    return Open("next_turn", together) if together else Open("queue", left.steers[:1])


def _next_steers(left: Left) -> tuple[SteerRun, ...]:
    return tuple(steer for steer in left.steers if steer.when != "queue")
