"""Latency that the gateway adds to streamed events: 200 idle and 32 active event streams on one core.

    python -m bench.event_streams [--idle 200] [--active 32] [--rate 20] [--seconds 15] [--repeats 3]

A real gateway on one core, a real Valkey, a scripted engine that stamps each token's event as it is written
(XADD); the client reads the clock when the event has arrived. `bus`: the same for one stream that is read
from the bus without a gateway. Half of the idle streams follow silent runs,
half the sessions of these. Active turns step by fours, each four at moments of its own, as engines do. What
the bus and the client take is in the figures. Exit code 1 when p99 (median of the repeats) is 20 ms or more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from redis.asyncio import Redis

from gateway.tasks import end_tasks
from workers.messages import EVENT_FIELD, Submit, run_events_key

from .gateway_rig import Gateway, Texts, default_bundle, gateway, middle, quantile, report, table
from .scripted_engine import MODEL, STAMP, Script, ScriptedEngine, pieces_of

GOAL_SECONDS = 0.020
WARM_SECONDS = 3.0
_STAMPED = re.compile(rb"%s(\d+)" % STAMP.encode())


@dataclass(slots=True)
class Heard:
    """What active streams have brought: seconds from writing to arrival, and by when they shall count."""

    latencies: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def take(self, piece: bytes) -> None:
        """A piece of a stream, which may hold several events."""
        now = time.monotonic_ns()
        self.num_bytes += len(piece)
        self.latencies += [(now - int(stamp)) / 1e9 for stamp in _STAMPED.findall(piece)]


class Client:
    """Starts runs and follows event streams."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.heard = Heard()
        self.direct = Heard()  # by a reader that asks the bus itself
        self.num_idle_bytes = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._session = session

    async def start(self, session: str, kind: str) -> str:
        """A run's id. `kind` tells the engine what it is to say."""
        body = {"model": MODEL, "input": "Go.", "session": session, "agent": f"{kind}-{session}"}
        async with self._session.post("/v1/runs", json=body) as response:
            told: dict[str, Any] = await response.json()
            if response.status != 202:
                raise RuntimeError(str(told))
            return str(told["id"])

    def follow(self, path: str, *, is_active: bool) -> None:
        """Reads an event stream from here on."""
        self.tasks.append(asyncio.create_task(self._follow(path, is_active=is_active)))

    def read_bus(self, url: str, run_id: str) -> None:
        """Reads a run's stream from the bus itself from here on."""
        self.tasks.append(asyncio.create_task(self._read_bus(url, run_events_key(run_id))))

    async def _read_bus(self, url: str, key: str) -> None:
        client = Redis.from_url(url, protocol=2)
        position = "$"
        try:
            while True:
                answer: Any = await client.xread({key: position}, block=1000)
                for _, entries in answer or []:
                    position = entries[-1][0].decode()
                    self.direct.take(b"".join(fields[EVENT_FIELD] for _, fields in entries))
        finally:
            await client.aclose()

    async def _follow(self, path: str, *, is_active: bool) -> None:
        async with self._session.get(path) as response:
            async for piece in response.content.iter_any():
                if is_active:
                    self.heard.take(piece)
                else:
                    self.num_idle_bytes += len(piece)


async def observe(served: Gateway, client: Client, options: argparse.Namespace) -> list[dict[str, float]]:
    """One row of figures for each repeat."""
    rows = []
    for _ in range(options.repeats):
        client.heard.latencies.clear()
        client.direct.latencies.clear()
        before, began = served.cpu_seconds(), time.monotonic()
        await asyncio.sleep(options.seconds)
        seconds, heard = time.monotonic() - began, client.heard.latencies[:]
        direct = client.direct.latencies[:]
        if not heard or not direct:
            raise RuntimeError("nothing arrived")
        cpu = served.cpu_seconds() - before
        rows.append(
            {
                "events_per_second": round(len(heard) / seconds, 1),
                "cpu_percent": round(100 * cpu / seconds, 1),
                "cpu_us_per_event": round(1e6 * cpu / len(heard)),
                "p50_ms": round(1e3 * quantile(heard, 0.5), 2),
                "p99_ms": round(1e3 * quantile(heard, 0.99), 2),
                "max_ms": round(1e3 * max(heard), 2),
                "bus_p50_ms": round(1e3 * quantile(direct, 0.5), 2),
                "bus_p99_ms": round(1e3 * quantile(direct, 0.99), 2),
            }
        )
    return rows


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Starts everything, then observes."""
    tokenizer, bundle = default_bundle()
    pieces = pieces_of(tokenizer, Texts(tokenizer, 1).take(400), 100)
    num_tokens = int(options.rate * (WARM_SECONDS + options.seconds * options.repeats + 60))
    talk = Script((pieces * (num_tokens // len(pieces) + 1))[:num_tokens], 1 / options.rate, is_stamped=True)

    def script(submit: Submit) -> Script:
        return talk if submit.agent.startswith("active") else Script()

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    with gateway() as (served, bus_url):
        async with (
            ScriptedEngine(bus_url, bundle, script, num_together=options.together),
            aiohttp.ClientSession(served.url, connector=connector, timeout=timeout) as session,
        ):
            client = Client(session)
            with contextlib.closing(_Tasks(client.tasks)):
                for number in range(options.idle // 2):
                    run_id = await client.start(f"idle-{number}", "idle")
                    client.follow(f"/v1/runs/{run_id}/events", is_active=False)
                    client.follow(f"/v1/sessions/idle-{number}/events", is_active=False)
                for number in range(options.active):
                    run_id = await client.start(f"active-{number}", "active")
                    client.follow(f"/v1/runs/{run_id}/events", is_active=True)
                    await asyncio.sleep(1.37 / options.rate / options.together)  # not all at one moment
                client.read_bus(bus_url, run_id)
                await asyncio.sleep(WARM_SECONDS)
                rows = await observe(served, client, options)
            await end_tasks(client.tasks)
    return rows


class _Tasks:
    """Cancels tasks however their block ends."""

    def __init__(self, tasks: list[asyncio.Task[None]]) -> None:
        self._tasks = tasks

    def close(self) -> None:
        """Safe to repeat."""
        for task in self._tasks:
            task.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints a table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle", type=int, default=200, help="event streams on which nothing happens")
    parser.add_argument("--active", type=int, default=32, help="event streams of generating runs")
    parser.add_argument("--rate", type=float, default=20.0, help="events a second on each active stream")
    parser.add_argument("--together", type=int, default=4, help="turns that step at one moment")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = asyncio.run(measure(options))
    p99 = middle([row["p99_ms"] for row in rows])
    print(
        f"{options.idle} idle and {options.active} active streams, {options.rate:g} events/s on each active"
    )
    table(list(rows[0]), [list(row.values()) for row in rows])
    print(f"p99, median of {len(rows)}: {p99:.2f} ms; goal: under {1e3 * GOAL_SECONDS:.0f} ms")
    report("event_streams", {"p99_ms": p99, "rows": rows})
    return 0 if p99 < 1e3 * GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
