"""Commands on their way: recorded first, by whatever gateway was asked, then obeyed by the run's owner.

Owns how one is recorded, who is woken for it and how its effect is seen. Decides nothing about runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gateway.bus import Bus, Follower, StreamGone
from gateway.errors import Conflict, GatewayError, RunNotFound
from gateway.store.keys import WEEK_SECONDS
from workers.messages import EVENT_FIELD, encode, gateway_lease_key, run_attendant_key, run_events_key

from .commands import Answered, Command, decode_command
from .events import gateway_inbox_key, run_commands_key
from .run import Run
from .state import Phase, RunState, fold

WAIT_SECONDS = 5.0
"""How long a verb waits for its effect."""

MAX_INBOX = 4096

Outcome = TypeVar("Outcome")


class Known(Protocol):
    """What a recorder needs of the runs of this gateway."""

    async def state(self, run_id: str) -> RunState:
        """Raises RunNotFound."""
        ...

    def mine(self, run_id: str) -> Run | None:
        """The run, if this gateway takes its steps."""
        ...

    def look(self, run: Run) -> None:
        """Reads its commands and obeys, beside the caller."""
        ...

    async def adopt(self, run_id: str) -> Run | None:
        """Follows a run that has no living owner."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """A run after a command, and what was answered to it."""

    state: RunState
    answered: Answered | None = None


class Recorder:
    """Records commands and watches for their effects."""

    def __init__(self, bus: Bus, known: Known) -> None:
        self._bus = bus
        self._known = known

    async def state(self, run_id: str) -> RunState:
        """The fold over a run's events. Raises RunNotFound."""
        return await self._known.state(run_id)

    async def record(self, run_id: str, command: Command) -> RunState:
        """Records a command and wakes the run's owner; the state before. A repeat is recorded again, and
        counts once. Raises RunNotFound, BusLost and Conflict for a run that has ended without the command.
        """
        state = await self._known.state(run_id)
        if state.phase is Phase.ENDED:
            if await self._answer_of(run_id, command.command) is None and not _is_obeyed(state, command):
                raise run_ended(run_id, state)
            return state
        pipeline = self._bus.commands.pipeline(transaction=True)
        fields: dict[Any, Any] = {EVENT_FIELD: encode(command)}
        pipeline.xadd(run_commands_key(run_id), fields)
        pipeline.expire(run_commands_key(run_id), WEEK_SECONDS)
        await self._bus.execute(pipeline)
        await self._wake(run_id, state)
        return state

    async def until(
        self,
        run_id: str,
        command: str,
        state: RunState,
        tell: Callable[[Seen], Outcome | None],
        *,
        seconds: float = WAIT_SECONDS,
    ) -> tuple[Seen, Outcome | None]:
        """Follows a run from a state on until `tell` has an outcome; None after so long, or at its end.

        Raises Conflict or GatewayError where the owner refused the command.
        """
        seen = Seen(state)
        with contextlib.suppress(TimeoutError, StreamGone):
            async with asyncio.timeout(seconds):
                async with contextlib.aclosing(self._watch(run_id, command, state)) as watching:
                    async for seen in watching:
                        if seen.answered is not None and seen.answered.error:
                            raise _refusal(seen.answered)
                        outcome = tell(seen)
                        if outcome is not None:
                            return seen, outcome
                        if seen.state.phase is Phase.ENDED:
                            break
        return seen, None

    async def listen(self, on_run: Callable[[str], Awaitable[None]]) -> None:
        """For ever: the ids of runs that other gateways have recorded commands for."""
        key = gateway_inbox_key(self._bus.gateway_id)
        while True:
            await self._send(key, b"")  # the stream should exist
            follower = self._bus.follow(key, "0-0")
            try:
                while True:
                    entry = await follower.next()
                    if entry.message:
                        await on_run(entry.message.decode(errors="replace"))
            except StreamGone:
                pass
            finally:
                follower.close()

    async def _watch(self, run_id: str, command: str, state: RunState) -> AsyncGenerator[Seen, None]:
        answered = await self._answer_of(run_id, command)
        yield Seen(state, answered)
        events = self._bus.follow(run_events_key(run_id), state.last_id)
        answers = self._bus.follow(run_commands_key(run_id), "0-0")
        waiting: dict[Follower, asyncio.Future[Any]] = {}
        try:
            while True:
                for follower in (events, answers):
                    if follower not in waiting:
                        waiting[follower] = asyncio.ensure_future(follower.next())
                await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
                if answers in waiting and waiting[answers].done():
                    found = decode_command(waiting.pop(answers).result().message)
                    if isinstance(found, Answered) and found.command == command:
                        answered = found
                if events in waiting and waiting[events].done():
                    state = fold([waiting.pop(events).result()], state)
                yield Seen(state, answered)
        finally:
            for future in waiting.values():
                future.cancel()
            await asyncio.gather(*waiting.values(), return_exceptions=True)
            events.close()
            answers.close()

    async def _answer_of(self, run_id: str, command: str) -> Answered | None:
        for entry in await self._bus.read(run_commands_key(run_id), "0-0"):
            found = decode_command(entry.message)
            if isinstance(found, Answered) and found.command == command:
                return found
        return None

    async def _wake(self, run_id: str, state: RunState) -> None:
        run = self._known.mine(run_id)
        if run is not None:
            self._known.look(run)
            return
        owner = state.accepted.gateway if state.accepted is not None else ""
        if await self._bus.get(gateway_lease_key(owner)) is None:
            attendant: bytes | None = await self._bus.get(run_attendant_key(run_id))
            owner = (attendant or b"").decode()
        if owner and owner != self._bus.gateway_id:
            await self._send(gateway_inbox_key(owner), run_id.encode())
        else:
            await self._known.adopt(run_id)

    async def _send(self, key: str, message: bytes) -> None:
        pipeline = self._bus.commands.pipeline(transaction=False)
        fields: dict[Any, Any] = {EVENT_FIELD: message}
        pipeline.xadd(key, fields, maxlen=MAX_INBOX, approximate=True)
        pipeline.expire(key, WEEK_SECONDS)
        await self._bus.execute(pipeline)


def command_id(given: str) -> str:
    """The caller's, or a fresh one."""
    return given or uuid.uuid4().hex


def run_ended(run_id: str, state: RunState) -> Conflict:
    """The verb came too late."""
    return Conflict("run_ended", f"The run {run_id} has ended: it is {state.status}. Fork it to go on.")


def _is_obeyed(state: RunState, command: Command) -> bool:
    return command.command in state.obeyed


def _refusal(answered: Answered) -> GatewayError:
    if answered.error == "run_not_found":
        return RunNotFound(answered.message)
    if answered.error in ("no_input_required", "cannot_continue", "run_ended"):
        return Conflict(answered.error, answered.message)
    return GatewayError(answered.error, answered.message)
