"""Event streams of one run and of a whole session: resumable, with keep-alives, gaps told.

Owns how a stream goes on; what events say is telling.py's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar, cast

import msgspec
from aiohttp import web

from gateway.bus import StreamGone
from gateway.dialects.frames import Frame, Silence, Voice
from gateway.errors import GatewayError, InvalidField
from gateway.http.access import tenant_of
from gateway.http.state import STATE
from gateway.http.stream import STREAM_HEADERS, STREAM_KEY, SseStream
from gateway.runs.event_ids import id_pair
from gateway.runs.events import decode
from gateway.runs.run import RunEvent
from gateway.runs.told import Gap, told_end
from gateway.store.session_log import LogEntry, log_entry
from workers.messages import RUN_END_ID, run_events_key

from .access import own_run, store_of, verbs_of
from .lists import session_runs
from .reading import flag
from .telling import RunTeller, failure_frames, frames

NEWS_SECONDS = 1.0
"""How often a run's place in line is looked at."""

_EVENT_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")

Item = TypeVar("Item")


async def get_events(request: web.Request) -> web.StreamResponse:
    """A run's events from the start, or behind `Last-Event-ID` or `?after=`."""
    after, follows = _after(request), flag(request.query, "follow", default=True)
    run_id, state = await own_run(request)
    if after == RUN_END_ID:
        return web.Response(status=204)  # all was seen: an event source stops asking
    verbs = verbs_of(request)
    teller = RunTeller(run_id, lambda state: verbs.outlook(run_id, state))
    stream = await _open(request, teller)
    bus = store_of(request).bus
    if not await bus.read(run_events_key(run_id), "0-0", 1):  # they have expired, or the bus has lost them
        gap = Gap(run=run_id, after=after, before=RUN_END_ID)
        await stream.send(frames([gap, told_end(run_id, state.status, state)]), RUN_END_ID)
    elif follows:
        await _follow_run(request, stream, teller, after)
    else:
        async for page in bus.pages(run_events_key(run_id), "0-0"):
            for entry_id, message in page:
                if (event := decode(message)) is not None:
                    await _tell_run(stream, teller, RunEvent(entry_id, event), after)
    await stream.response.write_eof()
    return stream.response


async def get_session_events(request: web.Request) -> web.StreamResponse:
    """What happens to all runs of a session, from the start or behind an id of this stream."""
    after, follows = _after(request), flag(request.query, "follow", default=True)
    session, _ = await session_runs(request)
    where, log = (tenant_of(request), session), store_of(request).session_log
    lacks = await log.lacks(*where, after)
    if lacks:
        first = await log.read(*where, count=1)
        gap = Gap(run="", after=after, before=first[0].id if first else "")
        after = "0-0"
    stream = await _open(request, SessionVoice())
    if lacks:
        await stream.send(frames([gap]))
    if follows:
        follower = log.follow(*where, after)
        try:
            source = _followed(follower.next)
            await relay(stream, source, lambda entry: _tell_logged(stream, log_entry(entry)))
        finally:
            follower.close()
    else:
        for entry in await log.read(*where, after):
            await _tell_logged(stream, entry)
    await stream.response.write_eof()
    return stream.response


async def relay(
    stream: SseStream, source: AsyncGenerator[Item, None], send: Callable[[Item], Awaitable[None]]
) -> None:
    """Sends each item as it comes, and keep-alives in between."""
    async with contextlib.aclosing(source), stream.kept_alive():
        async for item in source:
            await send(item)


class SessionVoice:
    """A session's stream in silence and failure."""

    def silence(self) -> Silence:
        """A keep-alive."""
        return Silence(frames=[Frame({"type": "keepalive"}, event="keepalive")])

    def fail(self, error: GatewayError) -> list[Frame]:
        """The stream ends here: read on behind the last id."""
        return failure_frames(error)


async def _follow_run(request: web.Request, stream: SseStream, teller: RunTeller, after: str) -> None:
    events = cast(AsyncGenerator[RunEvent, None], verbs_of(request).events(teller.run_id))
    async with stream.kept_told(teller.news, NEWS_SECONDS):
        await relay(stream, events, lambda entry: _tell_run(stream, teller, entry, after))


async def _tell_run(stream: SseStream, teller: RunTeller, entry: RunEvent, after: str) -> None:
    """A resumed stream replays the run and is silent up to `after`."""
    told = teller.feed(entry.id, entry.event)
    if id_pair(entry.id) > id_pair(after):
        await stream.send(frames(told), entry.id)


async def _tell_logged(stream: SseStream, entry: LogEntry) -> None:
    if not entry.event:
        gap = Gap(run=entry.run_id, after="", before=entry.event_id)
        await stream.send(frames([gap]), entry.id)
        return
    events = msgspec.json.decode(entry.event, type=list[dict[str, object]])
    await stream.send([Frame(event, event=str(event.get("type"))) for event in events], entry.id)


async def _followed(following: Callable[[], Awaitable[Item]]) -> AsyncGenerator[Item, None]:
    with contextlib.suppress(StreamGone):
        while True:
            yield await following()


async def _open(request: web.Request, voice: Voice) -> SseStream:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    stream = SseStream(response, voice, request.app[STATE].settings.keepalive_seconds)
    request[STREAM_KEY] = stream
    return stream


def _after(request: web.Request) -> str:
    after = request.headers.get("Last-Event-ID") or request.query.get("after") or "0-0"
    if not _EVENT_ID.fullmatch(after) or max(id_pair(after)) >= 2**64:
        raise InvalidField("after", "'after' (or Last-Event-ID) must be an id of this stream, such as 1-12.")
    return after
