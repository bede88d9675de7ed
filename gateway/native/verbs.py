"""The verbs of a run: each may be sent again with the same Idempotency-Key and is then answered the same."""

from __future__ import annotations

import hashlib

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.errors import InvalidField
from gateway.http.access import access_of
from gateway.http.stream import json_response
from gateway.runs.commands import ToolOutput

from .access import own_run, verbs_of
from .bodies import VerbBody
from .reading import idempotency_key, read_verb
from .structs import CancelRequest, EmptyRequest, PauseRequest, RespondRequest, SteerRequest

END_SECONDS = 5.0
"""How long a cancel waits to tell the end that it brought about."""

_CANCEL = {"mode": "'graceful' or 'now'"}


async def post_cancel(request: web.Request) -> web.Response:
    """Ends a run; the status tells whose end came first."""
    run_id, _ = await own_run(request)
    asked = read_verb(await request.read(), CancelRequest, _CANCEL)
    told = await verbs_of(request).cancel(
        run_id,
        asked.mode,
        tree=asked.tree,
        keep_partial=asked.keep_partial,
        command=command_of(request, asked),
        seconds=END_SECONDS,
    )
    return json_response(VerbBody(id=run_id, status=told.status, mode=told.mode, num_runs=told.num_runs))


async def post_pause(request: web.Request) -> web.Response:
    """Stops it at the next border."""
    run_id, _ = await own_run(request)
    asked = read_verb(await request.read(), PauseRequest)
    hold_seconds = None if asked.hold_ms is None else asked.hold_ms / 1000
    told = await verbs_of(request).pause(run_id, hold_seconds, command=command_of(request, asked))
    return json_response(VerbBody(id=run_id, status=told.status, hold_ms=round(1000 * told.hold_seconds)))


async def post_resume(request: web.Request) -> web.Response:
    """Goes on with it."""
    run_id, _ = await own_run(request)
    asked = read_verb(await request.read(), EmptyRequest)
    told = await verbs_of(request).resume(run_id, command=command_of(request, asked))
    return json_response(
        VerbBody(
            id=run_id,
            status=told.status,
            cached_tokens=told.cached_tokens,
            recomputed_tokens=told.recomputed_tokens,
        )
    )


async def post_steer(request: web.Request) -> web.Response:
    """Puts a text before the model as the user's."""
    run_id, _ = await own_run(request)
    asked = read_verb(await request.read(), SteerRequest)
    told = await verbs_of(request).steer(run_id, asked.text, asked.when, command=command_of(request, asked))
    return json_response(VerbBody(id=run_id, status=told.status, applied=told.applied, turn=told.turn))


async def post_respond(request: web.Request) -> web.Response:
    """Gives it what it waits for."""
    run_id, _ = await own_run(request)
    asked = read_verb(await request.read(), RespondRequest)
    if bool(asked.outputs) == bool(asked.text):
        raise InvalidField("outputs", "Give either 'outputs', the calls' results, or 'text': one of them.")
    outputs = [ToolOutput(call_id=output.call_id, output=output.output) for output in asked.outputs]
    told = await verbs_of(request).respond(
        run_id, outputs, asked.text or "", command=command_of(request, asked)
    )
    return json_response(VerbBody(id=run_id, status=told.status, turn=told.turn))


async def post_heartbeat(request: web.Request) -> web.Response:
    """The caller is still there."""
    run_id, _ = await own_run(request)
    read_verb(await request.read(), EmptyRequest)
    told = await verbs_of(request).heartbeat(run_id)
    due_ms = None if told.due_seconds is None else round(1000 * told.due_seconds)
    return json_response(VerbBody(id=run_id, status=told.status, due_ms=due_ms))


def command_of(request: web.Request, asked: Struct) -> str:
    """The command's id: the same for the same key, path, body and tenant; "" without a key. A key that comes
    with another body makes another command: that nothing would come of it, its caller could not see.
    """
    key = idempotency_key(request.headers)
    if key is None:
        return ""
    told = "\0".join((access_of(request).tenant, request.path, key)).encode(errors="replace")
    return hashlib.blake2b(told + b"\0" + msgspec.json.encode(asked), digest_size=16).hexdigest()
