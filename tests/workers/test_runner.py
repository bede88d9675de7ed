"""The real runner over a small model: what a step costs in memory, and what a fault touches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvcache.cache import PageCopy
from kvcache.settings import KVCacheSettings
from tests.models import EngineUnderTest, Reference, make_model
from tests.workers.test_parity import prompt_of
from workers.messages import Failed, Finished, Sampling
from workers.plan import RowSampling, Segment, StepPlan
from workers.settings import EngineSettings

NUM_TOKENS = 8
POOL_TOKENS = 65_536
NAN_TOKEN = 300


def engine_over(folder: Path, *, pool_tokens: int = POOL_TOKENS) -> EngineUnderTest:
    kvcache = KVCacheSettings(bits="native", pool_tokens=pool_tokens)
    return EngineUnderTest(EngineSettings(model=str(folder), weights="fp32", context=2048, kvcache=kvcache))


def decoding(worker: int, page: int) -> Segment:
    row = RowSampling(Sampling(temperature=0), 0, 0, array("I", [1]), array("I"))
    return Segment(worker, 70, [worker], [page, page + 1], row)


def mixed_step() -> StepPlan:
    """A partial page's copy, three streams that decode, and a prefill chunk behind the copied page."""
    prefill = Segment(3, 10, list(range(100)), [101, 102], None)
    return StepPlan(
        (PageCopy(100, 101, 10),), (*(decoding(worker, 8 * worker) for worker in range(3)), prefill)
    )


def test_a_mixed_step_with_a_page_copy_copies_no_pool(tmp_path: Path) -> None:
    runner = engine_over(make_model(tmp_path / "model", "llama")).loaded.runner
    layer_bytes = runner.pools.nbytes // 2
    for _ in range(2):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        results = runner.run(mixed_step())
        assert [result.fault for result in results.segments] == [None] * 4
        assert mx.get_peak_memory() - before < layer_bytes / 2


def in_trace(hidden: mx.array) -> mx.array:
    raise KeyError("a name that the model lacks")


def in_eval(hidden: mx.array) -> mx.array:
    return hidden + mx.arange(2**46, dtype=mx.float32).sum()  # more than any machine can give


@pytest.mark.parametrize("break_body", [in_trace, in_eval])
def test_a_step_that_raises_leaves_one_pool_and_a_working_engine(
    tmp_path: Path, break_body: Callable[[mx.array], mx.array]
) -> None:
    folder = make_model(tmp_path / "model", "llama")
    tested = engine_over(folder)
    runner, pool_bytes = tested.loaded.runner, tested.loaded.kv.pool_bytes
    prompt = prompt_of(100)
    expected = Reference(folder, fp32=True).greedy(prompt, NUM_TOKENS)
    assert tested.greedy([prompt], NUM_TOKENS) == [expected]
    body = runner._body
    runner._body = lambda ids, cache: break_body(body(ids, cache=cache))
    mx.reset_peak_memory()
    ((tokens, end),) = tested.run([prompt], NUM_TOKENS)
    assert (tokens, type(end), end.error) == ([], Failed, "step_failed")
    assert mx.get_peak_memory() < 1.5 * pool_bytes
    runner._body = body
    ((tokens, end),) = tested.run([prompt], NUM_TOKENS)
    assert (tokens, type(end), end.usage.cached_tokens) == (expected, Finished, 0)
    assert mx.get_peak_memory() < 1.5 * pool_bytes


def model_with_a_nan_row(folder: Path) -> Path:
    """The head is a matrix of its own: only prompts that hold the token are hit."""
    make_model(folder, "llama", tie_word_embeddings=False)
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    mx.eval(weights)
    weights["model.embed_tokens.weight"][NAN_TOKEN] = mx.nan
    mx.save_safetensors(str(file), weights)
    return folder


def tokens_of(tested: EngineUnderTest, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [tokens for tokens, _ in tested.run(prompts, NUM_TOKENS)]


def test_a_nan_row_fails_that_turn_alone_and_its_pages_serve_the_next_owner(tmp_path: Path) -> None:
    folder = model_with_a_nan_row(tmp_path / "model")
    reference = Reference(folder, fp32=True)
    tested = engine_over(folder, pool_tokens=2048)
    shared = prompt_of(70)
    poisoned = [*shared, *prompt_of(60, seed=1)]
    poisoned[100] = NAN_TOKEN
    others = [[*shared, *prompt_of(60 + seed, seed=seed)] for seed in (2, 3, 4)]
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in others]
    (_, failed), *finished = tested.run([poisoned, *others], NUM_TOKENS)
    assert isinstance(failed, Failed) and failed.error == "row_fault"
    assert [tokens for tokens, _ in finished] == expected
    next_ones = [prompt_of(400, seed=seed) for seed in range(10, 14)]  # take every page of the pool
    wanted = [reference.greedy(prompt, NUM_TOKENS) for prompt in next_ones]
    assert tokens_of(tested, next_ones) == wanted
    assert tokens_of(tested, others) == expected


def test_a_sampling_fault_fails_that_turn_alone_and_keeps_the_shared_prefix(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    tested = engine_over(folder, pool_tokens=2048)
    shared = prompt_of(130)
    tested.greedy([shared], 1)
    not_a_float = Sampling(temperature=0, logit_bias={1: 10**400})
    ((_, failed),) = tested.run([[*shared, 1]], NUM_TOKENS, not_a_float)
    assert isinstance(failed, Failed) and failed.error == "row_fault"
    ((tokens, end),) = tested.run([[*shared, 1]], NUM_TOKENS)
    assert end.usage.cached_tokens >= 129
    assert tokens == Reference(folder, fp32=True).greedy([*shared, 1], NUM_TOKENS)
