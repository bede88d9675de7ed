"""Many runs at once: in requests of as many as the server takes, and once more for those without a place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.native.bodies import BatchBody, BatchItem, CreatedBody
from gateway.native.structs import MAX_BATCH

from .errors import Refused, told_error
from .fields import RunFields, encode_body, wire_fields
from .wire import Ask, Wire

Spawned = CreatedBody | Refused


async def spawn_batch(
    wire: Wire, runs: Sequence[RunFields], *, all_or_nothing: bool, key: str
) -> list[Spawned]:
    """Each run, or why there is none, in order. Raises Refused for a whole request, and Unreachable."""
    if all_or_nothing:
        return await _send(wire, runs, key, all_or_nothing=True)
    spawned: list[Spawned] = []
    for start in range(0, len(runs), MAX_BATCH):
        part = runs[start : start + MAX_BATCH]
        spawned += await _send(wire, part, f"{key}/{start}", all_or_nothing=False)
    busy = [(n, one) for n, one in enumerate(spawned) if isinstance(one, Refused) and one.is_retryable]
    found = await asyncio.gather(*(_again(wire, runs[n], f"{key}/{n}/again", error) for n, error in busy))
    for (number, _), one in zip(busy, found, strict=True):
        spawned[number] = one
    return spawned


async def _send(wire: Wire, runs: Sequence[RunFields], key: str, *, all_or_nothing: bool) -> list[Spawned]:
    body = encode_body({"runs": [wire_fields(run) for run in runs], "all_or_nothing": all_or_nothing})
    batch = await wire.ask(Ask(method="POST", path="/v1/runs/batch", body=body, key=key), BatchBody)
    return [_spawned(item) for item in batch.data]


async def _again(wire: Wire, run: RunFields, key: str, error: Refused) -> Spawned:
    """With the patience of a call of its own, which a request of many does not have for each of them; and no
    earlier than it was told.
    """
    delay = wire.tries().delay(error)
    if delay is None:
        return error
    await asyncio.sleep(delay)
    try:
        return await wire.ask(
            Ask(method="POST", path="/v1/runs", body=encode_body(run), key=key), CreatedBody
        )
    except Refused as refused:
        return refused


def _spawned(item: BatchItem) -> Spawned:
    return item.run if item.run is not None else told_error(item.error or {}, item.retry_after)
