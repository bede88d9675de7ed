"""What the gateway costs: processor's time of its process for each call and for each streamed event.

    python -m bench.gateway_cost [--calls 40] [--events 400]

A real gateway process on a core of its own, a real Valkey, the default model's tokenizer; a scripted engine
stands for the model. Calls go one at a time: a fresh prompt of 1,000 tokens, 50 streamed tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from workers.messages import Submit

from .gateway_rig import Gateway, Texts, default_bundle, gateway, middle, quantile, report, table
from .scripted_engine import MODEL, STAMP, Script, ScriptedEngine, pieces_of

PROMPT_TOKENS = 1_000
ANSWER_TOKENS = 50
SETTLE_SECONDS = 0.12
"""After a call: what is written behind it (the list of runs, the session's log) is of its cost."""

EVENT_SECONDS = 0.012


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one API is asked for a streamed answer."""

    name: str
    path: str

    def body(self, text: str) -> dict[str, Any]:
        """One user message."""
        messages = [{"role": "user", "content": text}]
        if self.name == "runs":
            return {"model": MODEL, "messages": messages, "session": "bench"}
        if self.name == "responses":
            return {"model": MODEL, "input": text, "stream": True}
        return {"model": MODEL, "messages": messages, "max_tokens": 4096, "stream": True}


ENDPOINTS = (
    Endpoint("chat", "/v1/chat/completions"),
    Endpoint("responses", "/v1/responses"),
    Endpoint("messages", "/v1/messages"),
    Endpoint("runs", "/v1/runs"),
)


async def streamed(session: aiohttp.ClientSession, endpoint: Endpoint, text: str) -> AsyncIterator[bytes]:
    """The pieces of one call's stream as they arrive; a run's from its events."""
    async with session.post(endpoint.path, json=endpoint.body(text)) as response:
        if response.status not in (200, 202):
            raise RuntimeError(f"{endpoint.path}: {await response.text()}")
        if endpoint.name != "runs":
            async for piece in response.content.iter_any():
                yield piece
            return
        run_id = (await response.json())["id"]
    async with session.get(f"/v1/runs/{run_id}/events") as response:
        async for piece in response.content.iter_any():
            yield piece


async def calls(
    session: aiohttp.ClientSession, served: Gateway, endpoint: Endpoint, prompts: Sequence[str], idle: float
) -> list[float]:
    """Milliseconds of processor's time for each call, the idle gateway's own taken off."""
    loop = asyncio.get_running_loop()
    spent = []
    for prompt in prompts:
        began, before = loop.time(), served.cpu_seconds()
        async for _ in streamed(session, endpoint, prompt):
            pass
        await asyncio.sleep(SETTLE_SECONDS)
        spent.append(1e3 * (served.cpu_seconds() - before - idle * (loop.time() - began)))
    return spent


async def events(
    session: aiohttp.ClientSession, served: Gateway, endpoint: Endpoint, prompt: str, idle: float
) -> list[float]:
    """Microseconds of processor's time for each event of a stream whose events come one at a time."""
    loop = asyncio.get_running_loop()
    spent: list[float] = []
    began, before = loop.time(), served.cpu_seconds()
    async for piece in streamed(session, endpoint, prompt):
        await asyncio.sleep(EVENT_SECONDS / 2)
        now, after = loop.time(), served.cpu_seconds()
        if piece.count(STAMP.encode()) == 1:
            spent.append(1e6 * (after - before - idle * (now - began)))
        began, before = now, after
    return spent[10:-1]


async def idle_rate(served: Gateway) -> float:
    """Processor's seconds a second of a gateway that nobody calls."""
    before = served.cpu_seconds()
    await asyncio.sleep(3)
    return (served.cpu_seconds() - before) / 3


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """All figures, printed as tables too."""
    tokenizer, bundle = default_bundle()
    texts = Texts(tokenizer, options.seed)
    pieces = pieces_of(tokenizer, texts.take(options.events + 100), options.events)
    figures: dict[str, object] = {}

    def script(submit: Submit) -> Script:
        if len(submit.token_ids) // 4 < PROMPT_TOKENS // 2:
            return Script(pieces, EVENT_SECONDS, is_stamped=True)
        return Script(pieces[:ANSWER_TOKENS], 0.002)

    with gateway() as (served, bus_url):
        async with (
            ScriptedEngine(bus_url, bundle, script),
            aiohttp.ClientSession(served.url) as session,
        ):
            idle = await idle_rate(served)
            figures["idle_percent"] = round(100 * idle, 2)
            rows = []
            for endpoint in ENDPOINTS:
                prompts = [texts.take(PROMPT_TOKENS) for _ in range(options.calls + 3)]
                call = (await calls(session, served, endpoint, prompts, idle))[3:]
                event = await events(session, served, endpoint, "Tell me a story.", idle)
                figures[endpoint.name] = {
                    "call_ms": [round(middle(call), 2), round(quantile(call, 0.99), 2)],
                    "event_us": [round(middle(event)), round(quantile(event, 0.99))],
                }
                rows.append(
                    [
                        endpoint.name,
                        f"{middle(call):.1f}",
                        f"{quantile(call, 0.99):.1f}",
                        f"{middle(event):.0f}",
                        f"{quantile(event, 0.99):.0f}",
                    ]
                )
    print(f"{PROMPT_TOKENS:,} tokens in, {ANSWER_TOKENS} streamed out, {options.calls} calls of each kind")
    table(["API", "ms/call p50", "p99", "us/event p50", "p99"], rows)
    print(f"an idle gateway takes {100 * idle:.1f} % of a core (taken off)")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints tables and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=40, help="of each API")
    parser.add_argument("--events", type=int, default=400, help="of one stream of each API")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    report("gateway_cost", asyncio.run(measure(parser.parse_args(arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
