"""A run's attempts and turns: sent to engines, resumed, opened after one another, and forked.

Writes through the driver only. Knows no template: how prompts go on is the conversation's.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import structlog

from gateway.bus import Bus, BusLost
from gateway.errors import GatewayError
from gateway.flow.places import Order, Places, Release, submit_of
from workers.messages import Dispatched, encode, inbox_key

from .answering import misfit
from .commands import Answered, ForkRun, ToolOutput
from .ends import calls_of
from .events import InputRequired, Resumed, TurnOpened
from .keeping import Keeper
from .limits import most_tokens
from .reading import read_state
from .run import Run
from .spec import ForkPoint
from .state import Phase, RunState, failed
from .steps import AskCaller, Enter, Fork, GoOn, Open, next_step

if TYPE_CHECKING:
    from .driver import Driver

QUEUE_TIMEOUT = "The call waited in line for longer than its class may (timeout_seconds of gateway.classes)."

_CLOSED = (Phase.TURN_ENDED, Phase.INPUT_REQUIRED)

log = structlog.get_logger(__name__)


class Turns:
    """What a run's owner writes between an attempt's end and the next one's start."""

    def __init__(self, bus: Bus, places: Places, keeper: Keeper, driver: Driver) -> None:
        self._bus = bus
        self._places = places
        self._keeper = keeper
        self._driver = driver

    async def take(self, run: Run, step: Fork | GoOn | Open | AskCaller) -> bool:
        """One step. True when it was written. Raises BusLost."""
        match step:
            case GoOn(commands=commands):
                return await self._driver.write(run, lambda state: _resumed(state, commands))
            case AskCaller():
                return await self._ask_caller(run, step)
            case Open():
                return await self._open(run, step)
            case Fork():
                return await self._fork(run)

    # Attempts.

    def attempt_order(self, run: Run) -> Order:
        """The present turn's next attempt: it goes on behind what the turn has generated."""
        order, current = run.order, run.transcript.current
        assert order is not None
        sampling = order.sampling
        if sampling.seed is None:  # a later attempt must draw as this one would have
            name = f"{run.run_id}/{run.state.turn}".encode()
            seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1
            sampling = msgspec.structs.replace(sampling, seed=seed)
        return replace(
            order,
            token_ids=order.token_ids + bytes(current.ids),
            generated_tokens=len(current.ids) // 4,
            most_cached=run.state.turn_cached,
            max_tokens=most_tokens(order.max_tokens, run.state, run.accounts()),
            sampling=sampling,
            stops_derailed=order.stops_derailed and run.state.spec.derail == "stop",
            prefers=order.prefers if run.state.attempt == 0 else run.state.engine_id or "",
        )

    async def dispatch(self, run: Run, release: Release, lost_attempt: int | None = None) -> None:
        """Sends the turn as a new attempt if it waits, or if that attempt was lost without a token; waits for
        a lost bus.
        """
        try:
            async with run.lock:
                while run.run_id in self._driver.runs:
                    try:
                        await self._try_dispatch(run, release, lost_attempt)
                        break
                    except BusLost:
                        if run.state.phase is Phase.DISPATCHED:
                            lost_attempt = run.state.attempt  # written, but perhaps not sent
                        await self._bus.wait_available()
        finally:
            run.is_released = False
        await self._driver.nudge(run)

    async def send_again(self, run: Run) -> None:
        """The present attempt once more: who wrote its Dispatched may have died before it sent the Submit. An
        engine that has it drops the second one. Waits for a lost bus.
        """
        async with run.lock:
            while run.run_id in self._driver.runs:
                try:
                    return await self._send_again(run)
                except BusLost:
                    await self._bus.wait_available()

    async def _send_again(self, run: Run) -> None:
        state = await read_state(self._bus, run.run_id, run.state)
        engine = self._places.holding(state.engine_id, state.incarnation)
        if state.phase is not Phase.DISPATCHED or state.attempt != run.state.attempt or engine is None:
            return
        order, promised = self.attempt_order(run), await self._keeper.promised(run)
        if promised is not None:
            order = replace(order, max_tokens=promised + order.generated_tokens)
        submit = submit_of(order, run.run_id, state.attempt, engine.info)
        await self._bus.send(inbox_key(engine.info.engine_id), encode(submit))

    async def expire(self, run: Run) -> None:
        """Its class lets nobody wait in line for so long; one that has left the line meanwhile goes on."""
        async with run.lock:
            if self._places.is_waiting(run.run_id):
                with contextlib.suppress(BusLost):  # then it comes into the line anew
                    await self._time_out(run)
        await self._driver.nudge(run)

    async def is_late(self, run: Run) -> bool:
        """Whether its class does not let it into the line again, since it has waited so long, for its tree or
        in the line; then that is its end. For who holds the lock. Raises BusLost.
        """
        assert run.order is not None
        return self._places.is_late(run.order, run.waited_seconds) and await self._time_out(run)

    async def _time_out(self, run: Run) -> bool:
        assert run.order is not None
        seconds = self._places.retry_after(run.order)
        message = f"{QUEUE_TIMEOUT} Try again in {seconds:.0f} s."
        return await self._driver.verdict(
            run,
            lambda state: msgspec.structs.replace(
                failed(state, "queue_timeout", message), retry_after=seconds
            ),
        )

    async def _try_dispatch(self, run: Run, release: Release, lost_attempt: int | None) -> None:
        order, info = self.attempt_order(run), release.engine.info
        if lost_attempt is None and not isinstance(next_step(run.view(time.time())), Enter):
            self._places.take_back(run.run_id)  # something else is to be done first
            return
        if not await self._keeper.promise(run, order.max_tokens - order.generated_tokens):
            run.tree_asked_at = time.monotonic()  # others may leave some of what they were promised
            self._places.take_back(run.run_id)
            return

        def make(state: RunState) -> Dispatched | None:
            was_lost = state.is_on_engine and state.attempt == lost_attempt and not state.attempt_tokens
            if state.phase is not Phase.WAITING and not was_lost:
                return None
            return Dispatched(
                engine_id=info.engine_id,
                incarnation=info.incarnation,
                turn=state.turn,
                cached_tokens=release.cached_tokens,
                reason=release.reason,
            )

        if await self._driver.write(run, make):
            self._places.move(run.run_id, release.engine)
            submit = submit_of(order, run.run_id, run.state.attempt, info)
            await self._bus.send(inbox_key(info.engine_id), encode(submit))

    # Between turns.

    async def _ask_caller(self, run: Run, step: AskCaller) -> bool:
        calls = calls_of(run.run_id, run.state.turn, run.said) if step.with_calls else ()
        asked = InputRequired(calls=calls, at=time.time())
        return await self._driver.write(run, lambda state: _after_turn(state, asked))

    async def _open(self, run: Run, step: Open) -> bool:
        """Another turn; what cannot be put before the model refuses its commands and fails nothing."""
        assert run.order is not None and run.conversation is not None
        if run.state.phase is Phase.PAUSED:
            await self._keeper.spent(run)  # the turn that is cut off here
        if step.response is not None and (misfits := misfit(run.state.calls, step.response.outputs)):
            await self._driver.answer(run, _refused(step.response.command, misfits))
            return True
        commands = [steer.command for steer in step.steers]
        added = [_message("user", "\n\n".join(steer.text for steer in step.steers))] if step.steers else []
        if step.response is not None:
            commands.append(step.response.command)
            added = [*_response(run, step.response.outputs, step.response.text), *added]
        kept, dropped = self._kept(run)
        ids = run.order.token_ids + bytes(run.transcript.current.ids[: 4 * kept])
        try:
            order = await run.conversation.extend(run.order, ids, added)
        except GatewayError as error:
            await self._driver.answer(run, *(_refused(command, error) for command in commands))
            return True
        opened = TurnOpened(
            turn=run.state.turn + 1,
            cause=step.cause,
            added=tuple(added),
            commands=tuple(commands),
            kept_tokens=kept,
            dropped_call=dropped,
            prompt_tokens=order.prompt_tokens,
            turn_tokens=order.turn_tokens,
            request=msgspec.Raw(order.request),
            at=time.time(),
        )
        if not await self._driver.write(run, lambda state: _next_turn(state, opened)):
            return False
        run.order, run.num_resent = order, 0
        return True

    def _kept(self, run: Run) -> tuple[int, str | None]:
        """How many of the turn's tokens stay, and the name of the open call that does not."""
        current = run.transcript.current
        cut = None if run.state.calls else current.open_call(run.state.turn_end)  # none is open behind those
        if cut is None or run.conversation is None:
            return len(current.ids) // 4, None
        return run.conversation.kept_tokens(bytes(current.ids), current.text[: cut.start]), cut.name

    # Forks.

    async def _fork(self, run: Run) -> bool:
        """Makes the children that can leave now, each once."""
        await self._keeper.ids(run)
        on_border = not run.state.is_on_engine and run.state.phase is not Phase.WAITING
        left = run.left
        for fork in left.forks:
            if on_border or not fork.at.is_now:
                await self._driver.answer(run, await self._make_child(run, fork))
        return True

    async def _make_child(self, run: Run, fork: ForkRun) -> Answered:
        ids, dropped = self._ids_at(run, fork.at)
        if ids is None:
            message = (
                "There is no such point in the run: name a turn that has ended, or a token or a checkpoint "
                "that it has."
            )
            return Answered(command=fork.command, error="invalid_field", message=message)
        at = msgspec.structs.replace(fork.at, dropped_call=dropped)
        try:
            await self._driver.make_child(msgspec.structs.replace(fork, at=at), run, ids)
        except BusLost:
            raise
        except GatewayError as error:
            return _refused(fork.command, error)
        return Answered(
            command=fork.command,
            applied="forked",
            turn=run.state.turn,
            tokens=len(ids) // 4,
            dropped_call=dropped,
        )

    def _ids_at(self, run: Run, at: ForkPoint) -> tuple[bytes | None, str | None]:
        """The run's tokens up to there, None where it does not have so many; and the name of the open call
        that is left out of them.
        """
        assert run.order is not None
        ids, ends = run.order.token_ids + bytes(run.transcript.current.ids), run.transcript.ends
        cut = cut_ids(ids, at, run.state, ends if run.state.phase in _CLOSED else ends[:-1])
        if cut is None or not at.is_behind_turn(run.state.turn):
            return cut, None
        kept, dropped = self._kept(run)
        return ids[: len(run.order.token_ids) + 4 * kept], dropped


def cut_ids(ids: bytes, at: ForkPoint, state: RunState, ends: Sequence[int]) -> bytes | None:
    """A run's tokens up to a point; None: it has no such point. `ends`: how many there are at the end of each
    turn that has ended.
    """
    num_tokens: int | None = len(ids) // 4
    if at.token is not None:
        num_tokens = at.token
    elif at.turn is not None:
        num_tokens = ends[at.turn - 1] if 1 <= at.turn <= len(ends) else None
    elif at.checkpoint is not None:
        num_tokens = state.checkpoints.get(at.checkpoint)
    if num_tokens is None or not 1 <= num_tokens <= len(ids) // 4:
        return None
    return ids[: 4 * num_tokens]


def _resumed(state: RunState, commands: tuple[str, ...]) -> Resumed | None:
    return Resumed(commands=commands, at=time.time()) if state.phase is Phase.PAUSED else None


def _after_turn(state: RunState, asked: InputRequired) -> InputRequired | None:
    return asked if state.phase is Phase.TURN_ENDED else None


def _next_turn(state: RunState, opened: TurnOpened) -> TurnOpened | None:
    between = state.phase in (Phase.PAUSED, Phase.TURN_ENDED, Phase.INPUT_REQUIRED)
    return opened if between and state.turn + 1 == opened.turn else None


def _refused(command: str, error: GatewayError) -> Answered:
    return Answered(command=command, error=error.kind, message=error.message)


def _message(role: str, content: str, **more: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": content, **more})


def _response(run: Run, outputs: Sequence[ToolOutput], text: str) -> list[bytes]:
    """Results in the order of their calls, which all have theirs, then text."""
    told = {output.call_id: output.output for output in outputs}
    added = [
        _message("tool", told[call.id], tool_call_id=call.id, name=call.name) for call in run.state.calls
    ]
    return [*added, _message("user", text)] if text else added
