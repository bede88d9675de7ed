"""What a new run is to be: its spec, from what its caller asks and from the run that it comes from.

Reads other runs, starts none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
from aiohttp import web

from gateway.callers.hints import Hints, Names, read_hints
from gateway.errors import InvalidField, RunNotFound
from gateway.http.access import access_of
from gateway.http.state import STATE
from gateway.runs.spec import Budget, ForkPoint, RunSpec
from gateway.store.index import Filter

from .access import state_of, store_of
from .reading import AskedRun
from .structs import BudgetBody, ForkAt


@dataclass(frozen=True, slots=True)
class _Kin:
    """Where a new run belongs."""

    names: Names
    parent_run: str
    tree: str


def fork_point(parent: str, at: str | ForkAt) -> ForkPoint:
    """Where a child leaves its parent. Raises InvalidField."""
    if not isinstance(at, ForkAt):
        return ForkPoint(run=parent)
    if [at.turn, at.token, at.checkpoint].count(None) != 2:
        raise InvalidField(
            "at", "'at' must be 'now', {'turn': n}, {'token': n} or {'checkpoint': name}: one of them."
        )
    return ForkPoint(run=parent, turn=at.turn, token=at.token, checkpoint=at.checkpoint)


async def spec_of(request: web.Request, asked: AskedRun, point: ForkPoint | None, run_id: str) -> RunSpec:
    """The new run's spec. Raises InvalidField, and RunNotFound for a parent that is not the caller's."""
    told, access = asked.request, access_of(request)
    hints = read_hints(request.headers, asked.chat)
    kin = await _kin(request, asked, hints, point, run_id)
    if told.tree_budget is not None and kin.parent_run:
        raise InvalidField(
            "tree_budget", f"'tree_budget' belongs to a tree's root, but this run is below {kin.parent_run}."
        )
    spec = _told(asked)
    return msgspec.structs.replace(
        spec,
        tenant=access.tenant,
        namespace=access.namespace,
        session=kin.names.session,
        agent=kin.names.agent,
        parent=kin.names.parent,
        parent_run=kin.parent_run,
        tree=kin.tree,
        fork=point,
        body=asked.body(kin.names),
        flow_class=access.class_of(hints.flow_class),
        priority=hints.priority,
        expected_output_tokens=hints.expected_output_tokens or 0,
        retain=hints.retain,
        is_final=hints.is_final,
        is_unattended=hints.is_unattended,
        expects=hints.expects,
    )


def _told(asked: AskedRun) -> RunSpec:
    """As far as the body alone tells."""
    told = asked.request
    spec = RunSpec(
        kind="run",
        model=told.model or "",
        budget=_budget(told.budget),
        tree_budget=_budget(told.tree_budget or BudgetBody()),
        deadline=None if told.deadline_ms is None else time.time() + told.deadline_ms / 1000,
        queue_ttl_ms=told.queue_ttl_ms,
        heartbeat_ms=told.heartbeat_ms,
        orphan=told.orphan,
        on_end=told.on_end,
        result_schema=asked.schema,
        derail=told.derail,
        label=told.label or "",
        metadata=told.metadata or {},
    )
    if told.hold_ms is None:
        return spec
    return msgspec.structs.replace(spec, hold_seconds=told.hold_ms / 1000)


async def _kin(
    request: web.Request, asked: AskedRun, hints: Hints, point: ForkPoint | None, run_id: str
) -> _Kin:
    """Its names: as told, or as the run says that it comes from. Without a name it is an agent of its own."""
    tenant, names, settle = access_of(request).tenant, hints.names, request.app[STATE].kin
    parent_run = asked.request.parent_run or (point.run if point is not None else "")
    tree = ""
    if point is not None and point.run != parent_run:
        await state_of(request, point.run)
    if parent_run:
        above = (await state_of(request, parent_run)).spec
        names = Names(names.session or above.session, names.agent, names.parent or above.agent)
        tree = above.tree or parent_run
    settled = settle.settle(tenant, Names(names.session, names.agent or run_id, names.parent))
    if settled.parent and not parent_run:
        parent_run, tree = await _newest(request, settled)
    settle.note(tenant, settled)
    return _Kin(settled, parent_run, tree)


async def _newest(request: web.Request, names: Names) -> tuple[str, str]:
    """The newest run of the agent's parent, and its tree; none where nothing is kept of that but its line."""
    which = Filter(session=names.session, agent=names.parent)
    page = await store_of(request).index.find(access_of(request).tenant, which, limit=1)
    if not page.notes:
        return "", ""
    parent_run = page.notes[0].run_id
    try:
        return parent_run, (await state_of(request, parent_run)).spec.tree or parent_run
    except RunNotFound:
        return "", ""


def _budget(told: BudgetBody) -> Budget:
    return Budget(
        prompt_tokens=told.prompt_tokens,
        output_tokens=told.output_tokens,
        thinking_tokens=told.thinking_tokens,
        wall_ms=told.wall_ms,
        tool_calls=told.tool_calls,
    )
