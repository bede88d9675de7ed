"""What a run came to, kept for a week behind its end: the text, the calls, the counts, the error.

Owns the shape of a result and how one that is too large is cut. Knows no run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gateway.bus import Bus
from workers.messages import Derail, Timings, Usage

from .evictions import Evictions
from .keys import WEEK_SECONDS, run_key
from .packing import pack, unpack
from .shelf import Bound, Shelf

MAX_RESULT_BYTES = 1_000_000
"""A larger result keeps the heads of its texts."""


class ResultCall(Struct, frozen=True, kw_only=True):
    """A tool call that the last turn made."""

    id: str
    name: str
    arguments: str  # JSON text


class ResultError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why the run did not complete."""

    code: str  # a kind of gateway/errors.py
    message: str
    retryable: bool = False


class RunResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a run. Times are unix seconds; usage and timings are sums over its turns."""

    state: str  # completed, failed, cancelled, expired, rejected or derailed
    accepted: bytes = b""  # its first event as the bus has it, so that it can be told when the stream is gone
    text: str = ""  # of the last turn, without its reasoning
    reasoning: str = ""
    json: Annotated[str, Meta(description="The text's JSON value where a schema was asked for.")] = ""
    problem: str = ""  # what makes the text no value of that schema
    calls: tuple[ResultCall, ...] = ()
    finish_reason: str | None = None
    usage: Usage = Usage()
    thinking_tokens: int = 0
    tool_calls: int = 0
    timings: Timings = Timings()
    turns: int = 0
    ends: tuple[int, ...] = ()  # how many tokens it had at each turn's end, prompts included
    checkpoints: dict[str, int] = {}  # as in RunState
    attempts: int = 0
    started: float | None = None
    ended: float | None = None
    derail: Derail | None = None
    error: ResultError | None = None
    is_partial: bool = False  # the run was ended before its answer was whole
    is_truncated: bool = False  # it was too large to keep whole
    is_dropped: bool = False  # who cancelled it did not want what it had said


class ResultStore:
    """Results by run. Those of runs stay under one bound and those of calls under another, the oldest of each
    the first to go: calls are many, and their callers have their answers.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        max_bytes: int = 48 << 20,
        max_call_bytes: int = 8 << 20,
        evictions: Evictions | None = None,
    ) -> None:
        self._runs, self._calls = (
            Shelf(bus, kind, Bound(most, WEEK_SECONDS, evictions), key=_key)
            for kind, most in (("results", max_bytes), ("call-results", max_call_bytes))
        )

    async def put(self, run_id: str, result: RunResult, *, is_call: bool = False) -> None:
        """Keeps it, cut where it is too large; a repeat replaces it. Raises BusLost."""
        shelf = self._calls if is_call else self._runs
        await shelf.put(run_id, await pack(_fitted(result)))

    async def get(self, run_id: str) -> RunResult | None:
        """The result; None when there is none yet or no more. Raises BusLost."""
        (kept,) = await self._runs.get([run_id])
        return None if kept is None else _decode(await unpack(kept))

    async def remove(self, run_id: str) -> None:
        """Forgets it. Safe to repeat; raises BusLost."""
        await self._runs.remove([run_id])
        await self._calls.remove([run_id])


def _fitted(result: RunResult) -> bytes:
    encoded = _encode(result)
    if len(encoded) <= MAX_RESULT_BYTES:
        return encoded
    for smaller in _smaller(result):
        encoded = _encode(smaller)
        if len(encoded) <= MAX_RESULT_BYTES:
            break
    return encoded


def _smaller(result: RunResult) -> Iterator[RunResult]:
    """Whole calls go first to be cut, since a part of one is of no use; then reasoning, then the answer."""
    cut = msgspec.structs.replace(result, is_truncated=True, calls=(), json="")
    yield cut
    for num_bytes in (MAX_RESULT_BYTES // 4, 0):
        cut = msgspec.structs.replace(cut, reasoning=_head(cut.reasoning, num_bytes))
        yield cut
    cut = msgspec.structs.replace(cut, text=_head(cut.text, MAX_RESULT_BYTES // 2))
    yield cut
    yield msgspec.structs.replace(cut, accepted=b"")


def _head(text: str, num_bytes: int) -> str:
    return text.encode(errors="replace")[:num_bytes].decode(errors="ignore")


def _key(run_id: str) -> str:
    return run_key(run_id, "result")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunResult).decode
