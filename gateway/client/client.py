"""The client of an orchestrator: runs started, followed, steered and waited for on one Tetrarch server.

Owns what is asked in which words. How it gets there is wire.py's, how streams go on is streams.py's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from gateway.native.bodies import CreatedBody, RunBody, RunLine, RunList, TreeBody, VerbBody
from gateway.runs.commands import CancelMode, When

from .batches import spawn_batch
from .budgets import BudgetUse, budget_use
from .errors import NotFound, Refused
from .fields import At, RunFields, encode_body, wire_fields
from .handle import Run, RunHandle, Until, run_id
from .patience import Patience
from .streams import START, EventStream
from .waiting import Waited, wait_for_runs
from .wire import Ask, Wire

URL = "http://127.0.0.1:8114"
"""Where `tetrarch serve` listens unless it is told otherwise."""

Answer = TypeVar("Answer")


class Client:
    """A server's runs, for `async with`.

    Every call is tried again for as long as `patience` says (two minutes) while the server is away, restarts
    or has no room, waits as long as its Retry-After asks, and has a key of its own that makes it happen once.
    `run` is a RunHandle or a run's id everywhere. What can go wrong: gateway/client/errors.py.
    """

    def __init__(
        self, base_url: str = URL, token: str | None = None, *, patience: Patience | None = None
    ) -> None:
        self._wire = Wire(base_url, token, patience or Patience())

    async def __aenter__(self) -> Client:
        await self._wire.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._wire.close()

    # New runs.

    async def spawn(
        self, prompt: str | None = None, *, key: str | None = None, **fields: Unpack[RunFields]
    ) -> RunHandle:
        """Starts a run and returns at once; `prompt` is short for one user message. It goes on without this
        client, and over restarts of the gateway.

        `key` names the run for a day: an orchestrator that starts again and spawns with the same key and
        fields gets the run that there is. Raises Conflict when the fields are others.
        """
        body = {**fields, "input": prompt} if prompt is not None else fields
        created = await self._post("/v1/runs", body, CreatedBody, key or new_key())
        return RunHandle(self, created.id, created)

    async def batch(
        self, runs: Sequence[RunFields], *, all_or_nothing: bool = False, key: str | None = None
    ) -> list[RunHandle | Refused]:
        """Starts many runs, 64 in each request; for each in its place the run, or why it was refused.

        Those that there was no room for are tried again. `all_or_nothing`: at most 64, and when one is
        refused none goes on; that refusal is raised.
        """
        created = await spawn_batch(self._wire, runs, all_or_nothing=all_or_nothing, key=key or new_key())
        return [one if isinstance(one, Refused) else RunHandle(self, one.id, one) for one in created]

    async def fork(
        self, run: Run, at: At = "now", *, key: str | None = None, **fields: Unpack[RunFields]
    ) -> RunHandle:
        """A new run that begins with what `run` has said and read; the fields' messages go on behind that.

        Nothing is computed again that is still kept: `created.recomputed_tokens` tells. A live parent is
        stopped at its next token for that, and goes on by itself.
        """
        path = f"{_path(run)}/fork"
        created = await self._post(path, {**fields, "at": at}, CreatedBody, key or new_key())
        return RunHandle(self, created.id, created)

    def handle(self, run: str) -> RunHandle:
        """A run that was started elsewhere or earlier."""
        return RunHandle(self, run)

    # What becomes of them.

    def stream(self, run: Run, after: str = START, *, follow: bool = True) -> EventStream:
        """A run's events from its start, or behind an event's id, up to its end; each once and in order, over
        broken connections and restarts. `follow=False`: only those that there are.

        Text comes as TokenText, the end as one of `ENDINGS`; see gateway/native/telling.py for all.
        """
        return EventStream(self._wire, f"{_path(run)}/events", after, follow=follow)

    def events(self, session: str, after: str = START, *, follow: bool = True) -> EventStream:
        """What happens to all runs of a session, without their texts. It has no end: leave when you like."""
        return EventStream(self._wire, f"/v1/sessions/{_quoted(session)}/events", after, follow=follow)

    async def wait(
        self,
        runs: Sequence[Run],
        mode: Literal["any", "all"] = "all",
        *,
        until: Until = "settled",
        seconds: float | None = None,
    ) -> Waited:
        """Waits until one or all have ended, or (`settled`) wait for input; for at most so many `seconds`."""
        return await wait_for_runs(self._wire, [run_id(run) for run in runs], mode, until, seconds)

    async def read(self, run: Run) -> RunBody:
        """A run as it is now, with its result once it has ended."""
        return await self._get(_path(run), RunBody)

    async def runs(self, limit: int | None = None, **filters: str) -> AsyncIterator[RunLine]:
        """The caller's runs, newest first.

        Filters: session, agent, parent, parent_run, status, kind, flow_class.
        """
        query = {**wire_fields(filters), "limit": str(min(limit or 100, 100))}
        num_left = limit
        while True:
            page = await self._get("/v1/runs", RunList, query)
            for line in page.data[:num_left]:
                yield line
            num_left = None if num_left is None else num_left - len(page.data)
            if page.next is None or (num_left is not None and num_left <= 0):
                return
            query["before"] = page.next

    async def tree(self, session: str) -> TreeBody:
        """A session's agents with their runs and what all of them have used."""
        return await self._get(f"/v1/sessions/{_quoted(session)}/tree", TreeBody)

    async def budget(self, run: Run) -> BudgetUse:
        """What a run has used of its budget, and what is left."""
        body = await self.read(run)
        wall_seconds = (body.ended or time.time()) - body.created
        return budget_use(body.budget, body.usage, max(0, round(1000 * wall_seconds)))

    async def models(self) -> list[str]:
        """The names of the models that are served."""
        return [model.id for model in (await self._get("/v1/models", _Models)).data]

    # Verbs. Each answers how it was taken, also when it had been taken before.

    async def steer(self, run: Run, text: str, when: When = "now") -> VerbBody:
        """Puts a text before the model as the user's: at once, at the end of the present turn, or in a turn
        of its own. `applied` tells which it became: a turn that had ended makes "now" a "next_turn".
        """
        return await self._verb(run, "steer", text=text, when=when)

    async def pause(self, run: Run, hold_ms: int | None = None) -> VerbBody:
        """Stops a run at its next token and gives its worker to others. What it computed is kept for
        `hold_ms` (up to a day); the run itself stays paused until it is resumed.
        """
        return await self._verb(run, "pause", hold_ms=hold_ms)

    async def resume(self, run: Run) -> VerbBody:
        """Goes on with a paused run; `recomputed_tokens` tells what had to be computed again."""
        return await self._verb(run, "resume")

    async def cancel(
        self, run: Run, mode: CancelMode = "now", *, tree: bool = False, keep_partial: bool = True
    ) -> VerbBody:
        """Ends a run (`graceful`: at the end of its turn), with `tree` all that descends from it, too.
        `status` tells whose end came first. What it had said is kept, unless not even that is wanted.
        """
        return await self._verb(run, "cancel", mode=mode, tree=tree, keep_partial=keep_partial)

    async def respond(
        self, run: Run, outputs: Mapping[str, str] | None = None, *, text: str | None = None
    ) -> VerbBody:
        """Gives a run in `input_required` what it waits for: its calls' results by their ids, or text."""
        told = None
        if outputs is not None:
            told = [{"call_id": call_id, "output": output} for call_id, output in outputs.items()]
        return await self._verb(run, "respond", outputs=told, text=text)

    async def heartbeat(self, run: Run) -> VerbBody:
        """This caller is still there. `RunHandle.heartbeats` sends them by itself."""
        return await self._post(f"{_path(run)}/heartbeat", {}, VerbBody)

    async def cancel_session(self, session: str) -> int:
        """Ends all live runs of a session. Returns how many."""
        path = f"/v1/sessions/{_quoted(session)}/cancel"
        return (await self._post(path, {}, _SessionCancelled)).num_cancelled

    async def delete(self, run: Run) -> None:
        """Forgets an ended run: its events, its result, its ids. Nothing happens when that is done already.

        Raises Conflict while it lives.
        """
        try:
            await self._wire.ask(Ask(method="DELETE", path=_path(run)), msgspec.Raw)
        except NotFound:
            return

    async def _verb(self, run: Run, verb: str, **fields: Any) -> VerbBody:
        return await self._post(f"{_path(run)}/{verb}", fields, VerbBody, new_key())

    async def _post(
        self, path: str, fields: Mapping[str, Any], kind: type[Answer], key: str | None = None
    ) -> Answer:
        return await self._wire.ask(Ask(method="POST", path=path, body=encode_body(fields), key=key), kind)

    async def _get(self, path: str, kind: type[Answer], query: Mapping[str, str] | None = None) -> Answer:
        return await self._wire.ask(Ask(path=path, query=query or {}), kind)


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _SessionCancelled(msgspec.Struct, frozen=True):
    num_cancelled: int


def new_key() -> str:
    """An Idempotency-Key that nobody else has."""
    return uuid.uuid4().hex


def _path(run: Run) -> str:
    return f"/v1/runs/{_quoted(run_id(run))}"


def _quoted(name: str) -> str:
    return quote(name, safe="")
