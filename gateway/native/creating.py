"""New runs: from a body to a spec, once for each Idempotency-Key, one by one or up to 64 in a batch."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.bus import BusLost
from gateway.errors import GatewayError
from gateway.http.api import INLINE_BODY_BYTES
from gateway.http.fields import bad_field, read_fields
from gateway.http.stream import RUN_KEY, json_response
from gateway.runs.spec import ForkPoint, RunSpec

from .access import state_of, store_of, verbs_of
from .bodies import BatchBody, BatchItem, CreatedBody
from .reading import AskedRun, RunKind, idempotency_key, inside, read_run, read_verb, run_id_of
from .showing import links
from .specs import fork_point, spec_of
from .structs import BatchRequest, ForkRequest, RunRequest

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A new run that was asked for, and the key that it was asked under."""

    run_id: str
    spec: RunSpec
    key: str | None
    digest: bytes  # of the body


async def post_run(request: web.Request) -> web.Response:
    """One run, a fork where `fork` says so."""
    body = await request.read()
    _, asked = await _read(body, RunRequest)
    fork = asked.request.fork
    point = None if fork is None else fork_point(fork.run, fork.at)
    return await _answer(request, asked, point, body)


async def post_fork(request: web.Request) -> web.Response:
    """A child of the run in the path."""
    body = await request.read()
    parent, _ = run_id_of(request.match_info["id"]), await state_of(request, request.match_info["id"])
    asked_fork, asked = await _read(body, ForkRequest)
    if asked_fork.fork is not None:
        raise bad_field(
            "fork", {"run": ""}, remedy="absent: the path tells the parent, 'at' where to leave it"
        )
    return await _answer(request, asked, fork_point(parent, asked_fork.at), body)


async def post_batch(request: web.Request) -> web.Response:
    """Up to 64 runs in their order; each is taken or refused on its own, unless `all_or_nothing`."""
    body = await request.read()
    batch = read_verb(body, BatchRequest)
    key = idempotency_key(request.headers)
    items: list[BatchItem] = []
    for number, fields in enumerate(batch.runs):
        try:
            item_key = None if key is None else f"{key}/{number}"
            with inside(f"runs[{number}]"):
                items.append(await _create_one(request, fields, item_key))
        except GatewayError as error:
            if batch.all_or_nothing:
                await _take_back(request, items)
                raise
            items.append(BatchItem(status=error.status, error=error.body()["error"]))
    num_accepted = sum(item.run is not None for item in items)
    return json_response(
        BatchBody(data=items, num_accepted=num_accepted), status=202 if num_accepted else 200
    )


async def unbroken(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Work that a leaving client does not tear in two: it goes on by itself."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(task)


async def _create_one(request: web.Request, fields: dict[str, Any], key: str | None) -> BatchItem:
    told = {name: value for name, value in fields.items() if value is not None}
    _, asked = read_run(told, RunRequest)
    fork = asked.request.fork
    point = None if fork is None else fork_point(fork.run, fork.at)
    wanted = await _wanted(request, asked, point, key, msgspec.json.encode(told, order="sorted"))
    return BatchItem(status=202, run=await unbroken(_create(request, wanted)))


async def _take_back(request: web.Request, items: list[BatchItem]) -> None:
    for item in items:
        if item.run is not None and not item.run.replayed:
            with suppress(GatewayError):
                await verbs_of(request).cancel(item.run.id)


async def _answer(
    request: web.Request, asked: AskedRun, point: ForkPoint | None, body: bytes
) -> web.Response:
    canonical = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    wanted = await _wanted(request, asked, point, idempotency_key(request.headers), canonical)
    created = await unbroken(_create(request, wanted))
    request[RUN_KEY] = created.id
    response = json_response(created, status=202)
    response.headers["Location"] = created.links.self_
    if created.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return response


async def _wanted(
    request: web.Request, asked: AskedRun, point: ForkPoint | None, key: str | None, canonical: bytes
) -> _Wanted:
    run_id = f"run-{uuid.uuid4().hex}"
    spec = await spec_of(request, asked, point, run_id)
    told = request.path.encode() + b"\0" + canonical
    return _Wanted(run_id, spec, key, hashlib.blake2b(told, digest_size=16).digest())


async def _create(request: web.Request, wanted: _Wanted) -> CreatedBody:
    if wanted.key is None:
        return await _start(request, wanted)
    tenant, claims = wanted.spec.tenant, store_of(request).idempotency
    claim = await claims.claim(tenant, wanted.key, wanted.digest, wanted.run_id)
    if not claim.is_new:
        state = await state_of(request, claim.run_id)
        return _created(claim.run_id, state.spec, state.status, replayed=True)
    try:
        return await _start(request, wanted)
    except BusLost:
        raise  # it may be there or not: whoever asks again finds out
    except GatewayError:
        await claims.release(tenant, wanted.key, wanted.run_id)
        raise


async def _start(request: web.Request, wanted: _Wanted) -> CreatedBody:
    verbs, spec = verbs_of(request), wanted.spec
    if spec.fork is None:
        run_id = await verbs.create(spec, wanted.run_id)
        return _created(run_id, spec, "queued")
    forked = await verbs.fork(spec.fork, spec, run_id=wanted.run_id)
    created = _created(forked.run_id, spec, "queued")
    return msgspec.structs.replace(
        created,
        parent_tokens=forked.parent_tokens,
        cached_tokens=forked.cached_tokens,
        recomputed_tokens=forked.recomputed_tokens,
    )


def _created(run_id: str, spec: RunSpec, status: str, *, replayed: bool = False) -> CreatedBody:
    return CreatedBody(
        id=run_id,
        status=status,
        session=spec.session,
        agent=spec.agent,
        replayed=replayed,
        links=links(run_id, spec.session),
    )


async def _read(body: bytes, kind: type[RunKind]) -> tuple[RunKind, AskedRun]:
    def work() -> tuple[RunKind, AskedRun]:
        return read_run(read_fields(body), kind)

    return work() if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(work)
