"""Event streams that go on over broken connections and gateways that restart: nothing is lost or told twice.

Owns how a stream is resumed. What its events mean is gateway/runs/told.py's and gateway/native/telling.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import TracebackType

import msgspec

from gateway.native.telling import PublicEvent
from gateway.runs.told import ENDS, Gap, RunProgress

from .errors import Refused, TetrarchError, told_error
from .sse import Sse, SseReader
from .wire import Query, Wire

START = "0-0"
"""The id before every stream's first event."""

ENDINGS = tuple(ENDS.values())
"""The events that end a run."""

_decode = msgspec.json.Decoder(PublicEvent).decode


class EventStream:
    """The events of one run up to its end, or of a session for as long as it is read.

    Iterate over it; `last_id` is then the place behind the event that came last, to go on from another day.
    It raises NotFound when there is no such run, and Unreachable after all patience.
    """

    def __init__(self, wire: Wire, path: str, after: str, *, follow: bool) -> None:
        self.last_id = after
        self.num_resumed = 0
        self._wire = wire
        self._path = path
        self._follow = follow
        self._last_gap: PublicEvent | None = None
        self._events = self._read()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> PublicEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Stops reading. The run goes on."""
        await self._events.aclose()

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _read(self) -> AsyncGenerator[PublicEvent, None]:
        tries = self._wire.tries()
        while True:
            failure: TetrarchError | None = None
            try:
                async with contextlib.aclosing(self._read_once()) as events:
                    async for event in events:
                        tries.succeeded()
                        yield event
                        if isinstance(event, ENDINGS) and self._is_of_run:
                            return
                if not self._follow:
                    return
            except TetrarchError as error:
                failure = error
            delay = tries.delay(failure)
            if delay is None:
                raise failure or TetrarchError(
                    f"The stream {self._path} ends again and again without an end."
                )
            await asyncio.sleep(delay)
            self.num_resumed += 1

    @property
    def _is_of_run(self) -> bool:
        return self._path.startswith("/v1/runs/")

    async def _read_once(self) -> AsyncGenerator[PublicEvent, None]:
        """One connection. The server sends what one of its steps tells in one go, the last event with the id:
        only all of them together are a place to go on from, so that they are told together.
        """
        query: Query = {} if self._follow else {"follow": "false"}
        reader, held = SseReader(), list[PublicEvent]()
        async with self._wire.listen(self._path, query, self.last_id) as chunks:
            async for chunk in chunks:
                for sse in reader.feed(chunk):
                    event = _event(sse)
                    if event is not None and sse.id is None and self._is_by_itself(event):
                        if event != self._last_gap:
                            yield event
                        self._last_gap = event if isinstance(event, Gap) else self._last_gap
                        continue
                    held += [event] if event is not None else []
                    if sse.id is None:
                        continue
                    for earlier in held[:-1]:
                        yield earlier
                    self.last_id = sse.id
                    for last in held[-1:]:
                        yield last
                    held = []

    def _is_by_itself(self, event: PublicEvent) -> bool:
        """Keep-alives, and a session's gap, belong to no step."""
        return isinstance(event, RunProgress) or (isinstance(event, Gap) and not self._is_of_run)


def _event(sse: Sse) -> PublicEvent | None:
    """None for what a newer server tells. Raises Refused for an error, behind which the stream may go on."""
    try:
        return _decode(sse.data)
    except msgspec.MsgspecError:
        if sse.event == "error":
            raise _error(sse.data) from None
        return None


def _error(data: bytes) -> Refused:
    try:
        return told_error(msgspec.json.decode(data)["error"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return told_error({"message": "The stream failed."})
