"""Which run an Idempotency-Key has made, for a day: the same call again finds it, another is refused.

Owns the claims. A claim remembers that its run has been, whatever is still kept of that: none is made twice.
Knows no bodies, only their digests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio.client import Pipeline

from gateway.bus import Bus
from gateway.errors import Conflict, shorten
from workers.messages import run_events_key

from .keys import DAY_SECONDS, grave_key, named_key, run_key
from .watched import watched

CLAIM_SECONDS = 5.0
"""A run that has not come to be so long after its claim never will: its gateway stopped in between."""
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Claim:
    """The run that this key stands for. `is_new`: it is the claimant's to create, maybe once more: one that
    claimed before may be slow and not gone.
    """

    run_id: str
    is_new: bool


class _Claimed(msgspec.Struct, frozen=True, array_like=True):
    run_id: str
    body_digest: bytes
    claimant: str  # the run id that it came with: its own while nobody claimed before
    is_made: bool = False


class Idempotency:
    """Claims of keys, each its tenant's own."""

    def __init__(self, bus: Bus, *, claim_seconds: float = CLAIM_SECONDS) -> None:
        self._bus = bus
        self._claim_seconds = claim_seconds

    async def claim(self, tenant: str, key: str, body_digest: bytes, run_id: str) -> Claim:
        """The run of an earlier call with this key and body, once it has come to be, though it may be gone
        again; else `run_id` is new.

        Waits up to CLAIM_SECONDS for another claimant to create its run, then creates that one in its place.
        Raises Conflict when the key came with another body, and BusLost.
        """
        name = named_key("claim", tenant, key)
        while True:
            pipeline = self._bus.commands.pipeline(transaction=True)
            pipeline.set(name, _encode(_Claimed(run_id, body_digest, run_id)), nx=True, ex=DAY_SECONDS)
            pipeline.get(name)
            pipeline.pttl(name)
            _, found, left = await self._bus.execute(pipeline)
            claimed = _decode(found)
            if claimed.body_digest != body_digest:
                raise _conflict(key, claimed.run_id)
            if claimed.is_made:
                return Claim(claimed.run_id, is_new=False)
            if claimed.claimant == run_id:
                return Claim(claimed.run_id, is_new=True)
            if await self._has_come_to_be(claimed.run_id):
                await self.settle(tenant, key, claimed.run_id)
                return Claim(claimed.run_id, is_new=False)
            age_seconds = DAY_SECONDS - left / 1000
            if age_seconds >= self._claim_seconds:
                ours = _Claimed(claimed.run_id, body_digest, run_id)
                if await self._take_over(name, found, _encode(ours)):
                    return Claim(claimed.run_id, is_new=True)
            await asyncio.sleep(LOOK_SECONDS)

    async def settle(self, tenant: str, key: str, run_id: str) -> None:
        """The key's run has come to be. Safe to repeat; raises BusLost."""
        name = named_key("claim", tenant, key)

        async def decide(pipeline: Pipeline) -> None:
            found: Any = await self._bus.answered(pipeline.get(name))
            if found is not None and (claimed := _decode(found)).run_id == run_id and not claimed.is_made:
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.set(name, _encode(msgspec.structs.replace(claimed, is_made=True)), keepttl=True)

        await watched(self._bus, [name], decide)

    async def is_made(self, tenant: str, key: str) -> bool:
        """Whether the key's run is known to have come to be. Raises BusLost."""
        found = await self._bus.get(named_key("claim", tenant, key))
        return found is not None and _decode(found).is_made

    async def bury(self, run_id: str) -> None:
        """The run is deleted, or will be at its end: a key for it whose gateway did not live to settle it
        makes it no more. Raises BusLost.
        """
        await self._bus.answered(self._bus.commands.set(grave_key(run_id), b"", ex=DAY_SECONDS))

    async def release(self, tenant: str, key: str, run_id: str) -> None:
        """The run that was claimed with this id will not come to be: it was refused. Safe to repeat; raises
        BusLost.
        """
        name = named_key("claim", tenant, key)

        async def decide(pipeline: Pipeline) -> None:
            found: Any = await self._bus.answered(pipeline.get(name))
            if found is not None and _decode(found).claimant == run_id:
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.delete(name)

        await watched(self._bus, [name], decide)

    async def _has_come_to_be(self, run_id: str) -> bool:
        keys = (
            run_events_key(run_id),
            run_key(run_id, "result"),
            run_key(run_id, "note"),
            grave_key(run_id),
        )
        return bool(await self._bus.answered(self._bus.commands.exists(*keys)))

    async def _take_over(self, name: str, before: bytes, ours: bytes) -> bool:
        async def decide(pipeline: Pipeline) -> bool:
            if await self._bus.answered(pipeline.get(name)) != before:
                return False
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.set(name, ours, ex=DAY_SECONDS)
            return True

        return await watched(self._bus, [name], decide)


def _conflict(key: str, run_id: str) -> Conflict:
    return Conflict(
        "idempotency_conflict",
        f"The Idempotency-Key '{shorten(key)}' was used within a day with another body, for {run_id}. "
        "Send the same body, or choose a new key.",
        param="Idempotency-Key",
    )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Claimed).decode
