"""Greedy tokens of the paged engine equal mlx-lm's own, cold, warm, alone and in company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvcache.settings import KVCacheSettings
from tests.models import LLAMA3_ROPE, YARN_ROPE, EngineUnderTest, Reference, make_model
from workers.messages import Sampling
from workers.settings import EngineSettings

NUM_TOKENS = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"head_dim": 128, "tie_word_embeddings": False},
    "llama3 rope": {"rope_scaling": LLAMA3_ROPE},
    "yarn": {"rope_scaling": YARN_ROPE},
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


def settings_for(folder: Path, *, weights: str = "fp32", bits: str = "native") -> EngineSettings:
    return EngineSettings(
        model=str(folder),
        weights=weights,  # type: ignore[arg-type]
        kvcache=KVCacheSettings(bits=bits, pool_tokens=4096),  # type: ignore[arg-type]
    )


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    changes = FAMILIES[request.param]
    model_type = request.param if request.param in {"mistral", "qwen2", "qwen3"} else "llama"
    return make_model(tmp_path / "model", model_type, **changes)


@pytest.mark.parametrize("weights", ["fp32", "native"])
def test_greedy_tokens_equal_mlx_lms_cold_warm_alone_and_in_company(family: Path, weights: str) -> None:
    reference = Reference(family, fp32=weights == "fp32")
    tested = EngineUnderTest(settings_for(family, weights=weights), max_rows=48)
    prompts = [prompt_of(length, seed=length) for length in (64, 65, 127, 128, 129, 191)]
    expected = {tuple(p): reference.greedy(p, NUM_TOKENS) for p in prompts}
    for prompt in prompts[:3]:
        assert tested.greedy([prompt], NUM_TOKENS) == [expected[tuple(prompt)]], "cold"
    for prompt in prompts[:3]:
        ((tokens, end),) = tested.run([prompt], NUM_TOKENS)
        assert tokens == expected[tuple(prompt)], "identical repeat"
        assert end.usage.cached_tokens == len(prompt) - 1
    together = prompts[3:]
    assert tested.greedy(together, NUM_TOKENS) == [expected[tuple(p)] for p in together], "in company"
    longer = [prompt + expected[tuple(prompt)] + prompt_of(30, seed=9) for prompt in prompts]
    wanted = [reference.greedy(p, NUM_TOKENS) for p in longer]
    assert tested.greedy(longer[:3], NUM_TOKENS) == wanted[:3], "warm in company"
    for prompt, tokens in zip(longer[3:], wanted[3:], strict=True):
        assert tested.greedy([prompt], NUM_TOKENS) == [tokens], "warm alone"
    assert tested.engine.stats().prompt_tokens_cached > 6 * 64


@pytest.mark.parametrize(
    ("model_type", "bits", "weights", "held"),
    [("llama", 4, "native", "4-bit"), ("qwen3", 8, "fp32", "float32")],
)
def test_quantised_weights_give_mlx_lms_tokens_cold_repeated_and_with_a_prefix_hit(
    tmp_path: Path, model_type: str, bits: int, weights: str, held: str
) -> None:
    folder = make_model(tmp_path / "model", model_type, bits=bits)
    reference = Reference(folder, fp32=weights == "fp32")
    tested = EngineUnderTest(settings_for(folder, weights=weights))
    assert tested.loaded.weights == held
    prompts = [prompt_of(length, seed=length) for length in (63, 64, 65)]
    expected = [reference.greedy(p, NUM_TOKENS) for p in prompts]
    assert tested.greedy(prompts, NUM_TOKENS) == expected, "cold, in company"
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert tested.greedy([prompt], NUM_TOKENS) == [tokens], "identical repeat"
    longer = [p + tokens + prompt_of(20, seed=9) for p, tokens in zip(prompts, expected, strict=True)]
    for prompt in longer:
        ((tokens, end),) = tested.run([prompt], NUM_TOKENS)
        assert tokens == reference.greedy(prompt, NUM_TOKENS), "prefix hit"
        assert end.usage.cached_tokens > 63


@pytest.mark.parametrize("residue", [0, 1, 63])
def test_eight_bit_rows_and_logprobs_are_bit_equal_on_the_same_chunk_grid(
    tmp_path: Path, residue: int
) -> None:
    folder = make_model(tmp_path / "model", "llama")
    prompt = prompt_of(128 + residue)
    sampling = Sampling(temperature=0, top_logprobs=5)
    first, second = (EngineUnderTest(settings_for(folder, bits="8"), max_rows=64) for _ in range(2))
    for tested in (first, second):
        tested.run([prompt], NUM_TOKENS, sampling)
    assert first.logprobs == second.logprobs and len(first.logprobs) == 6 * NUM_TOKENS
    pools = zip(first.loaded.runner.pools.arrays(), second.loaded.runner.pools.arrays(), strict=True)
    for pool, again in pools:
        assert mx.array_equal(pool, again)
        assert mx.any(pool != 0)


@pytest.mark.parametrize("residue", [1, 63])
def test_eight_bit_logprobs_behind_a_kept_prefix_are_bit_equal_to_cold_ones(
    tmp_path: Path, residue: int
) -> None:
    """Whole pages are kept and chunks end on page borders, so cold and warm have the same grid."""
    folder = make_model(tmp_path / "model", "llama")
    prompt = prompt_of(128 + residue)
    sampling = Sampling(temperature=0, top_logprobs=5)
    cold, warm = (EngineUnderTest(settings_for(folder, bits="8"), max_rows=64) for _ in range(2))
    cold.run([prompt], NUM_TOKENS, sampling)
    warm.run([prompt[:128]], 1)
    ((_, end),) = warm.run([prompt], NUM_TOKENS, sampling)
    assert end.usage.cached_tokens == 128
    assert cold.logprobs == warm.logprobs


def test_measured_kv_is_what_is_reported(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    kv = EngineUnderTest(settings_for(folder, bits="8")).loaded.kv
    # 2 layers x 2 (K, V) x 2 kv heads x (64 codes + fp16 scale and bias)
    assert (kv.dtype, kv.bytes_per_token) == ("int8", 2 * 2 * 2 * 68)
    native = EngineUnderTest(settings_for(folder)).loaded.kv
    assert (native.dtype, native.bytes_per_token) == ("float32", 2 * 2 * 2 * 256)
