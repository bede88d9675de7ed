"""Eight children of a parent of 20k tokens, over HTTP: no second prefill, by the engine's own counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from gateway.client import Client, RunHandle, TokenText

from .books import counters
from .hybrid_folder import NO_MARKERS, make_chatting, words
from .served import Served

pytestmark = [pytest.mark.end_to_end, pytest.mark.gate, pytest.mark.timeout(240)]

CONTEXT, PROMPT_TOKENS = 24_576, 20_000
NUM_CHILDREN, CHILD_TOKENS, CHILD_ROWS = 8, 4, 64
"""A child's own: what it says, and at most so many tokens that it begins with behind its parent's."""

FLAGS = ("--kv-bits", "native", "--pool-tokens", str(2 * CONTEXT + 16_384))
FEW_HEADS = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
FAMILIES: dict[str, tuple[str, dict[str, int], tuple[str, ...]]] = {
    "dense": ("llama", FEW_HEADS, ()),
    "hybrid": (
        "qwen3_next",
        FEW_HEADS | {"num_hidden_layers": 2, "full_attention_interval": 2},
        ("--states", "24"),
    ),
}


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, changes, flags = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("models") / family
    make_chatting(folder, family, max_position_embeddings=CONTEXT, **changes)
    serving = Served(tmp_path_factory.mktemp("forks") / "home", folder, *FLAGS, *flags)
    try:
        serving.wait_ready()
        yield serving
    finally:
        serving.close()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    async with Client(served.url) as client:
        yield client


def asked(seed: int, num_chars: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"input": words(seed, num_chars), "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
    return body | {"logit_bias": NO_MARKERS, "derail": "report"} | fields


async def speaks(run: RunHandle) -> None:
    """Returns when it has said something."""
    async with asyncio.timeout(90), run.stream() as events:
        async for event in events:
            if isinstance(event, TokenText):
                return


async def fork_all(parent: RunHandle, seed: int) -> list[RunHandle]:
    """Eight children at once, each to its end; what each is told of its beginning."""
    children = await asyncio.gather(
        *(parent.fork(**asked(seed + n, 20, CHILD_TOKENS)) for n in range(NUM_CHILDREN))
    )
    for child in children:
        run = await child.result(60)
        assert run.status == "completed", run
        assert run.usage.completion_tokens == CHILD_TOKENS
        assert child.created is not None
        assert (child.created.parent_tokens or 0) > PROMPT_TOKENS
        assert (child.created.recomputed_tokens or 0) == 0
        assert run.usage.prompt_tokens - run.usage.cached_tokens <= CHILD_ROWS, run.usage
    return children


async def test_eight_forks_of_20k_tokens_prefill_them_once_however_their_parent_is(
    served: Served, client: Client
) -> None:
    async with aiohttp.ClientSession() as http:
        before = await counters(http, served.url)
        parent = await client.spawn(**asked(1, PROMPT_TOKENS, 3000))
        await speaks(parent)
        await fork_all(parent, 100)
        assert (await parent.read()).status == "decoding"

        assert (await parent.pause()).status == "paused"
        children = await fork_all(parent, 200)
        assert (await parent.read()).status == "paused"

        await fork_all(children[0], 300)  # that one has ended

        assert (await parent.resume()).recomputed_tokens == 0
        await parent.cancel()
        assert (await parent.result(60)).status == "cancelled"
        told = await parent.read()
        done = await counters(http, served.url) - before
    assert told.usage.prompt_tokens >= PROMPT_TOKENS
    most = told.usage.prompt_tokens + 3 * NUM_CHILDREN * CHILD_ROWS + 64
    assert told.usage.prompt_tokens <= done.computed <= most, done
    assert done.generated == told.usage.completion_tokens + 3 * NUM_CHILDREN * CHILD_TOKENS
