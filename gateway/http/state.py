"""What the HTTP side of one gateway holds while it runs, under one typed key of the app."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from gateway.aliases import Aliases
from gateway.audit import AuditLog
from gateway.callers.kin import Kin
from gateway.callers.lineage import Lineage
from gateway.callers.rates import Rates
from gateway.callers.tokens import TokenStore
from gateway.errors import GatewayError
from gateway.flow.directory import Directory
from gateway.flow.places import Reservation
from gateway.runs.runs import Order, Runs
from gateway.runs.spec import RunSpec
from gateway.runs.talk import Conversation
from gateway.settings import GatewaySettings
from gateway.store.store import Store
from gateway.tasks import Tasks
from gateway.text.prompts import PromptLibrary


class Followers:
    """Which runs have clients here, and the cancels of those whose last client left."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._counts: Counter[str] = Counter()
        self._abandoned: set[str] = set()  # whose own clients have left, while others still look on
        self._tasks = Tasks()

    async def start(
        self,
        order: Order,
        place: Reservation,
        spec: RunSpec,
        conversation: Conversation | None = None,
    ) -> str:
        """`Runs.start`, which a leaving client cannot tear in two: its run is cancelled once it has an id."""
        starting = asyncio.ensure_future(self._runs.start(order, place, spec, conversation))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._tasks.spawn(self._cancel_started(starting))
            raise

    def join(self, run_id: str) -> None:
        """A client reads this run."""
        self._counts[run_id] += 1

    def leave(self, run_id: str, *, cancel: bool, is_over: bool = False) -> None:
        """A client reads no more. A run that is not over ends with the last one, if any of them was to take
        it along (`cancel`): an onlooker that leaves after the run's own client must not keep it alive.
        """
        self._counts[run_id] -= 1
        if cancel:
            self._abandoned.add(run_id)
        if self._counts[run_id] > 0:
            return
        del self._counts[run_id]
        is_abandoned = run_id in self._abandoned
        self._abandoned.discard(run_id)
        if is_abandoned and not is_over:
            self._tasks.spawn(self._cancel(run_id))

    async def close(self) -> None:
        """Waits for cancels on their way."""
        await self._tasks.finish()

    async def _cancel_started(self, starting: asyncio.Future[str]) -> None:
        with contextlib.suppress(GatewayError):
            await self._cancel(await starting)

    async def _cancel(self, run_id: str) -> None:
        with contextlib.suppress(GatewayError):
            await self._runs.cancel(run_id)


@dataclass(frozen=True, slots=True)
class State:
    """The parts that requests use."""

    settings: GatewaySettings
    runs: Runs
    directory: Directory
    tokens: TokenStore
    followers: Followers
    is_bus_up: Callable[[], bool]
    prompts: PromptLibrary
    store: Store
    lineage: Lineage = field(default_factory=lambda: Lineage(time.monotonic))
    kin: Kin = field(default_factory=Kin)
    aliases: Aliases = field(default_factory=Aliases)
    rates: Rates = field(default_factory=Rates)
    audit: AuditLog | None = None  # None: control verbs are not noted
    started: float = field(default_factory=time.monotonic)


STATE = web.AppKey("state", State)
