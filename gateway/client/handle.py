"""One run, held by its orchestrator: each verb is the client's, with the run's id filled in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Literal, Unpack

from gateway.native.bodies import CreatedBody, RunBody, VerbBody
from gateway.runs.commands import CancelMode, When
from gateway.runs.outcomes import FINAL

from .budgets import BudgetUse
from .fields import At, RunFields
from .streams import START, EventStream

if TYPE_CHECKING:
    from .client import Client


class RunHandle:
    """A run on the server. It needs no closing: the run lives without it; `Client.handle(id)` makes another.

    `created` is what the server told when it was made here: of a fork how many tokens are its parent's, and
    how many of them were computed again. `replayed`: it had been made before, under the same key.
    """

    def __init__(self, client: Client, run_id: str, created: CreatedBody | None = None) -> None:
        self.id = run_id
        self.created = created
        self._client = client

    def __repr__(self) -> str:
        return f"RunHandle({self.id})"

    def stream(self, after: str = START, *, follow: bool = True) -> EventStream:
        """Its events: see Client.stream."""
        return self._client.stream(self, after, follow=follow)

    async def read(self) -> RunBody:
        """As it is now."""
        return await self._client.read(self)

    async def result(self, seconds: float | None = None) -> RunBody:
        """Waits for its end, or until it waits for input, however that came about: see `status`, `result`,
        `error` and `derail`. Raises TimeoutError after so many `seconds`; the run goes on.
        """
        waited = await self._client.wait([self], seconds=seconds)
        if waited.timed_out:
            raise TimeoutError(f"{self.id} has not ended within {seconds} s")
        return waited.done[0]

    async def budget(self) -> BudgetUse:
        """What it has used of its budget, and what is left."""
        return await self._client.budget(self)

    async def steer(self, text: str, when: When = "now") -> VerbBody:
        """Puts a text before the model: see Client.steer."""
        return await self._client.steer(self, text, when)

    async def pause(self, hold_ms: int | None = None) -> VerbBody:
        """Stops it at the next border: see Client.pause."""
        return await self._client.pause(self, hold_ms)

    async def resume(self) -> VerbBody:
        """Goes on: see Client.resume."""
        return await self._client.resume(self)

    async def cancel(
        self, mode: CancelMode = "now", *, tree: bool = False, keep_partial: bool = True
    ) -> VerbBody:
        """Ends it: see Client.cancel."""
        return await self._client.cancel(self, mode, tree=tree, keep_partial=keep_partial)

    async def respond(self, outputs: Mapping[str, str] | None = None, *, text: str | None = None) -> VerbBody:
        """Gives it what it waits for: see Client.respond."""
        return await self._client.respond(self, outputs, text=text)

    async def fork(self, at: At = "now", *, key: str | None = None, **fields: Unpack[RunFields]) -> RunHandle:
        """A child that begins with what this run has: see Client.fork."""
        return await self._client.fork(self, at, key=key, **fields)

    async def heartbeat(self) -> VerbBody:
        """This caller is still there; `due_ms` tells until when that counts."""
        return await self._client.heartbeat(self)

    @contextlib.asynccontextmanager
    async def heartbeats(self) -> AsyncGenerator[None, None]:
        """Sends heartbeats, three in each time that the run asked for, for as long as the block lasts.

        A heartbeat that does not arrive is not told here: what then becomes of the run is its `orphan`'s.
        """
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def delete(self) -> None:
        """Forgets it once it has ended: see Client.delete."""
        await self._client.delete(self)

    async def _beat(self) -> None:
        while True:
            told = await self.heartbeat()
            if told.due_ms is None or told.status in FINAL:
                return
            await asyncio.sleep(told.due_ms / 3000)


Run = RunHandle | str
"""A run, or its id."""

Until = Literal["settled", "ended"]


def run_id(run: Run) -> str:
    """Of either."""
    return run if isinstance(run, str) else run.id
