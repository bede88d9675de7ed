"""Cancels of more than one run: of a run and all below it, of a session, of an agent and those it called.

Reaches the runs of all gateways. Knows who descends from whom through families.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Container, Sequence

from gateway.bus import Bus
from gateway.errors import Conflict, RunNotFound
from workers.messages import RUNS_LIVE_KEY, CancelAgents, encode, inbox_key, run_events_key

from .families import Member, descendants, under_agents
from .keeping import Keeper
from .spec import RunSpec
from .state import RunState, fold

CancelOne = Callable[[str], Awaitable[object]]
"""Ends one run. Raises RunNotFound or Conflict where there is nothing to end."""


class Cancelling:
    """Finds whom a cancel is for."""

    def __init__(self, bus: Bus, keeper: Keeper) -> None:
        self._bus = bus
        self._keeper = keeper

    async def below(self, run_id: str, root: RunState, cancel: CancelOne) -> int:
        """Ends all live runs that descend from one; how many. Raises BusLost."""
        spec = root.spec
        live = await self._live(spec.tenant)
        listed = await self._keeper.session_members(spec.tenant, spec.session)
        alive = {member.run_id for member in live}
        told = [name for name in descendants(member_of(run_id, spec), [*live, *listed]) if name in alive]
        await asyncio.gather(*(_if_there(name, cancel) for name in told))
        return len(told)

    async def agents(
        self, root: CancelAgents, agents: Container[str], engines: Sequence[str], cancel: CancelOne
    ) -> int:
        """Ends the live runs of a session, or of these agents and those that they called, and tells engines
        to do the same. How many runs. Raises BusLost.
        """
        live = [member for member in await self._live(root.tenant) if member.session == root.session]
        told = under_agents(agents, live) if root.agent else [member.run_id for member in live]
        message = encode(root)
        await asyncio.gather(
            *(_if_there(run_id, cancel) for run_id in told),
            *(self._bus.send(inbox_key(engine_id), message) for engine_id in engines),
        )
        return len(told)

    async def _live(self, tenant: str) -> list[Member]:
        """All live runs of a tenant, of all gateways."""
        names = await self._bus.answered(self._bus.commands.smembers(RUNS_LIVE_KEY))
        run_ids = [name.decode(errors="replace") for name in names]
        firsts = await self._bus.firsts([run_events_key(run_id) for run_id in run_ids])
        specs = [(run_id, fold(firsts.get(run_events_key(run_id), [])).spec) for run_id in run_ids]
        return [member_of(run_id, spec) for run_id, spec in specs if spec.tenant == tenant]


async def _if_there(run_id: str, cancel: CancelOne) -> None:
    with contextlib.suppress(RunNotFound, Conflict):
        await cancel(run_id)


def member_of(run_id: str, spec: RunSpec) -> Member:
    """A run's place among its tenant's."""
    return Member(run_id, spec.session, spec.agent, spec.parent, spec.parent_run)
