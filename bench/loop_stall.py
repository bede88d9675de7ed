"""How long the gateway's event loop stands still: prompts of 128k tokens are tokenised, long answers learned.

    python -m bench.loop_stall [--tokens 128000] [--repeats 2] [--where]

A gateway process with the default model's tokenizer whose loop is watched from inside (loop_probe.py); a
scripted engine answers. `lag`: how late a timer of 1 ms was at most, milliseconds; it counts waiting for the
interpreter's lock and for other programs too. `cpu`: processor's time of the longest callback, which others
do not change much. Medians of the repeats; exit code 1 when a lag is 20 ms or more. `--where` prints places.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from workers.messages import Submit

from .gateway_rig import Gateway, Texts, default_bundle, gateway, middle, report, table
from .loop_probe import Seen
from .loop_probe import ask as ask_probe
from .scripted_engine import Piece, Script, ScriptedEngine, pieces_of
from .stall_calls import APIS, CHAT, COUNT, MESSAGES, RESPONSES, RUNS, Api, Said, ask, history, one_text, read

GOAL_MS = 20.0
ANSWER_TOKENS = 48_000
NUM_EVENTS = 8_000
SHORT = 20


@dataclass(slots=True)
class Measured:
    """What was seen in each kind of work."""

    served: Gateway
    rows: dict[str, list[Seen]] = field(default_factory=dict)

    async def watch(self, name: str, work: Awaitable[str]) -> str:
        """Does the work and notes what the loop did meanwhile and shortly after."""
        await asyncio.sleep(0.1)
        await asyncio.to_thread(ask_probe, self.served.control)
        answer = await work
        await asyncio.sleep(0.15)
        seen = await asyncio.to_thread(ask_probe, self.served.control)
        self.rows.setdefault(name, []).append(seen)
        return answer

    def worst(self) -> float:
        """The largest median lag, milliseconds."""
        return max(1e3 * middle([seen.lag for seen in rows]) for rows in self.rows.values())


async def tokenising(
    seen: Measured, session: aiohttp.ClientSession, apis: Sequence[Api], make: Callable[[], Said]
) -> None:
    """Each API with a prompt that nobody has seen, with the same again, and with messages more."""
    for api in apis:
        said = await asyncio.to_thread(make)
        name = "one text" if len(said) == 1 else f"{len(said)} messages"
        await seen.watch(f"{api.name}: {name}, cold", ask(session, api, said))
        await seen.watch(f"{api.name}: {name}, warm", ask(session, api, said))
        more = [*said, ("assistant", "Yes."), ("user", "And now?")]
        await seen.watch(f"{api.name}: {name}, a turn later", ask(session, api, more))


async def long_answers(seen: Measured, session: aiohttp.ClientSession, pieces: Sequence[Piece]) -> None:
    """An answer of 48k tokens that is learned, and the next turn behind it."""
    answer = "".join(text for _, text in pieces)
    said: Said = [("user", "Write a long one.")]
    await seen.watch("chat: answer of 48k tokens", ask(session, CHAT, said))
    more = [*said, ("assistant", answer), ("user", "Go on.")]
    await seen.watch("chat: the turn behind it", ask(session, CHAT, more))
    for api in (RESPONSES, MESSAGES):
        await seen.watch(f"{api.name}: answer of 48k tokens", ask(session, api, said))
    told = await seen.watch("runs: answer of 48k tokens", ask(session, RUNS, said))
    await _read_again(seen, session, told, "48k tokens")


async def long_runs(seen: Measured, session: aiohttp.ClientSession) -> None:
    """A run of 8,000 events, followed and read again."""
    told = await seen.watch("runs: 8,000 events", ask(session, RUNS, [("user", "Say many.")]))
    await _read_again(seen, session, told, "8,000 events")


async def _read_again(seen: Measured, session: aiohttp.ClientSession, told: str, name: str) -> None:
    first = next(line for line in told.splitlines() if line.startswith("data: "))
    run_id = json.loads(first.removeprefix("data: "))["run"]
    await seen.watch(f"runs: {name}, again", read(session, f"/v1/runs/{run_id}/events"))
    await seen.watch(f"runs: {name}, GET run", read(session, f"/v1/runs/{run_id}"))
    await seen.watch("sessions: tree", read(session, "/v1/sessions/bench/tree"))


async def idle(seen: Measured) -> None:
    """Nothing, for what other programs do to the figures."""

    async def rest() -> str:
        await asyncio.sleep(1.0)
        return ""

    await seen.watch("nothing", rest())


async def measure(options: argparse.Namespace) -> Measured:
    """All kinds of work, so often."""
    tokenizer, bundle = default_bundle()
    texts = Texts(tokenizer, options.seed)
    pieces = pieces_of(tokenizer, texts.take(ANSWER_TOKENS + 2000), ANSWER_TOKENS)

    def script(submit: Submit) -> Script:
        text = tokenizer.decode(_ids(submit.token_ids[-240:]))
        if "Write a long one." in text:
            return Script(pieces, 0.004, num_together=64)
        if "Say many." in text:
            return Script(pieces[:NUM_EVENTS], 0.001)
        return Script(pieces[:SHORT], 0.001)

    with gateway(pins=False, probe=["--where"] if options.where else []) as (served, bus_url):
        timeout = aiohttp.ClientTimeout(total=None)
        seen = Measured(served)
        async with (
            ScriptedEngine(bus_url, bundle, script),
            aiohttp.ClientSession(served.url, timeout=timeout) as session,
        ):
            await ask(session, CHAT, [("user", "Hello.")])  # builds the tokenizer
            for number in range(options.repeats):
                await idle(seen)
                await tokenising(seen, session, (CHAT, COUNT), lambda: one_text(texts, options.tokens))
                await tokenising(seen, session, APIS, lambda: history(texts, options.tokens))
                await long_answers(seen, session, pieces)
                await long_runs(seen, session)
                print(f"round {number + 1} of {options.repeats} done", file=sys.stderr)
    return seen


def _ids(packed: bytes) -> list[int]:
    return memoryview(packed).cast("I").tolist()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints a table and one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128_000, help="of each long prompt")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of the texts")
    parser.add_argument("--where", action="store_true", help="sample where long callbacks are")
    options = parser.parse_args(arguments)
    seen = asyncio.run(measure(options))
    figures = {}
    rows = []
    for name, found in seen.rows.items():
        kinds = ("lag", "held", "held_cpu", "collected")
        lag, held, cpu, collected = (1e3 * middle([getattr(one, kind) for one in found]) for kind in kinds)
        figures[name] = {"lag_ms": round(lag, 1), "cpu_ms": round(cpu, 1)}
        worst = 1e3 * max(one.lag for one in found)
        cells = [f"{value:.1f}" for value in (lag, worst, held, cpu, collected)]
        rows.append([name, *cells, "!" if lag >= GOAL_MS else ""])
    table(["work", "lag ms", "largest", "held ms", "cpu ms", "gc ms", ""], rows)
    if options.where:
        for name, found in seen.rows.items():
            for place in {one.place for one in found if one.place}:
                print(f"{name}: {place}")
    report("loop_stall", {"worst_lag_ms": round(seen.worst(), 1), "work": figures})
    return 0 if seen.worst() < GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
