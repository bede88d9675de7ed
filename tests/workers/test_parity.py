"""Greedy tokens of the paged engine equal mlx-lm's own, cold, warm, alone and in company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvcache.settings import KVCacheSettings
from tests.models import LLAMA3_ROPE, YARN_ROPE, EngineUnderTest, Reference, make_model
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
    for prompt in prompts[:2]:
        assert tested.greedy([prompt], NUM_TOKENS) == [expected[tuple(prompt)]], "cold"
    for prompt in prompts[:2]:
        assert tested.greedy([prompt], NUM_TOKENS) == [expected[tuple(prompt)]], "identical repeat"
    together = prompts[2:]
    assert tested.greedy(together, NUM_TOKENS) == [expected[tuple(p)] for p in together], "in company"
    longer = [prompt + expected[tuple(prompt)] + prompt_of(30, seed=9) for prompt in prompts[1:4]]
    assert tested.greedy(longer, NUM_TOKENS) == [reference.greedy(p, NUM_TOKENS) for p in longer], "warm"
    assert tested.engine.stats().prompt_tokens_cached > 3 * 120


def test_quantised_weights_kept_native_give_mlx_lms_tokens(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", bits=4)
    reference = Reference(folder, fp32=False)
    tested = EngineUnderTest(settings_for(folder, weights="native"))
    assert tested.loaded.weights == "4-bit"
    prompts = [prompt_of(length, seed=length) for length in (63, 64, 65)]
    assert tested.greedy(prompts, NUM_TOKENS) == [reference.greedy(p, NUM_TOKENS) for p in prompts]


def test_quantised_weights_unpacked_to_fp32_give_mlx_lms_tokens(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", bits=8)
    reference = Reference(folder, fp32=True)
    tested = EngineUnderTest(settings_for(folder, weights="fp32"))
    assert tested.loaded.weights == "float32"
    prompts = [prompt_of(length, seed=length) for length in (63, 64, 65)]
    assert tested.greedy(prompts, NUM_TOKENS) == [reference.greedy(p, NUM_TOKENS) for p in prompts]


@pytest.mark.parametrize("residue", [0, 1, 63])
def test_eight_bit_tokens_are_bit_equal_on_the_same_chunk_grid(tmp_path: Path, residue: int) -> None:
    folder = make_model(tmp_path / "model", "llama")
    prompt = prompt_of(128 + residue)
    runs = [
        EngineUnderTest(settings_for(folder, bits="8"), max_rows=64).greedy([prompt], NUM_TOKENS)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_measured_kv_is_what_is_reported(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    kv = EngineUnderTest(settings_for(folder, bits="8")).loaded.kv
    # 2 layers x 2 (K, V) x 2 kv heads x (64 codes + fp16 scale and bias)
    assert (kv.dtype, kv.bytes_per_token) == ("int8", 2 * 2 * 2 * 68)
    native = EngineUnderTest(settings_for(folder)).loaded.kv
    assert (native.dtype, native.bytes_per_token) == ("float32", 2 * 2 * 2 * 256)
