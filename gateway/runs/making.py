"""How detached runs come to be: created, forked from another, or taken over from a gateway that is gone.

Knows specs, and that prompts come from `Talk`; follows nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from gateway.bus import Bus
from gateway.errors import Conflict, InvalidField, NoEngine, RunNotFound, shorten
from gateway.flow.places import Order

from .commands import ForkRun
from .keeping import Keeper
from .reading import NOTHING, read_whole
from .run import Run
from .spec import Budget, ForkPoint, RunSpec, decode_spec
from .state import RunState
from .talk import Talk
from .transcript import Transcript
from .turns import cut_ids

if TYPE_CHECKING:
    from .runs import Runs

IDS_GONE = "The tokens of that run are not kept any more: they are for a day after its end."


class Making:
    """Makes runs for `Runs`."""

    def __init__(self, bus: Bus, keeper: Keeper, runs: Runs) -> None:
        self._bus = bus
        self._keeper = keeper
        self._runs = runs

    async def create(self, spec: RunSpec, run_id: str) -> str:
        """A run without a parent's tokens. Raises GatewayError."""
        spec = await self._in_tree(spec)
        begun = await self._talk.begin(spec, None)
        spec = msgspec.structs.replace(spec, result_schema=begun.result_schema)
        return await self._runs.launch(run_id, begun.order, spec, begun.conversation)

    async def child(self, fork: ForkRun, parent: Run, ids: bytes) -> None:
        """A child of a run of ours. Raises GatewayError."""
        await self._fork(fork.run_id, decode_spec(fork.spec), fork.at, ids, parent.state)

    async def child_of_ended(self, run_id: str, at: ForkPoint, spec: RunSpec, parent: RunState) -> ForkPoint:
        """A child of a run that has ended; the point as resolved. Raises Conflict where the parent's tokens
        are not kept any more, and InvalidField for a point that is not there.
        """
        ids = await self._keeper.ids_of(at.run)
        if ids is None:
            raise Conflict("ids_gone", IDS_GONE)
        state, transcript = await read_whole(self._bus, at.run)
        cut = cut_ids(ids, at, parent, await self._kept_ends(at.run) or transcript.ends)
        if cut is None:
            message = (
                f"'at' is {at.turn or at.token or at.checkpoint}, but the run {at.run} has no such point: "
                "name a turn, a token or a checkpoint that it has."
            )
            raise InvalidField("at", message)
        if state != NOTHING and at.is_behind_turn(state.turn):
            cut, at = await self._without_open_call(cut, at, spec, (state, transcript))
        return await self._fork(run_id, spec, at, cut, parent)

    async def _without_open_call(
        self, ids: bytes, at: ForkPoint, spec: RunSpec, parent: tuple[RunState, Transcript]
    ) -> tuple[bytes, ForkPoint]:
        """An ended parent's tokens without the tool call that its end has cut off, so far as its events are
        still there to tell of one; and the point with its name.
        """
        state, transcript = parent
        turn = transcript.current
        cut = turn.open_call(state.turn_end)
        if cut is None:
            return ids, at
        conversation = (await self._talk.begin(spec, None)).conversation
        kept = conversation.kept_tokens(bytes(turn.ids), turn.text[: cut.start])
        point = msgspec.structs.replace(at, dropped_call=cut.name)
        return ids[: 4 * (turn.prompt_tokens + kept)], point

    async def _kept_ends(self, run_id: str) -> Sequence[int]:
        """How many tokens an ended run had at each turn's end: its result is kept longer than its events."""
        result = await self._keeper.result_of(run_id)
        return result.ends if result is not None else ()

    async def take_over(self, run: Run) -> None:
        """Rebuilds what only the run's own gateway held, so that this one may go on. Raises GatewayError."""
        spec, parent_ids = run.state.spec, None
        if spec.fork is not None:
            kept = await self._keeper.ids_of(run.run_id) or await self._keeper.ids_of(spec.fork.run)
            if kept is None:
                raise Conflict("ids_gone", IDS_GONE)
            parent_ids = kept[: 4 * spec.fork.num_tokens]
        begun = await self._talk.begin(spec, parent_ids)
        turns, accepted = run.transcript.turns, run.state.accepted
        assert accepted is not None
        order = replace(begun.order, request=bytes(accepted.request))
        for turn, following in itertools.pairwise(turns):
            ids = order.token_ids + turn.kept_ids
            order = await begun.conversation.extend(order, ids, following.added)
        run.order, run.conversation = order, begun.conversation

    @property
    def _talk(self) -> Talk:
        if self._runs.talk is None:
            raise NoEngine("This gateway is still starting. Try again in a few seconds.")
        return self._runs.talk

    async def _fork(
        self, run_id: str, spec: RunSpec, at: ForkPoint, ids: bytes, parent: RunState
    ) -> ForkPoint:
        point = msgspec.structs.replace(at, num_tokens=len(ids) // 4)
        spec = msgspec.structs.replace(
            _child_of(spec, at.run, parent),
            fork=point,
            session=spec.session or parent.spec.session,
            parent=spec.parent or parent.spec.agent,
        )
        begun = await self._talk.begin(spec, ids)
        spec = msgspec.structs.replace(spec, result_schema=begun.result_schema)
        order = replace(begun.order, prefers=parent.engine_id or "")
        await self._keeper.prompt(run_id, order.token_ids, at.run)
        await self._runs.launch(run_id, order, spec, begun.conversation)
        return point

    async def _in_tree(self, spec: RunSpec) -> RunSpec:
        """Under its parent's tree, whose budget counts for it as well."""
        if not spec.parent_run:
            return spec
        try:
            parent = await self._runs.state(spec.parent_run)
            if parent.spec.tenant != spec.tenant:
                raise RunNotFound(spec.parent_run)
        except RunNotFound:
            message = f"'parent_run' is '{shorten(spec.parent_run)}': there is no such run, or no more."
            raise InvalidField("parent_run", message) from None
        return _child_of(spec, spec.parent_run, parent)


def _child_of(spec: RunSpec, parent_run: str, parent: RunState) -> RunSpec:
    """A run with a budget for the tree below it heads a tree of its own."""
    if spec.tree_budget != Budget():
        return msgspec.structs.replace(spec, parent_run=parent_run)
    return msgspec.structs.replace(
        spec,
        parent_run=parent_run,
        tree=parent.spec.tree or parent_run,
        tree_budget=parent.spec.tree_budget,
        tree_since=parent.spec.tree_since or parent.accepted_at,
    )


def spec_of(order: Order) -> RunSpec:
    """What a plain call asks for."""
    names, flow = order.names, order.flow
    return RunSpec(
        tenant=order.tenant,
        namespace=order.namespace,
        session=names.session,
        agent=names.agent,
        parent=names.parent,
        model=order.engine.info.model_id,
        flow_class=flow.flow_class,
        priority=flow.priority,
        is_unattended=order.hints.is_unattended,
    )
