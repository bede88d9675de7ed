"""Follows a run for one HTTP client: as server-sent events or as one body, by the same road.

Owns SSE framing, keep-alives and what happens when the client leaves. Knows no prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import structlog
from aiohttp import web

from gateway.dialects.answer import Answer, Endpoint
from gateway.dialects.frames import Frame, Teller, Voice
from gateway.dialects.table import DIALECTS
from gateway.errors import GatewayError, InvalidField, RunNotFound
from gateway.runs.event_ids import id_pair
from gateway.runs.runs import RunEvent, Runs
from workers.messages import RUN_END_ID, Tokens

from .access import access_of
from .state import STATE

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}
_EVENT_ID = re.compile(r"(\d{1,20})-(\d{1,20})")


class SseStream:
    """One answer as server-sent events. Knows when it last wrote."""

    def __init__(
        self, response: web.StreamResponse, teller: Voice, keepalive_seconds: float, skip: int = 0
    ) -> None:
        self.response = response
        self._teller = teller
        self._skip = skip  # so many frames the client has already
        self._keepalive_seconds = keepalive_seconds
        self._written = time.monotonic()

    async def send(self, frames: Sequence[Frame], event_id: str | None = None) -> None:
        """One write for all that a bus event makes; only its last SSE event carries the id."""
        fresh = frames[self._skip :]
        self._skip -= len(frames) - len(fresh)
        if fresh:
            await self._write(_sse(fresh, event_id))

    def kept_alive(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Inside, no silence lasts long. A task for that costs less than a time limit for each event."""
        return _beside(self._keep_alive())

    def kept_told(
        self, news: Callable[[], Sequence[Frame]], seconds: float
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Inside, what is new beside the events is sent, looked for every so many seconds."""
        return _beside(self._keep_told(news, seconds))

    async def _keep_alive(self) -> None:
        with contextlib.suppress(ConnectionError):  # whoever has left ends the sender as well
            while True:
                left = self._written + self._keepalive_seconds - time.monotonic()
                if left > 0:
                    await asyncio.sleep(left)
                else:
                    await self._break_silence()

    async def _keep_told(self, news: Callable[[], Sequence[Frame]], seconds: float) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(seconds)
                if frames := news():
                    await self._write(_sse(frames, None))

    async def _break_silence(self) -> None:
        """A comment opens the next event, whichever that is: OpenAI's client takes an empty line after
        nothing but a comment for an event without data, as soon as any event had an id, and breaks.
        """
        silence = self._teller.silence()
        comment = f": {silence.comment}\n".encode() if silence.comment else b""
        await self._write(comment + _sse(silence.frames, None))

    async def fail(self, error: GatewayError) -> None:
        """The stream ends in an error: clients raise on it."""
        await self.send(self._teller.fail(error))

    async def _write(self, text: bytes) -> None:
        """Raises ConnectionResetError when the client is gone."""
        self._written = time.monotonic()
        await self.response.write(text)
        self._written = time.monotonic()


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Work that goes on inside, whose faults are the caller's."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        (fault,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(fault, Exception):
        raise fault


def _sse(frames: Sequence[Frame], event_id: str | None) -> bytes:
    lines = []
    for index, frame in enumerate(frames):
        if event_id is not None and index == len(frames) - 1:
            lines.append(b"id: %s\n" % event_id.encode())
        if frame.event is not None:
            lines.append(b"event: %s\n" % frame.event.encode())
        data = frame.data if isinstance(frame.data, bytes) else msgspec.json.encode(frame.data)
        lines.append(b"data: %s\n\n" % data)
    return b"".join(lines)


LEFT = 499
"""The status of a request whose client left before the answer."""


def has_left(request: web.Request, error: Exception) -> bool:
    """Whether a handler failed because its client is gone."""
    is_gone = request.transport is None or request.transport.is_closing()
    return is_gone and isinstance(error, ConnectionError)


RUN_KEY = web.RequestKey("tetrarch_run", str)
STREAM_KEY = web.RequestKey("tetrarch_stream", SseStream)
"""What a request keeps: its run's id and its open SSE stream."""


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, who tells it, and the event after which it is told."""

    answer: Answer
    teller: Teller
    after: str | None = None


async def _pass(told: Told) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a client follows a run. `on_end` sees the answer before the client sees its end."""

    after: str | None = None  # the last event that the client has seen
    skip: int = 0  # or how many frames
    streams: bool | None = None  # None: as the run's own caller asked
    endpoint: Endpoint | None = None  # None: any
    is_ours: bool = False  # this request started the run: it ends with this client, however early that leaves
    on_end: Callable[[Told], Awaitable[None]] = _pass


FROM_THE_START = Following()


async def answer_run(
    request: web.Request, run_id: str, following: Following = FROM_THE_START
) -> web.StreamResponse:
    """Answers with a run, from its start or after an event id, until its end or until the client leaves.

    Raises RunNotFound, also for another tenant's run, and the turn's own failure when no stream is open.
    """
    request[RUN_KEY] = run_id
    structlog.contextvars.bind_contextvars(run=run_id)  # until the request ends (middleware.py)
    answer, is_ours = Answer(run_id), following.is_ours
    state = request.app[STATE]
    state.followers.join(run_id)
    try:
        generator = cast(AsyncGenerator[RunEvent, None], state.runs.events(run_id))
        async with contextlib.aclosing(generator) as events:
            first = await anext(events)
            answer.feed(first.event)
            is_ours = is_shown(request, answer, following.endpoint)
            if not is_ours:
                raise RunNotFound(run_id)
            is_ours = following.is_ours or _may_end(request, answer)
            told = Told(answer, DIALECTS[answer.shape.endpoint].teller(answer), following.after)
            if answer.shape.stream if following.streams is None else following.streams:
                return await _answer_stream(request, told, first.id, events, following)
            told.teller.begin()
            async for entry in events:
                tell(told, entry)  # a body is told from the pieces that a stream would have had
                await stop_when_complete(state.runs, answer)
    finally:
        is_over = answer.ended or answer.shape.is_detached
        state.followers.leave(run_id, cancel=is_ours, is_over=is_over)
    failure = answer.failure()
    if failure is not None:
        told.teller.fail(failure)
    await following.on_end(told)
    if failure is not None:
        raise failure
    return json_response(told.teller.body())


def is_shown(request: web.Request, answer: Answer, endpoint: Endpoint | None = None) -> bool:
    """Whether the caller may see this run, told as its first event says, and by this endpoint."""
    is_seen = answer.accepted is not None and access_of(request).sees(answer.shape.tenant)
    own = answer.shape.endpoint
    return is_seen and own in DIALECTS and endpoint in (None, own)


def _may_end(request: web.Request, answer: Answer) -> bool:
    """Whether the run may end because this client leaves: an onlooker takes nothing along."""
    access = access_of(request)
    return answer.shape.tenant == access.tenant and access.may("control")


async def _answer_stream(
    request: web.Request,
    told: Told,
    first_id: str,
    events: AsyncGenerator[RunEvent, None],
    following: Following,
) -> web.StreamResponse:
    answer, teller = told.answer, told.teller
    stream = await _open(request, teller, following.skip)
    await _send_after(told.after, stream, first_id, teller.begin())
    last = await _stream(stream, told, events, request.app[STATE].runs)
    failure = answer.failure()
    closing = teller.end() if failure is None else teller.fail(failure)
    await following.on_end(told)
    await stream.send([*last, *closing], RUN_END_ID if failure is None else None)
    await stream.response.write_eof()
    return stream.response


async def get_run(request: web.Request) -> web.StreamResponse:
    """GET /v1/chat/completions/{id}: the run's answer again, after `Last-Event-ID` or `?after=` if given."""
    given = request.match_info["id"]
    found = re.fullmatch(r"(?:chatcmpl|cmpl|run)-([0-9a-f]{32})", given)
    if found is None:
        raise RunNotFound(given)
    after = request.headers.get("Last-Event-ID") or request.query.get("after")
    if after is not None and not _EVENT_ID.fullmatch(after):
        raise InvalidField(
            "after", "'after' (or Last-Event-ID) must be an event id of this run, such as 1-12."
        )
    if after == RUN_END_ID:
        return web.Response(status=204)  # all was seen: an event source stops asking
    return await answer_run(request, f"run-{found[1]}", Following(after=after))


def json_response(body: Mapping[str, Any] | msgspec.Struct, *, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def _open(request: web.Request, teller: Teller, skip: int) -> SseStream:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    stream = SseStream(response, teller, request.app[STATE].settings.keepalive_seconds, skip)
    request[STREAM_KEY] = stream
    return stream


async def _stream(
    stream: SseStream, told: Told, events: AsyncGenerator[RunEvent, None], runs: Runs
) -> list[Frame]:
    """Tells the answer up to its run's end, whose own frames are returned instead of sent."""
    async with stream.kept_alive():
        async for entry in events:
            frames = tell(told, entry)
            if told.answer.ended:
                return frames
            await _send_after(told.after, stream, entry.id, frames)
            await stop_when_complete(runs, told.answer)
    raise AssertionError("a run's events end with its end")


def tell(told: Told, entry: RunEvent) -> list[Frame]:
    """The frames of one more event."""
    parts = told.answer.feed(entry.event)
    return told.teller.more(parts, entry.event if isinstance(entry.event, Tokens) else None)


async def stop_when_complete(runs: Runs, answer: Answer) -> None:
    """Ends a turn that says more than its caller wants."""
    if answer.is_complete and not answer.is_stopped and answer.turn_end is None:
        answer.is_stopped = True
        await runs.cancel(answer.run_id)


async def _send_after(after: str | None, stream: SseStream, event_id: str, frames: Sequence[Frame]) -> None:
    """Sends what the client has not seen: a resumed stream replays the run and is silent up to `after`."""
    if after is None or id_pair(event_id) > id_pair(after):
        await stream.send(frames, event_id)
