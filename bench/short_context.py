"""Two ratios of any OpenAI-compatible address: four streams over one at short contexts, and the first call
over the second with a long shared prefix.

    python -m bench.short_context --base-url http://127.0.0.1:8114/v1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence

import aiohttp

from .endpoint import Timed, call, first_model

NUM_STREAMS = 4
TOPICS = ("a fox", "a lighthouse", "the sea", "an old clock", "a train", "a garden", "winter", "a map")
TEXT = """the cold page was read by an old man who lives near a small river and every day he will walk from
his house to the long road where the green trees stand and the birds sing about the light of the sun"""


async def decode_rates(session: aiohttp.ClientSession, model: str, num_tokens: int, run: int) -> list[float]:
    """Tokens per second of one stream alone, then of four together (their sum)."""

    def body(stream: int) -> dict[str, object]:
        topic = TOPICS[(run + stream) % len(TOPICS)]
        text = f"Story {run}.{stream}: write a long story about {topic}."
        return {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": num_tokens,
            "ignore_eos": True,
        }

    alone = await call(session, body(NUM_STREAMS))
    together = await asyncio.gather(*(call(session, body(stream)) for stream in range(NUM_STREAMS)))
    for timed in (alone, *together):
        if timed.prompt_tokens + timed.completion_tokens >= 200:
            raise RuntimeError("the context reached 200 tokens: lower --tokens")
    return [alone.decode_rate, sum(timed.decode_rate for timed in together)]


async def prefix_calls(
    session: aiohttp.ClientSession, model: str, num_words: int, source: random.Random
) -> tuple[Timed, Timed]:
    """Two calls under one system text that the server has never seen."""
    words = TEXT.split()
    system = " ".join(source.choice(words) for _ in range(num_words))

    async def ask(question: str) -> Timed:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 8, "ignore_eos": True}
        return await call(session, body)

    return await ask("What did the man see?"), await ask("Where does the road go?")


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Interleaved runs, so that a busy neighbour on the machine meets both sides; medians of ratios."""
    source = random.Random(options.seed)
    rates: list[list[float]] = []
    pairs: list[tuple[Timed, Timed]] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(f"{options.base_url.rstrip('/')}/", timeout=timeout) as session:
        model = options.model or await first_model(session)
        await decode_rates(session, model, 8, run=99)  # warm-up
        for run in range(options.runs):
            rates.append(await decode_rates(session, model, options.tokens, run))
            pairs.append(await prefix_calls(session, model, options.prefix_words, source))
            print(f"run {run + 1} of {options.runs} done", file=sys.stderr)
    return {
        "model": model,
        "runs": options.runs,
        "one_stream_tokens_per_second": _median([alone for alone, _ in rates]),
        "four_streams_tokens_per_second": _median([together for _, together in rates]),
        "four_over_one": _median([together / alone for alone, together in rates]),
        "prefix_prompt_tokens": _median([first.prompt_tokens for first, _ in pairs]),
        "second_call_cached_tokens": _median([second.cached_tokens for _, second in pairs]),
        "first_call_first_token_seconds": _median([first.first_token_seconds for first, _ in pairs]),
        "second_call_first_token_seconds": _median([second.first_token_seconds for _, second in pairs]),
        "first_over_second": _median([a.first_token_seconds / b.first_token_seconds for a, b in pairs]),
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base-url", required=True, help="the address with /v1")
    parser.add_argument("--model", help="default: the first that the address offers")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="generated per stream and run")
    parser.add_argument("--prefix-words", type=int, default=1450, help="of the shared system text")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the shared texts")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
