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
    Cancelled,
    Failed,
    Finished,
    Paused,
    Progress,
    RunEnded,
    Started,
    Tokens,
    run_events_key,
)


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's own, since it started. Computed tokens are those of prefills."""

    computed: int = 0
    cached: int = 0
    generated: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.computed + other.computed, self.cached + other.cached, self.generated + other.generated
        )

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


def prompts_of(events: Iterable[AnyEvent]) -> tuple[int, int]:
    """A run's prompt tokens over its turns, and how many of those no attempt of a turn had to compute."""
    prompts: list[int] = []
    found: list[list[int]] = []
    for event in events:
        match event:
            case Accepted(prompt_tokens=num) | TurnOpened(prompt_tokens=num):
                prompts.append(num)
                found.append([])
            case Started(cached_tokens=num):
                found[-1].append(min(num, prompts[-1]))
    return sum(prompts), sum(min(turn, default=0) for turn in found)


def work_of(events: Iterable[AnyEvent]) -> Counters:
    """What engines must have done for a run, by its events: attempt by attempt."""
    computed = cached = generated = 0
    prompt = said = found = reached = 0  # of the turn, of its present attempt
    is_open = False  # the attempt has a worker and no token yet
    for event in events:
        match event:
            case Accepted(prompt_tokens=num) | TurnOpened(prompt_tokens=num):
                prompt, said = num, 0
            case Started(cached_tokens=num):
                is_open, found, reached = True, num, num
                cached += num
            case Progress(processed_tokens=num):
                reached = num
            case Tokens(token_ids=ids):
                computed += prompt + said - found if is_open else 0
                is_open = False
                said += len(ids) // 4
                generated += len(ids) // 4
            case Paused() | Finished() | Cancelled() | Failed():
                computed += reached - found if is_open else 0
                is_open = False
    return Counters(computed, cached, generated)
