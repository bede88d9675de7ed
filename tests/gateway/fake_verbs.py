"""Runs with the native API's verbs, without an engine: the test writes their events, into a real bus."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from gateway.dialects.answer import AnswerShape
from gateway.errors import Conflict, RunNotFound
from gateway.flow.outlook import NO_OUTLOOK, Outlook
from gateway.runs import outcomes
from gateway.runs.commands import CancelMode, ToolOutput, When
from gateway.runs.event_ids import id_pair
from gateway.runs.events import AnyEvent, decode
from gateway.runs.outcomes import FINAL, Alive, Forked
from gateway.runs.run import RunEvent
from gateway.runs.spec import ForkPoint, RunSpec, encode_spec
from gateway.runs.state import RunState, advance, fold
from gateway.runs.told import log_body
from gateway.store.index import RunNote
from gateway.store.results import RunResult
from gateway.store.store import Store
from workers.messages import (
    RUN_END_ID,
    Accepted,
    Cancelled,
    Dispatched,
    RunEnded,
    Started,
    Timings,
    Tokens,
    encode,
    event_id,
    run_events_key,
)

from .fake_runs import FakeRuns, words


class FakeVerbs(FakeRuns):
    """`asked` are the verbs that came, with what they were given."""

    def __init__(self, store: Store) -> None:
        super().__init__(words("x"))
        self.store = store
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.specs: dict[str, RunSpec] = {}
        self.num_created = 0
        self.children: list[str] = []  # ids that forks were asked for under
        self.refusals: list[Exception | None] = []  # of the next creates

    # As Runs has them.

    async def create(self, spec: RunSpec, run_id: str = "") -> str:
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        run_id = run_id or f"run-{uuid.uuid4().hex}"
        self.num_created += 1
        self.specs[run_id] = spec
        await self.store.index.add(
            RunNote(
                run_id=run_id,
                created=time.time() + self.num_created,
                tenant=spec.tenant,
                session=spec.session,
                agent=spec.agent,
                parent=spec.parent,
                parent_run=spec.parent_run,
                kind=spec.kind,
                model="tiny",
                priority_class=spec.flow_class,
                label=spec.label,
            )
        )
        accepted = Accepted(
            model="tiny",
            engine_id="e",
            created=1_000_000_000,
            prompt_tokens=10,
            gateway="g1",
            request=msgspec.Raw(msgspec.msgpack.encode(AnswerShape(endpoint="run"))),
            spec=encode_spec(spec),
        )
        await self.write(run_id, accepted)
        return run_id

    async def fork(self, at: ForkPoint, spec: RunSpec, *, run_id: str = "", command: str = "") -> Forked:
        self.asked.append(("fork", (at, command)))
        self.children.append(run_id)
        child = await self.create(spec, run_id)
        return Forked(child, parent_tokens=7, cached_tokens=7, recomputed_tokens=0)

    async def events(self, run_id: str, after: str = "0-0") -> AsyncIterator[RunEvent]:
        follower = self.store.bus.follow(run_events_key(run_id), after)
        try:
            while True:
                entry = await follower.next()
                event = decode(entry.message)
                assert event is not None
                yield RunEvent(entry.id, event)
                if isinstance(event, RunEnded):
                    return
        finally:
            follower.close()

    async def state(self, run_id: str) -> RunState:
        state = fold(await self.store.bus.read(run_events_key(run_id), "0-0"))
        if state.accepted is not None:
            return state
        result = await self.store.results.get(run_id)
        if result is None:
            raise RunNotFound(run_id)
        state = fold([("0-1", result.accepted)])
        return advance(state, RUN_END_ID, RunEnded(state=result.state))

    async def cancel(
        self,
        run_id: str,
        mode: CancelMode = "now",
        *,
        tree: bool = False,
        keep_partial: bool = True,
        command: str = "",
        seconds: float = 0.0,
    ) -> outcomes.Cancelled:
        self.asked.append(("cancel", (mode, tree, command)))
        if (await self.state(run_id)).status not in FINAL:
            await self.end(run_id, "cancelled")
        return outcomes.Cancelled((await self.state(run_id)).status, mode)

    async def pause(
        self, run_id: str, hold_seconds: float | None = None, *, command: str = ""
    ) -> outcomes.Paused:
        await self._ask(run_id, "pause", hold_seconds, command)
        return outcomes.Paused("paused", hold_seconds or 600.0)

    async def resume(self, run_id: str, *, command: str = "") -> outcomes.Resumed:
        await self._ask(run_id, "resume", command)
        return outcomes.Resumed("prefilling", cached_tokens=8, recomputed_tokens=2)

    async def steer(
        self, run_id: str, text: str, when: When = "now", *, command: str = ""
    ) -> outcomes.Steered:
        await self._ask(run_id, "steer", text, when, command)
        return outcomes.Steered("decoding", "next_turn", 2)

    async def respond(
        self, run_id: str, outputs: Sequence[ToolOutput] = (), text: str = "", *, command: str = ""
    ) -> outcomes.Responded:
        await self._ask(run_id, "respond", [output.output for output in outputs], text, command)
        return outcomes.Responded("queued", 2)

    def outlook(self, run_id: str, state: RunState) -> Outlook:
        return NO_OUTLOOK

    async def heartbeat(self, run_id: str) -> Alive:
        await self._ask(run_id, "heartbeat")
        return Alive("decoding", 1.5)

    # For tests.

    async def write(self, run_id: str, event: AnyEvent, entry_id: str | None = None) -> str:
        """The run's next event, in the session's log too."""
        before = await self.store.bus.read(run_events_key(run_id), "0-0")
        state = fold(before)
        if entry_id is None and not before:
            entry_id = "0-1"
        elif entry_id is None:
            attempt, sequence = id_pair(state.last_id)
            begins = not isinstance(event, Started | Tokens)
            entry_id = event_id(attempt + 1, 1) if begins else event_id(attempt, sequence + 1)
        assert await self.store.bus.append(run_events_key(run_id), entry_id, encode(event), create=not before)
        state = advance(state, entry_id, event)
        await self.store.index.note(run_id, state.status, state.usage)
        if body := log_body(run_id, event, state):
            where = (state.spec.tenant, state.spec.session)
            await self.store.session_log.mirror(where, run_id, [(entry_id, body)])
        return entry_id

    async def play(self, run_id: str, *texts: str) -> None:
        """On a worker, with these texts."""
        turn = (await self.state(run_id)).turn
        await self.write(run_id, Dispatched(engine_id="e", incarnation=1, turn=turn))
        await self.write(run_id, Started(worker=0, cached_tokens=4))
        for text in texts:
            await self.write(run_id, Tokens(token_ids=b"\1\0\0\0", text=text))

    async def end(self, run_id: str, status: str = "completed", **fields: Any) -> None:
        """Result, then end."""
        entries = await self.store.bus.read(run_events_key(run_id), "0-0")
        state = fold(entries)
        if state.turn_end is None:
            await self.write(run_id, Cancelled(usage=state.turn_usage, timings=Timings()))
            state = await self.state(run_id)
        result = RunResult(
            state=status, accepted=entries[0].message, usage=state.usage, turns=state.turn, **fields
        )
        await self.store.results.put(run_id, result)
        await self.write(run_id, RunEnded(state=status), RUN_END_ID)

    async def _ask(self, run_id: str, verb: str, *given: Any) -> None:
        self.asked.append((verb, given))
        if (await self.state(run_id)).status in FINAL:
            raise Conflict("run_ended", f"{run_id} has ended.")
