"""Waits for any number of runs with requests of bounded length, so that no long one breaks on its way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from gateway.native.bodies import RunBody, WaitBody
from gateway.native.structs import MAX_WAITED

from .wire import ANSWER_SECONDS, Ask, Wire

POLL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Waited:
    """Those that are done, in the order of the call; the ids of the others."""

    done: list[RunBody]
    pending: list[str]
    timed_out: bool


async def wait_for_runs(
    wire: Wire,
    run_ids: Sequence[str],
    mode: Literal["any", "all"],
    until: Literal["settled", "ended"],
    seconds: float | None,
) -> Waited:
    """Raises NotFound for an unknown run."""
    pending, done = list(dict.fromkeys(run_ids)), dict[str, RunBody]()
    deadline = None if seconds is None else time.monotonic() + seconds
    while pending:
        left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))
        for part in await _poll(wire, pending, mode, until, left):
            done |= {run.id: run for run in part.done}
        pending = [run_id for run_id in pending if run_id not in done]
        is_over = deadline is not None and time.monotonic() >= deadline
        if is_over or (done and mode == "any"):
            break
    timed_out = bool(pending) and not (done and mode == "any")
    return Waited([done[run_id] for run_id in dict.fromkeys(run_ids) if run_id in done], pending, timed_out)


async def _poll(
    wire: Wire, run_ids: Sequence[str], mode: Literal["any", "all"], until: str, seconds: float
) -> list[WaitBody]:
    """One look at all of them. With `any` the others' answers are not waited for."""
    parts = [run_ids[start : start + MAX_WAITED] for start in range(0, len(run_ids), MAX_WAITED)]
    asks = [asyncio.ensure_future(wire.ask(_ask(part, mode, until, seconds), WaitBody)) for part in parts]
    try:
        how = asyncio.FIRST_COMPLETED if mode == "any" else asyncio.FIRST_EXCEPTION
        answered, _ = await asyncio.wait(asks, return_when=how)
    finally:
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
    return [ask.result() for ask in answered]


def _ask(run_ids: Sequence[str], mode: str, until: str, seconds: float) -> Ask:
    told = {"ids": list(run_ids), "mode": mode, "until": until, "timeout_ms": round(1000 * seconds)}
    body = msgspec.json.encode(told)
    return Ask(method="POST", path="/v1/runs/wait", body=body, seconds=seconds + ANSWER_SECONDS)
