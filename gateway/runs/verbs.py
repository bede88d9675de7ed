"""The verbs of runs: what each records, what it waits for and what it answers.

A repeat under the same command id has no further effect and answers the same. Knows no run's owner.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

import msgspec

from gateway.errors import Conflict, InvalidField, StillWaiting

from . import outcomes
from .answering import misfit
from .commands import (
    CancelRun,
    ForkRun,
    PauseRun,
    RespondRun,
    ResumeRun,
    SteerRun,
    ToolOutput,
    When,
)
from .events import Cause
from .keeping import Keeper
from .making import Making
from .recording import Recorder, Seen, command_id, run_ended
from .spec import ForkPoint, RunSpec, encode_spec
from .state import Phase, RunState
from .steps import ONE_TURN
from .transcript import shape_of

CHILD_SECONDS = 1.0
"""How long a fork waits for its child's worker, to tell what it found in the cache."""

_APPLIED: dict[Cause | None, When] = {"steer": "now", "queue": "queue"}

MAX_TEXT_BYTES = 1 << 20
"""Of a steer's or a response's texts together."""


class Verbs:
    """All raise RunNotFound, BusLost, and Conflict where the run's state does not allow it."""

    def __init__(self, recorder: Recorder, making: Making, keeper: Keeper) -> None:
        self._recorder = recorder
        self._making = making
        self._keeper = keeper

    async def cancel(self, run_id: str, wish: CancelRun, seconds: float) -> outcomes.Cancelled:
        """Ends a run; waits so long for its end. One that has ended is no conflict."""
        command, mode = command_id(wish.command), wish.mode
        state = await self._recorder.state(run_id)
        if state.phase is Phase.ENDED:
            return outcomes.Cancelled(state.status, mode)
        with contextlib.suppress(Conflict):  # it ends just now
            state = await self._recorder.record(run_id, msgspec.structs.replace(wish, command=command))
        if seconds and mode == "now":
            seen, _ = await self._recorder.until(run_id, command, state, _ended, seconds=seconds)
            state = seen.state
        return outcomes.Cancelled(state.status, mode)

    async def pause(self, run_id: str, hold_seconds: float | None, command: str) -> outcomes.Paused:
        """Stops it at the next border."""
        command = command_id(command)
        state = await self._recorder.record(run_id, PauseRun(command=command, hold_seconds=hold_seconds))
        seen, _ = await self._recorder.until(run_id, command, state, _paused)
        _refuse_if_ended(run_id, seen)
        held = state.spec.hold_seconds if hold_seconds is None else hold_seconds
        return outcomes.Paused(seen.state.status, held)

    async def resume(self, run_id: str, command: str) -> outcomes.Resumed:
        """Goes on with it; one that is not paused is left as it is."""
        command = command_id(command)
        state = await self._recorder.record(run_id, ResumeRun(command=command))
        seen, _ = await self._recorder.until(run_id, command, state, _started)
        if state.phase is not Phase.ENDED and command not in seen.state.obeyed:
            _refuse_if_ended(run_id, seen)
        cached = seen.state.cached_tokens
        recomputed = None if cached is None else max(_computed(state) - cached, 0)
        return outcomes.Resumed(seen.state.status, cached, recomputed)

    async def steer(self, run_id: str, text: str, when: When, command: str) -> outcomes.Steered:
        """Puts a text before the model as the user's."""
        _check_text("text", text)
        command = command_id(command)
        state = await self._recorder.state(run_id)
        if state.accepted is not None and shape_of(bytes(state.accepted.request)).endpoint == "text":
            raise Conflict("cannot_continue", ONE_TURN)  # its owner would say so after the answer
        state = await self._recorder.record(run_id, SteerRun(command=command, text=text, when=when))

        seen, steered = await self._recorder.until(
            run_id, command, state, lambda seen: _steered(seen, command, when)
        )
        if steered is None:
            _refuse_if_ended(run_id, seen)
        return steered or outcomes.Steered(seen.state.status, when)

    async def respond(
        self, run_id: str, outputs: Sequence[ToolOutput], text: str, command: str
    ) -> outcomes.Responded:
        """Gives a run in input_required what it waits for. Raises InvalidField for anything else."""
        state = await self._recorder.state(run_id)
        for index, output in enumerate(outputs):
            _check_text(f"outputs[{index}].output", output.output)
        if state.phase is Phase.INPUT_REQUIRED and command not in state.obeyed:
            refusal = misfit(state.calls, outputs)
            if refusal is not None:
                raise refusal
        command = command_id(command)
        recorded = RespondRun(command=command, outputs=tuple(outputs), text=text)
        state = await self._recorder.record(run_id, recorded)

        def tell(seen: Seen) -> outcomes.Responded | None:
            obeyed = seen.state.obeyed.get(command)
            return outcomes.Responded(seen.state.status, obeyed.turn) if obeyed is not None else None

        seen, responded = await self._recorder.until(run_id, command, state, tell)
        if responded is None:
            _refuse_if_ended(run_id, seen)
        return responded or outcomes.Responded(seen.state.status, seen.state.turn + 1)

    async def fork(self, at: ForkPoint, spec: RunSpec, run_id: str, command: str) -> outcomes.Forked:
        """A child of the run `at.run`, there or not. Raises Conflict where the parent's tokens are gone."""
        command = command or (f"fork-{run_id}" if run_id else command_id(""))
        run_id = run_id or f"run-{hashlib.blake2b(command.encode(), digest_size=16).hexdigest()}"
        state = await self._recorder.state(at.run)
        point = None
        if state.phase is not Phase.ENDED:
            recorded = ForkRun(command=command, at=at, run_id=run_id, spec=encode_spec(spec))
            with contextlib.suppress(Conflict):  # it ends just now
                state = await self._recorder.record(at.run, recorded)
            seen, point = await self._recorder.until(at.run, command, state, lambda seen: _forked(seen, at))
            state = seen.state
        if point is None and state.phase is not Phase.ENDED:
            raise StillWaiting(
                "The parent has not reached its next border yet. Repeat the call with the same "
                "Idempotency-Key to wait on: without one, another child is made."
            )
        if point is None:
            point = await self._making.child_of_ended(run_id, at, spec, state)
        return await self._started_child(run_id, point)

    async def heartbeat(self, run_id: str) -> outcomes.Alive:
        """The caller is still there."""
        state = await self._recorder.state(run_id)
        period = state.spec.heartbeat_ms
        if period is None or state.phase is Phase.ENDED:
            return outcomes.Alive(state.status)
        await self._keeper.beat(run_id, period)
        return outcomes.Alive(state.status, period / 1000)

    async def _started_child(self, run_id: str, point: ForkPoint) -> outcomes.Forked:
        """With what its first attempt found of what the parent had computed, if it gets a worker in time. An
        answer's last token is not computed before another follows.
        """
        is_inside = point.token is not None or point.dropped_call is not None
        computed = point.num_tokens if is_inside or point.is_between_messages else point.num_tokens - 1
        state = await self._recorder.state(run_id)
        seen, _ = await self._recorder.until(run_id, "", state, _started, seconds=CHILD_SECONDS)
        cached = seen.state.cached_tokens
        recomputed = None if cached is None else max(computed - cached, 0)
        return outcomes.Forked(run_id, point.num_tokens, cached, recomputed, point.dropped_call)


def _computed(state: RunState) -> int:
    """How many tokens a paused turn had in an engine's cache: the last one that it generated was not yet."""
    return state.prompt_tokens + state.turn_tokens - 1 if state.turn_tokens else state.processed_tokens


def _ended(seen: Seen) -> bool | None:
    return True if seen.state.phase is Phase.ENDED else None


def _paused(seen: Seen) -> bool | None:
    """Between turns a run stands still anyway."""
    return True if seen.state.phase in (Phase.PAUSED, Phase.INPUT_REQUIRED) else None


def _started(seen: Seen) -> bool | None:
    phase = seen.state.phase
    has_worker = seen.state.cached_tokens is not None and phase is not Phase.PAUSED
    return True if has_worker or phase is Phase.INPUT_REQUIRED else None


def _forked(seen: Seen, at: ForkPoint) -> ForkPoint | None:
    """The point as the parent's owner has resolved it."""
    if seen.answered is None:
        return None
    told = seen.answered
    return msgspec.structs.replace(at, num_tokens=told.tokens, dropped_call=told.dropped_call)


def _steered(seen: Seen, command: str, when: When) -> outcomes.Steered | None:
    state, obeyed = seen.state, seen.state.obeyed.get(command)
    if obeyed is not None:
        applied: When = (
            "now" if obeyed.cause == "steer" else "queue" if obeyed.cause == "queue" else "next_turn"
        )
        return outcomes.Steered(state.status, applied, obeyed.turn)
    if state.phase is Phase.ENDED:
        return None
    if when != "now":
        return outcomes.Steered(state.status, when)
    return outcomes.Steered(state.status, "next_turn") if state.calls else None


def _refuse_if_ended(run_id: str, seen: Seen) -> None:
    if seen.state.phase is Phase.ENDED:
        raise run_ended(run_id, seen.state)


def _check_text(param: str, text: str) -> None:
    if len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise InvalidField(param, f"'{param}' is longer than {MAX_TEXT_BYTES} bytes: shorten it.")
