"""What the bus and the engine have written down about runs: counted twice, it must come to the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from redis import Redis

from gateway.runs.events import AnyEvent, TurnOpened, decode
from workers.messages import (
    EVENT_FIELD,
    Accepted,
    Dispatched,
    Paused,
    Progress,
    RunEnded,
    Started,
    Tokens,
    TurnEnd,
    run_events_key,
)


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's own, since it started. Computed tokens are those of prefills."""

    computed: int = 0
    cached: int = 0
    generated: int = 0

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.computed - other.computed, self.cached - other.cached, self.generated - other.generated
        )


async def counters(http: aiohttp.ClientSession, url: str) -> Counters:
    """As the engine last said; once it is at rest and says the same for longer than it takes to be told."""
    last, since = Counters(), time.monotonic()
    deadline = since + 40
    while True:
        async with http.get(f"{url}/health") as response:
            stats: dict[str, Any] = (await response.json())["engines"][0]["stats"]
        told = Counters(
            stats.get("prompt_tokens_computed", 0),
            stats.get("prompt_tokens_cached", 0),
            stats.get("generated_tokens", 0),
        )
        is_at_rest = not stats.get("num_running", 0) and not stats.get("num_waiting", 0)
        if told != last or not is_at_rest:
            last, since = told, time.monotonic()
        if time.monotonic() - since > 2.5:
            return told
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.1)


def events_of(bus: Redis, run_id: str) -> list[AnyEvent]:
    """A run's stream, read past all gateways."""
    entries: Any = bus.xrange(run_events_key(run_id))
    events = [decode(fields[EVENT_FIELD]) for _, fields in entries]
    return [event for event in events if event is not None]


def num_ends(events: Iterable[AnyEvent]) -> int:
    """How often the run has ended."""
    return sum(isinstance(event, RunEnded) for event in events)


def work_of(events: Iterable[AnyEvent]) -> Counters:
    """What engines must have done for a run, by its events: attempt by attempt."""
    work = Counters()
    prompt = generated = cached = reached = 0
    is_open = False  # an attempt has a worker and no token yet
    for event in events:
        match event:
            case Accepted(prompt_tokens=num) | TurnOpened(prompt_tokens=num):
                prompt, generated = num, 0
            case Dispatched():
                is_open = False
            case Started(cached_tokens=num):
                cached = reached = num
                is_open = True
                work = Counters(work.computed, work.cached + cached, work.generated)
            case Progress(processed_tokens=num):
                reached = max(reached, num)
            case Tokens(token_ids=ids):
                if is_open:
                    is_open = False
                    work = Counters(work.computed + prompt + generated - cached, work.cached, work.generated)
                generated += len(ids) // 4
                work = Counters(work.computed, work.cached, work.generated + len(ids) // 4)
            case Paused() | _ if isinstance(event, TurnEnd) and is_open:
                is_open = False
                work = Counters(work.computed + reached - cached, work.cached, work.generated)
    return work
