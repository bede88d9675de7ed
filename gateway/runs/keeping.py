"""What is kept of runs beside their streams: lists, ids, results, counts, the session's log.

Owns when each is written. A bus that is away delays what must be there and costs what need not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import replace

import msgspec

from gateway.bus import BusLost
from gateway.dialects.responses.ids import response_id
from gateway.errors import BudgetSpent
from gateway.store.index import RunNote
from gateway.store.results import ResultError, RunResult
from gateway.store.store import Store
from gateway.store.tree_names import NamedTree
from gateway.store.tree_usage import Most, Used
from workers.messages import RUN_END_ID, RUNS_LIVE_KEY, Progress, RunEnded, Tokens, encode

from .checking import checked
from .ends import Told, result_of
from .events import AnyEvent
from .families import Member
from .limits import Accounts, Spent, no_room
from .run import Counted, Run, RunEvent
from .spec import CHECKPOINTS, Budget, RunSpec
from .state import RunState, fold
from .told import log_body
from .transcript import whole_calls

MAX_AGENTS = 4096
"""Whose last runs are remembered, as what their next ids may be based on."""


class Keeper:
    """Keeps what `Runs` tells it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._last_runs: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    async def accepted(self, run: Run) -> None:
        """Lists a new run."""
        spec, accepted, accepted_at = run.state.spec, run.state.accepted, run.state.accepted_at
        assert accepted is not None and accepted_at is not None
        note = RunNote(
            run_id=run.run_id,
            created=accepted_at,
            tenant=spec.tenant,
            session=spec.session,
            agent=spec.agent,
            parent=spec.parent,
            parent_run=spec.parent_run or None,
            kind=spec.kind,
            model=accepted.model,
            priority_class=spec.flow_class,
            label=spec.label,
        )
        await self.store.index.add(note)

    def tell(self, run: Run, entry: RunEvent) -> None:
        """Notes an event of a run of ours for `flush`; `run.state` is the fold with it."""
        line = log_body(run.run_id, entry.event, run.state) if run.state.spec.session else b""
        if line:
            run.untold.append((entry.id, line))

    async def flush(self, run: Run) -> None:
        """Writes what was noted, in its order. Raises BusLost; then again."""
        async with run.telling:
            noted = (run.state.status, run.state.usage)
            if noted != run.noted:
                await self.store.index.note(run.run_id, *noted)
                run.noted = noted
            lines, spec = list(run.untold), run.state.spec
            if lines:
                where, is_last = (spec.tenant, spec.session), run.state.ended is not None
                await self.store.session_log.mirror(where, run.run_id, lines, is_last=is_last)
                del run.untold[: len(lines)]

    async def name_tree(self, run: Run) -> None:
        """Lets calls under a run's names find its tree, if that has a budget; else no earlier one that has.
        Raises BusLost.
        """
        spec, is_free = run.state.spec, run.state.spec.tree_budget == Budget()
        if spec.session and not (is_free and spec.kind == "call"):
            since = spec.tree_since or run.state.accepted_at or 0.0
            tree = NamedTree(_tree(run), since, _encode_budget(spec.tree_budget))
            names = (spec.tenant, spec.session, spec.agent)
            await self.store.tree_names.note(names, tree, is_root=not spec.tree, in_place_only=is_free)

    async def in_tree(self, spec: RunSpec, prompt_tokens: int) -> RunSpec:
        """A call's spec in the tree that its names belong to, if that has a budget, whose time ends with its
        root. Raises BudgetSpent where it leaves no room for such a prompt, and BusLost.
        """
        tree, newer = await self.store.tree_names.find(spec.tenant, spec.session, spec.parent, spec.agent)
        if tree is not None and newer is not None and not await self._lives(tree.root):
            tree = newer
        budget = _decode_budget(tree.budget) if tree is not None else Budget()
        if tree is not None and budget.wall_ms is not None and not await self._lives(tree.root):
            budget = msgspec.structs.replace(budget, wall_ms=None)
        if tree is None or budget == Budget():
            return spec
        used = _spent(await self.store.tree_usage.total(tree.root))
        lacking = no_room(Accounts(Spent(), used, budget), prompt_tokens, time.time() - tree.since)
        if lacking is not None:
            raise BudgetSpent(tree.root, *lacking)
        return msgspec.structs.replace(spec, tree=tree.root, tree_budget=budget, tree_since=tree.since)

    async def _lives(self, run_id: str) -> bool:
        return bool(await self.store.bus.answered(self.store.bus.commands.sismember(RUNS_LIVE_KEY, run_id)))

    async def spent(self, run: Run) -> None:
        """Counts an ended turn against its tree, and looks what that has spent. Raises BusLost."""
        await self._count(run, replace(_had(run), tool_calls=whole_calls(run.said)))

    async def spent_so_far(self, run: Run) -> None:
        """Counts what a turn has had that is paused or lost, and leaves its tree the rest of what it was
        promised. Raises BusLost.
        """
        await self._count(run, _had(run))

    async def thought_so_far(self, run: Run) -> None:
        """Counts what a turn has thought by now where its tree has a budget for that, so that those who think
        at the same time hear of each other; not at each token. Raises BusLost.
        """
        thought = run.transcript.current.thinking_tokens
        if run.state.spec.tree_budget.thinking_tokens is None or not run.is_count_due(thought):
            return
        await self._count(run, Used(thinking_tokens=thought), ends_promise=False)

    async def look_at_tree(self, run: Run) -> None:
        """Refreshes what the tree has spent. Raises BusLost."""
        if run.state.spec.tree_budget != Budget():
            run.tree = _spent(await self.store.tree_usage.total(_tree(run)))

    async def _count(self, run: Run, used: Used, *, ends_promise: bool = True) -> None:
        if run.state.spec.tree_budget == Budget():
            return
        tree, turn = _tree(run), run.state.turn
        total = await self.store.tree_usage.add(tree, run.run_id, turn, used, ends_promise=ends_promise)
        run.tree, run.counted = _spent(total), Counted(turn, used.thinking_tokens, time.monotonic())

    async def promised(self, run: Run) -> int | None:
        """The output tokens that its tree has set aside for its present attempt; None: as many as it likes.
        Raises BusLost.
        """
        if run.state.spec.tree_budget.output_tokens is None:
            return None
        promised = await self.store.tree_usage.promised(_tree(run), run.run_id)
        return None if promised is None else promised.output_tokens

    async def promise(self, run: Run, num_tokens: int) -> bool:
        """Whether its tree leaves an attempt its prompt and so many output tokens. Raises BusLost."""
        most = _most(run.state.spec.tree_budget)
        if most == Most():
            return True
        needed = Used(run.state.prompt_tokens, num_tokens)
        return await self.store.tree_usage.promise(_tree(run), run.run_id, run.state.turn, needed, most)

    async def ids(self, run: Run) -> None:
        """Keeps its tokens so far, for forks. A loss costs a fork that comes when the run is gone."""
        if run.order is None:
            return
        spec = run.state.spec
        agent = (spec.tenant, spec.session, spec.agent)
        bases = [name for name in (spec.parent_run, self._last_runs.get(agent, "")) if name]
        if spec.agent:
            self._last_runs[agent] = run.run_id
            self._last_runs.move_to_end(agent)
            if len(self._last_runs) > MAX_AGENTS:
                self._last_runs.popitem(last=False)
        ids = run.order.token_ids + bytes(run.transcript.current.ids)
        with contextlib.suppress(BusLost):
            await self.store.ids.put(run.run_id, ids, bases)

    async def prompt(self, run_id: str, ids: bytes, parent: str) -> None:
        """Keeps a child's first tokens, so that it depends on its parent no more, which may be steered to
        others, or forgotten. A loss costs a takeover.
        """
        with contextlib.suppress(BusLost):
            await self.store.ids.put(run_id, ids, [parent])

    async def ids_of(self, run_id: str) -> bytes | None:
        """The tokens of a run that may be gone. Raises BusLost."""
        return await self.store.ids.get(run_id)

    async def result(self, told: Told, ended: RunEnded) -> None:
        """Keeps what the run came to. Raises BusLost."""
        spec, result = told.state.spec, result_of(told, ended, time.time())
        if spec.result_schema and told.is_kept:
            result = await asyncio.to_thread(checked, result, spec.result_schema)
        await self.store.results.put(told.run_id, result, is_call=not spec.is_detached)
        if not told.is_kept:
            await self.store.ids.remove(told.run_id)
            await self.store.responses.delete(response_id(told.run_id))  # else its end brings that back
        if _most(spec.tree_budget) != Most():
            await self.store.tree_usage.forget(spec.tree or told.run_id, told.run_id)

    async def result_of(self, run_id: str) -> RunResult | None:
        """What is kept of an ended run. Raises BusLost."""
        return await self.store.results.get(run_id)

    async def state_of(self, run_id: str) -> RunState | None:
        """What its result tells of a run whose events have expired. Raises BusLost."""
        result = await self.store.results.get(run_id)
        if result is None or not result.accepted:
            return None
        error = result.error or ResultError(code="", message="")
        ended = RunEnded(state=result.state, error=error.code, message=error.message)
        return replace(
            fold([("0-1", result.accepted), (RUN_END_ID, encode(ended))]),
            turn=result.turns,
            attempt=result.attempts,
            num_tokens=result.usage.completion_tokens,
            prompt_tokens=0,
            past=result.usage,
            past_timings=result.timings,
            checkpoints={
                name: result.checkpoints[name] for name in CHECKPOINTS if name in result.checkpoints
            },
            derail=result.derail,
        )

    async def session_members(self, tenant: str, session: str) -> list[Member]:
        """All listed runs of a session, those that have ended too. Raises BusLost."""
        if not session:
            return []
        notes = await self.store.index.of_session(tenant, session)
        return [Member(n.run_id, n.session, n.agent, n.parent, n.parent_run or "") for n in notes]

    async def beat(self, run_id: str, milliseconds: int) -> None:
        """The run's caller was heard. Raises BusLost."""
        await self.store.heartbeats.beat(run_id, milliseconds)

    async def beating(self, run_ids: list[str]) -> frozenset[str]:
        """Those whose callers were heard in time. Raises BusLost."""
        return await self.store.heartbeats.beating(run_ids)


def is_lifecycle(event: AnyEvent) -> bool:
    """Whether the session's log and the list of runs hear of it."""
    return not isinstance(event, Tokens | Progress)


def _tree(run: Run) -> str:
    return run.state.spec.tree or run.run_id


def _most(budget: Budget) -> Most:
    return Most(budget.prompt_tokens, budget.output_tokens)


def _had(run: Run) -> Used:
    """By the present turn. A prompt that no worker has taken is not used up by being asked for."""
    state, usage = run.state, run.state.turn_usage
    prompt_tokens = 0 if state.turn_cached is None else usage.prompt_tokens
    return Used(prompt_tokens, usage.completion_tokens, run.transcript.current.thinking_tokens)


def _spent(used: Used) -> Spent:
    return Spent(used.prompt_tokens, used.output_tokens, used.thinking_tokens, used.tool_calls)


_encode_budget = msgspec.msgpack.Encoder().encode
_decode_budget = msgspec.msgpack.Decoder(Budget).decode
