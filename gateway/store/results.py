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

from .keys import WEEK_SECONDS, run_key
from .shelf import Shelf

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
    """Results by run. All of them together stay under a bound, the oldest first to go."""

    def __init__(self, bus: Bus, *, max_bytes: int = 48 << 20) -> None:
        self._shelf = Shelf(bus, "results", max_bytes=max_bytes, seconds=WEEK_SECONDS, key=_key)

    async def put(self, run_id: str, result: RunResult) -> None:
        """Keeps it, cut where it is too large; a repeat replaces it. Raises BusLost."""
        await self._shelf.put(run_id, _fitted(result))

    async def get(self, run_id: str) -> RunResult | None:
        """The result; None when there is none yet or no more. Raises BusLost."""
        (encoded,) = await self._shelf.get([run_id])
        return None if encoded is None else _decode(encoded)

    async def get_many(self, run_ids: list[str]) -> dict[str, RunResult]:
        """Those that are there. Raises BusLost."""
        found = zip(run_ids, await self._shelf.get(run_ids), strict=True)
        return {run_id: _decode(encoded) for run_id, encoded in found if encoded is not None}

    async def remove(self, run_id: str) -> None:
        """Forgets it. Safe to repeat; raises BusLost."""
        await self._shelf.remove([run_id])


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
