"""The paths of OpenAI's Responses API: create, read, resume, cancel and delete responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
from aiohttp import web

from gateway.dialects.responses.ids import response_id, run_id_of
from gateway.dialects.responses.teller import ResponsesTeller
from gateway.errors import GatewayError, InvalidField, RunNotFound
from gateway.http.access import access_of
from gateway.http.api import INLINE_BODY_BYTES, ChatRequest
from gateway.http.calls import started_call
from gateway.http.fields import bad_field, read_fields
from gateway.http.requests import prepare_chat
from gateway.http.state import STATE
from gateway.http.stream import RUN_KEY, Following, Told, answer_run, is_shown, json_response
from gateway.runs.forgetting import forget
from gateway.store.responses import MAX_RESPONSE_BYTES, StoredResponse, fits
from gateway.text.prompts import is_small

from .background import BACKGROUND, follow, told_run, told_so_far
from .body import ResponsesRequest, check_body
from .chat import Asked, own_words, to_chat
from .history import (
    History,
    Kept,
    ResponseNotFound,
    Shelves,
    previous_not_found,
    shown_items,
    stored_run,
)
from .items import Item
from .listing import page_of

CANCEL_SECONDS = 5.0
"""How long a cancel waits for the end, so that it can tell it."""

ACCEPTED_ID = "0-1"
EXPIRED = "The events of this response have expired: read it without 'stream'."


async def post_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: starts a run and follows it to its end, unless it is to go on in the background."""
    asked = await _parse(await request.read())
    wanted = asked.request
    shelves = shelves_of(request)
    history = await _history(request, shelves, wanted.previous_response_id)
    items = await shelves.resolved(wanted.items)
    stored = _to_store(wanted, shelves, history, items)
    async with contextlib.AsyncExitStack() as stack:
        with own_words():
            chat = await _to_chat(asked, [*history.items, *items], stored)
            call = await stack.enter_async_context(started_call(request, chat, prepare_chat))
        kept = Kept(shelves, response_id(call.run_id), stored)
        await _begin(request, kept, call.run_id)

        async def on_end(told: Told) -> None:
            await call.on_end(told)
            await kept.end(msgspec.json.encode(told.teller.body()))

        if not wanted.background:
            return await answer_run(request, call.run_id, Following(is_ours=True, on_end=on_end))
        runs = request.app[STATE].runs
        request.app[BACKGROUND].spawn(follow(stack.pop_all(), runs, call.run_id, on_end))
        if wanted.stream:
            return await answer_run(request, call.run_id)
        request[RUN_KEY] = call.run_id
        return _json(_snapshot(await told_run(runs, call.run_id, ACCEPTED_ID)))


async def _begin(request: web.Request, kept: Kept, run_id: str) -> None:
    """Stores what there is at the beginning. A client that leaves meanwhile takes its run along."""
    followers, has_begun = request.app[STATE].followers, False
    followers.join(run_id)
    try:
        await kept.begin()
        has_begun = True
    finally:
        followers.leave(run_id, cancel=not has_begun)


async def get_response(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}: as stored, or as far as it has come; with `stream=true` told again, from the
    event behind `starting_after` on.
    """
    response = request.match_info["id"]
    run_id = stored_run(response)
    shelves = shelves_of(request)
    stored = await shelves.get(response)
    if request.query.get("stream") in ("true", "1"):
        return await _tell_again(request, response, stored)
    request[RUN_KEY] = run_id
    if stored is not None and stored.body:
        return _json(stored.body)
    told = await _told(request, response)
    if not _teller(told).is_stored:
        raise ResponseNotFound(response)
    return await _shown(shelves, response, stored, told)


async def post_cancel(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/{id}/cancel: ends it. An ended one stays what it is."""
    response = request.match_info["id"]
    request[RUN_KEY] = stored_run(response)
    shelves = shelves_of(request)
    stored = await shelves.get(response)
    if stored is not None and stored.body:
        return _json(stored.body)
    await _cancel(request, response)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await told_run(request.app[STATE].runs, stored_run(response))
    return await _shown(shelves, response, stored, await _told(request, response))


async def delete_response(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/responses/{id}: it cannot be read any more, nor its run. A running one ends."""
    response = request.match_info["id"]
    request[RUN_KEY] = run_id = stored_run(response)
    shelves = shelves_of(request)
    stored = await shelves.get(response)
    has_ended = (stored is not None and bool(stored.body)) or await _end_for_good(request, response)
    if has_ended:
        await forget(request.app[STATE].store, run_id)
    return json_response({"id": response, "object": "response", "deleted": True})


async def _end_for_good(request: web.Request, response: str) -> bool:
    """Ends a response that is to be deleted, so that its end is not kept. Whether it has ended by now: else
    it is forgotten at its end. Raises ResponseNotFound.
    """
    await _told(request, response)
    store, run_id = request.app[STATE].store, stored_run(response)
    await store.idempotency.bury(run_id)  # first: what is deleted is not found again
    await store.responses.delete(response, is_told=True)
    await request.app[STATE].runs.cancel(run_id)
    with contextlib.suppress(TimeoutError, RunNotFound):
        async with asyncio.timeout(CANCEL_SECONDS):
            await told_run(request.app[STATE].runs, run_id)
            return True
    return False


async def get_input_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}/input_items: what its own request asked, page by page."""
    response = request.match_info["id"]
    request[RUN_KEY] = stored_run(response)
    stored = await shelves_of(request).get(response)
    if stored is None:
        raise ResponseNotFound(response)
    return json_response(page_of(shown_items(response, stored), request.query))


def shelves_of(request: web.Request) -> Shelves:
    """The store as this caller sees it."""
    return Shelves(request.app[STATE].store.responses, access_of(request))


async def _parse(body: bytes) -> Asked:
    return _asked(body) if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(_asked, body)


def _asked(body: bytes) -> Asked:
    fields = read_fields(body)
    return Asked(fields, check_body(fields))


async def _to_chat(asked: Asked, items: Sequence[Item], stored: StoredResponse | None) -> ChatRequest:
    is_stored = stored is not None
    if is_small(asked.fields, list(items)):
        return to_chat(asked, items, is_stored=is_stored)
    return await asyncio.to_thread(to_chat, asked, items, is_stored=is_stored)


async def _history(request: web.Request, shelves: Shelves, previous: str | None) -> History:
    if previous is None:
        return History()
    run_id = run_id_of(previous)
    try:
        stored = await shelves.get(previous) if run_id is not None else None
        if run_id is None or stored is None:
            raise previous_not_found(previous)
        if not stored.body:  # its gateway did not live to store its end
            told = await _told(request, previous)
            if not told.answer.ended:
                raise previous_not_found(previous)
            body = msgspec.json.encode(told.teller.body())
            await Kept(shelves, previous, stored).end(body)
            stored = msgspec.structs.replace(stored, body=body)
    except ResponseNotFound:
        raise previous_not_found(previous) from None
    return await shelves.conversation(previous, stored)


def _to_store(
    wanted: ResponsesRequest, shelves: Shelves, history: History, items: Sequence[Item]
) -> StoredResponse | None:
    """What is to be stored; None where that is not wanted or not possible, as the response then tells."""
    stored = StoredResponse(
        tenant=shelves.access.tenant, chain=history.chain, items=msgspec.json.encode(items)
    )
    if wanted.store and fits(stored):
        return stored
    if wanted.background:
        remedy = f"false: an input of more than {MAX_RESPONSE_BYTES} bytes is not stored"
        raise bad_field("background", wanted.background, remedy=remedy)
    return None


async def _tell_again(
    request: web.Request, response: str, stored: StoredResponse | None
) -> web.StreamResponse:
    after = request.query.get("starting_after", "-1")
    if not (after == "-1" or (after.isascii() and after.isdigit() and len(after) < 10)):
        raise InvalidField("starting_after", "'starting_after' must be the number of an event, from 0.")
    following = Following(streams=True, skip=int(after) + 1, endpoint="responses")
    if stored is None and not _teller(await _told(request, response)).is_stored:
        raise ResponseNotFound(response)
    try:
        return await answer_run(request, stored_run(response), following)
    except RunNotFound:
        if stored is None or not stored.body:
            raise ResponseNotFound(response) from None
        raise GatewayError("response_not_found", EXPIRED) from None


async def _told(request: web.Request, response: str) -> Told:
    """The response so far. Raises ResponseNotFound."""
    try:
        told = await told_so_far(request.app[STATE].runs, stored_run(response))
    except RunNotFound:
        raise ResponseNotFound(response) from None
    if not is_shown(request, told.answer, "responses"):
        raise ResponseNotFound(response)
    return told


async def _cancel(request: web.Request, response: str) -> None:
    """Ends its run, if that has not ended. Raises ResponseNotFound."""
    await _told(request, response)
    await request.app[STATE].runs.cancel(stored_run(response))


async def _shown(
    shelves: Shelves, response: str, stored: StoredResponse | None, told: Told
) -> web.StreamResponse:
    if not told.answer.ended:
        return _json(_snapshot(told))
    body = msgspec.json.encode(told.teller.body())
    await Kept(shelves, response, stored).end(body)
    return _json(body)


def _snapshot(told: Told) -> bytes:
    answer = told.answer
    has_begun = bool(answer.num_processed or answer.token_ids)
    return msgspec.json.encode(_teller(told).snapshot("in_progress" if has_begun else "queued"))


def _teller(told: Told) -> ResponsesTeller:
    assert isinstance(told.teller, ResponsesTeller)
    return told.teller


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
