"""Many runs at once: in requests of as many as the server takes, and once more those that lack a place.

A request is sent again whole, under its key: what was made is told again, and what may have been made is not
made twice.
"""

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
        return await _send(wire, _encode(runs, all_or_nothing=True), key)
    parts = [
        (_encode(runs[start : start + MAX_BATCH], all_or_nothing=False), f"{key}/{start}")
        for start in range(0, len(runs), MAX_BATCH)
    ]
    first = [await _send(wire, *part) for part in parts]
    rest = (_settled(wire, *part, spawned) for part, spawned in zip(parts, first, strict=True))
    return [one for spawned in await asyncio.gather(*rest) for one in spawned]


def _encode(runs: Sequence[RunFields], *, all_or_nothing: bool) -> bytes:
    return encode_body({"runs": [wire_fields(run) for run in runs], "all_or_nothing": all_or_nothing})


async def _send(wire: Wire, body: bytes, key: str) -> list[Spawned]:
    batch = await wire.ask(Ask(method="POST", path="/v1/runs/batch", body=body, key=key), BatchBody)
    return [_spawned(item) for item in batch.data]


async def _settled(wire: Wire, body: bytes, key: str, spawned: list[Spawned]) -> list[Spawned]:
    """With the patience of a call, which a request of many does not have for each of them; none is asked for
    again earlier than it was told.
    """
    tries = wire.tries()
    while busy := [one for one in spawned if isinstance(one, Refused) and one.is_retryable]:
        delay = tries.delay(max(busy, key=lambda one: one.retry_after or 0.0))
        if delay is None:
            break
        await asyncio.sleep(delay)
        spawned = await _send(wire, body, key)
    return spawned


def _spawned(item: BatchItem) -> Spawned:
    return item.run if item.run is not None else told_error(item.error or {}, item.retry_after)
