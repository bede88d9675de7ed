"""New runs: from a body to a spec, once for each Idempotency-Key, one by one or up to 64 in a batch."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.bus import BusLost
from gateway.errors import Conflict, GatewayError, InvalidField, RunNotFound, StillWaiting, shorten
from gateway.flow.classes import FlowHints
from gateway.http.access import access_of
from gateway.http.api import INLINE_BODY_BYTES
from gateway.http.fields import read_fields
from gateway.http.requests import find_engine
from gateway.http.state import STATE
from gateway.http.stream import RUN_KEY, json_response
from gateway.runs.spec import ForkPoint, RunSpec

from .access import state_of, store_of, verbs_of
from .bodies import BatchBody, BatchItem, CreatedBody
from .reading import AskedRun, idempotency_key, inside, read_run, read_verb
from .showing import links
from .specs import fork_point, spec_of
from .structs import BatchRequest, ForkRequest, RunRequest

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A new run that was asked for, and the key that it was asked under. Its spec is made once it is certain
    which run it is: its names may be the run's id.
    """

    run_id: str  # unless the key stands for another
    asked: AskedRun
    point: ForkPoint | None
    key: str | None
    digest: bytes  # of the path and the body
    where: str = ""  # in a larger body


async def post_run(request: web.Request) -> web.Response:
    """One run, a fork where `fork` says so."""
    _, asked = await _off_loop(await request.read(), lambda body: read_run(read_fields(body), RunRequest))
    return await _answer(request, asked, _point_of(asked))


async def post_fork(request: web.Request) -> web.Response:
    """A child of the run in the path."""
    parent = request.match_info["id"]
    await state_of(request, parent)
    told, asked = await _off_loop(await request.read(), lambda body: read_run(read_fields(body), ForkRequest))
    if told.fork is not None:
        raise InvalidField("fork", "'fork' must be absent here: the path tells the parent, 'at' the point.")
    return await _answer(request, asked, fork_point(parent, told.at))


async def post_batch(request: web.Request) -> web.Response:
    """Up to 64 runs; each is taken or refused on its own, unless `all_or_nothing`. First the forks, together,
    as each waits for its parent and for its child's worker; then the others in their order.
    """
    key = idempotency_key(request.headers)
    is_whole, given = await _off_loop(await request.read(), _read_batch)
    wanted = [_wanted_or_not(request, asked, key, number) for number, asked in enumerate(given)]
    if is_whole:
        await _check_all(request, wanted)
    forks = [n for n, one in enumerate(wanted) if isinstance(one, _Wanted) and one.point is not None]
    forked = await asyncio.gather(*(_create_item(request, wanted[number]) for number in forks))
    made: dict[int, BatchItem | GatewayError] = dict(zip(forks, forked, strict=True))
    refusal = next((item for item in forked if isinstance(item, GatewayError)), None)
    for number, one in enumerate(wanted):
        if number not in made and not (is_whole and refusal is not None):
            made[number] = item = await _create_item(request, one)
            refusal = item if isinstance(item, GatewayError) else refusal
    if is_whole and refusal is not None:
        await _take_back(request, [(wanted[number], item) for number, item in made.items()])
        raise refusal
    items = [_told(made[number]) for number in range(len(wanted))]
    num_accepted = sum(item.run is not None for item in items)
    return json_response(
        BatchBody(data=items, num_accepted=num_accepted), status=202 if num_accepted else 200
    )


async def unbroken(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Work that a leaving client does not tear in two: it goes on by itself."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(task)


def _read_batch(body: bytes) -> tuple[bool, list[AskedRun | GatewayError]]:
    batch = read_verb(body, BatchRequest)
    given: list[AskedRun | GatewayError] = []
    for number, fields in enumerate(batch.runs):
        told = {name: value for name, value in fields.items() if value is not None}
        try:
            with inside(f"runs[{number}]"):
                given.append(read_run(told, RunRequest)[1])
        except GatewayError as error:
            given.append(error)
    return batch.all_or_nothing, given


def _wanted_or_not(
    request: web.Request, asked: AskedRun | GatewayError, key: str | None, number: int
) -> _Wanted | GatewayError:
    if isinstance(asked, GatewayError):
        return asked
    where = f"runs[{number}]"
    try:
        with inside(where):
            item_key = None if key is None else f"{key}/{number}"
            return _wanted(request, asked, _point_of(asked), item_key, where)
    except GatewayError as error:
        return error


async def _check_all(request: web.Request, wanted: Sequence[_Wanted | GatewayError]) -> None:
    """Whether all can be taken and all find a place in line, before any starts. Raises the first refusal.
    Those that were made before are only told again.
    """
    state, tenant = request.app[STATE], access_of(request).tenant
    with contextlib.ExitStack() as places:
        for one in wanted:
            if isinstance(one, GatewayError):
                raise one
            if one.key is not None and await store_of(request).idempotency.is_made(tenant, one.key):
                continue
            spec = await _spec_of(request, one, one.run_id)
            engine = find_engine(state.directory, spec.model, state.aliases)
            places.enter_context(state.runs.reserve(engine, FlowHints(flow_class=spec.flow_class)))


async def _create_item(request: web.Request, wanted: _Wanted | GatewayError) -> BatchItem | GatewayError:
    if isinstance(wanted, GatewayError):
        return wanted
    try:
        return BatchItem(status=202, run=await unbroken(_create(request, wanted)))
    except GatewayError as error:
        return error


def _told(item: BatchItem | GatewayError) -> BatchItem:
    if isinstance(item, GatewayError):
        seconds = item.retry_after_seconds
        return BatchItem(status=item.status, error=item.body()["error"], retry_after=seconds)
    return item


async def _take_back(
    request: web.Request, made: Sequence[tuple[_Wanted | GatewayError, BatchItem | GatewayError]]
) -> None:
    """Ends what was started here, and gives the keys back: sent again, the batch starts anew."""
    tenant, claims = access_of(request).tenant, store_of(request).idempotency
    for wanted, item in made:
        if isinstance(wanted, GatewayError) or isinstance(item, GatewayError):
            continue
        if item.run is not None and not item.run.replayed:
            with contextlib.suppress(GatewayError):
                await verbs_of(request).cancel(item.run.id)
                if wanted.key is not None:
                    await claims.release(tenant, wanted.key, wanted.run_id)


async def _answer(request: web.Request, asked: AskedRun, point: ForkPoint | None) -> web.Response:
    wanted = _wanted(request, asked, point, idempotency_key(request.headers))
    created = await unbroken(_create(request, wanted))
    request[RUN_KEY] = created.id
    response = json_response(created, status=202)
    response.headers["Location"] = created.links.self_
    if created.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return response


def _wanted(
    request: web.Request, asked: AskedRun, point: ForkPoint | None, key: str | None, where: str = ""
) -> _Wanted:
    digest = request.path.encode() + b"\0" + asked.digest
    return _Wanted(f"run-{uuid.uuid4().hex}", asked, point, key, digest, where)


async def _create(request: web.Request, wanted: _Wanted) -> CreatedBody:
    if wanted.key is None:
        return await _start(request, wanted, wanted.run_id)
    tenant, claims = access_of(request).tenant, store_of(request).idempotency
    claim = await claims.claim(tenant, wanted.key, wanted.digest, wanted.run_id)
    if not claim.is_new:
        return await _told_again(request, wanted.key, claim.run_id)
    try:
        created = await _start(request, wanted, claim.run_id)
    except (BusLost, StillWaiting):
        raise  # it may be there or not, or will be: whoever asks again finds out
    except GatewayError:
        await claims.release(tenant, wanted.key, wanted.run_id)
        raise
    with contextlib.suppress(BusLost):  # the next call with the key sees that the run is there
        await claims.settle(tenant, wanted.key, claim.run_id)
    return created


async def _told_again(request: web.Request, key: str, run_id: str) -> CreatedBody:
    """The run that a key has made. Raises Conflict where that is gone: it is not run again."""
    try:
        state = await state_of(request, run_id)
    except RunNotFound:
        message = (
            f"The Idempotency-Key '{shorten(key)}' has made {run_id}, which was deleted or is kept no more. "
            "It is not run again: choose a new key."
        )
        raise Conflict("run_gone", message, param="Idempotency-Key") from None
    return _created(run_id, state.spec, state.status, replayed=True)


async def _start(request: web.Request, wanted: _Wanted, run_id: str) -> CreatedBody:
    verbs, spec = verbs_of(request), await _spec_of(request, wanted, run_id)
    if spec.fork is None:
        return _created(await verbs.create(spec, run_id), spec, "queued")
    forked = await verbs.fork(spec.fork, spec, run_id=run_id)
    created = _created(forked.run_id, spec, "queued")
    return msgspec.structs.replace(
        created,
        parent_tokens=forked.parent_tokens,
        cached_tokens=forked.cached_tokens,
        recomputed_tokens=forked.recomputed_tokens,
        dropped_call=forked.dropped_call,
    )


async def _spec_of(request: web.Request, wanted: _Wanted, run_id: str) -> RunSpec:
    with inside(wanted.where) if wanted.where else contextlib.nullcontext():
        return await spec_of(request, wanted.asked, wanted.point, run_id)


def _created(run_id: str, spec: RunSpec, status: str, *, replayed: bool = False) -> CreatedBody:
    return CreatedBody(
        id=run_id,
        status=status,
        session=spec.session,
        agent=spec.agent,
        replayed=replayed,
        links=links(run_id, spec.session),
    )


def _point_of(asked: AskedRun) -> ForkPoint | None:
    fork = asked.request.fork
    return None if fork is None else fork_point(fork.run, fork.at)


async def _off_loop(body: bytes, read: Callable[[bytes], Answer]) -> Answer:
    """What a body says; read in a thread where that takes long."""
    return read(body) if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(read, body)
