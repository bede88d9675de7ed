"""A write that is made only if what it was decided on still stands.

Owns the tries and what a lost connection means. Knows no key.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from gateway.bus import Bus, BusLost

TRIES = 64
WAIT_SECONDS = 0.002

Answer = TypeVar("Answer")


async def watched(bus: Bus, keys: Sequence[str], decide: Callable[[Pipeline], Awaitable[Answer]]) -> Answer:
    """What `decide` answers, its writes done at once if no key has changed since it began to read.

    `decide` reads with the pipeline (`bus.answered`), calls `multi` and adds its writes, or adds none. It is
    called again for what another wrote meanwhile. After BusLost the writes may have been done or not: what it
    reads must tell.
    """
    async with bus.commands.pipeline(transaction=True) as pipeline:
        for number in range(TRIES):
            try:
                await bus.answered(pipeline.watch(*keys))
                answer = await decide(pipeline)
                await bus.execute(pipeline)
                return answer
            except WatchError:
                await asyncio.sleep(random.uniform(0, WAIT_SECONDS * number))
    raise BusLost
