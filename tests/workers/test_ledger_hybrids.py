"""The ledger of hybrid models: exact and small states, and what they leave for pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import pytest

from kvcache.settings import KVCacheSettings
from kvcache.states import StateLayout
from tests.tiny_models import mixed_config
from workers.architectures import text_config
from workers.errors import DoesNotFit
from workers.ledger import plan_memory, request_of
from workers.memory_request import (
    MemoryRequest,
    kv_bytes_per_token,
    small_state_bytes,
    state_bytes,
)
from workers.parameters import estimated_bytes
from workers.scratch import scratch_bytes
from workers.settings import EngineSettings
from workers.shapes import ModelShape, shape_of

GIBIBYTE = 2**30
MEBIBYTE = 2**20
MAC = 96 * GIBIBYTE
MILLION_TOKENS = MemoryRequest(pool_tokens=2**20, states=32)
DENSE = shape_of(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    },
    10**6,
)
QWEN3_NEXT_80B = text_config(
    mixed_config(
        "qwen3_next",
        {
            **{"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "head_dim": 256},
            **{"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 262144},
            **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
            **{"linear_value_head_dim": 128, "shared_expert_intermediate_size": 512, "dtype": "bfloat16"},
        },
    )
)
QWEN3_5_35B = text_config(
    mixed_config(
        "qwen3_5_moe",
        {
            **{"hidden_size": 2048, "num_hidden_layers": 40, "vocab_size": 248320, "head_dim": 256},
            **{"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 262144},
            **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
            **{"linear_value_head_dim": 128, "shared_expert_intermediate_size": 512, "dtype": "bfloat16"},
        },
    )
)


def hybrid_shape(config: dict[str, Any], bits: int = 4) -> ModelShape:
    quantised = config | {"quantization": {"group_size": 64, "bits": bits}}
    return shape_of(quantised, estimated_bytes(quantised))


@pytest.mark.parametrize(
    (
        "config",
        "token_bytes",
        "native_token_bytes",
        "state_mebibytes",
        "weights_gibibytes",
        "total_gibibytes",
    ),
    [
        (QWEN3_NEXT_80B, 13_056, 24_576, 73.7, 41.7, 60),
        (QWEN3_5_35B, 10_880, 20_480, 61.4, 18.3, 34),
    ],
)
def test_the_large_hybrids_have_the_figures_of_the_design(
    config: dict[str, Any],
    token_bytes: int,
    native_token_bytes: int,
    state_mebibytes: float,
    weights_gibibytes: float,
    total_gibibytes: float,
) -> None:
    shape = hybrid_shape(config)
    ledger = plan_memory(shape, MILLION_TOKENS, MAC)
    assert kv_bytes_per_token(shape, MILLION_TOKENS) == ledger.kv_bytes_per_token == token_bytes
    assert kv_bytes_per_token(shape, MemoryRequest(kv_bits="native")) == native_token_bytes
    assert ledger.state_bytes / MEBIBYTE == pytest.approx(state_mebibytes, abs=0.05)
    assert shape.native_bytes / GIBIBYTE == pytest.approx(weights_gibibytes, rel=0.01)
    assert ledger.total_bytes / GIBIBYTE == pytest.approx(total_gibibytes, rel=0.05)
    assert (ledger.num_states, ledger.pool_tokens) == (32, 2**20)


def test_the_largest_hybrid_has_its_known_parameters() -> None:
    assert hybrid_shape(QWEN3_NEXT_80B).num_parameters == pytest.approx(79.67e9, rel=1e-4)


def test_live_states_and_checkpoints_are_one_item_and_wired() -> None:
    ledger = plan_memory(hybrid_shape(QWEN3_NEXT_80B), MILLION_TOKENS, MAC)
    (item,) = (item for item in ledger.items if item.name == "states")
    small = small_state_bytes(hybrid_shape(QWEN3_NEXT_80B), MILLION_TOKENS)
    assert item.num_bytes == (4 + 32) * ledger.state_bytes + 32 * small
    assert item.note == "4 live, 32 kept, 73.7 MiB each; 32 in 8 bits, 20.3 MiB each"
    weights, pages = ledger.items[:2]
    assert ledger.wired_bytes == weights.num_bytes + pages.num_bytes + item.num_bytes


@pytest.mark.parametrize(("weights", "dtype"), [("native", mx.bfloat16), ("fp32", mx.float32)])
def test_a_states_bytes_are_those_of_its_arrays(weights: Any, dtype: mx.Dtype) -> None:
    shape = hybrid_shape(text_config(mixed_config("qwen3_next", {})))
    assert shape.delta is not None
    layout = StateLayout(
        num_layers=shape.delta.num_layers,
        num_heads=shape.delta.num_value_heads,
        value_dim=shape.delta.value_head_dim,
        key_dim=shape.delta.key_head_dim,
        window_rows=shape.delta.kernel_tokens - 1,
        channels=shape.delta.channels,
        hidden_size=shape.hidden_size,
        dtype=dtype,
    )
    request = MemoryRequest(weights=weights)
    assert state_bytes(shape, request) == sum(array.nbytes for array in layout.zeros(1))
    small = [*layout.zeros(1, mx.int8), *layout.zero_scales(1)]
    assert small_state_bytes(shape, request) == sum(array.nbytes for array in small)


@pytest.mark.parametrize(
    ("config", "live", "exact", "small"),
    [(QWEN3_NEXT_80B, 0.29, 2.30, 0.63), (QWEN3_5_35B, 0.24, 1.92, 0.53)],
)
def test_live_exact_and_small_states_have_the_sizes_of_the_design(
    config: dict[str, Any], live: float, exact: float, small: float
) -> None:
    shape = hybrid_shape(config)
    ledger = plan_memory(shape, MILLION_TOKENS, MAC)
    assert (ledger.num_states, ledger.num_small_states) == (32, 32)
    assert 4 * ledger.state_bytes / GIBIBYTE == pytest.approx(live, abs=0.005)
    assert 32 * ledger.state_bytes / GIBIBYTE == pytest.approx(exact, abs=0.005)
    assert 32 * small_state_bytes(shape, MILLION_TOKENS) / GIBIBYTE == pytest.approx(small, abs=0.005)


@pytest.mark.parametrize(
    ("settings", "num_small"),
    [
        ({}, 32),
        ({"states": 5}, 5),
        ({"small_states": 100}, 100),
        ({"small_states": 0}, 0),
        ({"kv_bits": "native"}, 0),
        ({"kv_bits": "native", "small_states": 7}, 7),
    ],
)
def test_as_many_small_states_as_exact_ones_with_eight_bit_rows_unless_told(
    settings: dict[str, Any], num_small: int
) -> None:
    request = MemoryRequest(context=65_536, **settings)
    assert plan_memory(hybrid_shape(QWEN3_5_35B), request, MAC).num_small_states == num_small


def test_small_states_that_nobody_asked_for_only_take_what_is_left() -> None:
    """So many exact ones as just fit without small ones still fit."""
    shape = hybrid_shape(QWEN3_NEXT_80B)

    def planned(**settings: Any) -> tuple[int | None, int]:
        ledger = plan_memory(shape, MemoryRequest(pool_tokens=524_288, **settings), 64 * GIBIBYTE)
        return ledger.num_states, ledger.num_small_states

    most = max(number for number in range(32, 400) if fits(shape, number))
    assert planned(states=most, small_states=0) == (most, 0)
    assert planned(states=most)[0] == most
    assert planned(states=most)[1] <= 3
    with pytest.raises(DoesNotFit):
        planned(states=most, small_states=40)


def fits(shape: ModelShape, num_states: int) -> bool:
    try:
        plan_memory(
            shape,
            MemoryRequest(pool_tokens=524_288, states=num_states, small_states=0),
            64 * GIBIBYTE,
        )
    except DoesNotFit:
        return False
    return True


def test_fewer_small_states_than_usual_are_told() -> None:
    shape = hybrid_shape(QWEN3_NEXT_80B)
    ledger = plan_memory(shape, MemoryRequest(context=4096), 50 * GIBIBYTE)
    assert ledger.num_small_states < 4
    assert f"{ledger.num_small_states} states are kept in 8 bits, not the usual 4" in ledger.notes


def test_a_dense_model_has_no_states() -> None:
    ledger = plan_memory(DENSE, MemoryRequest(states=40, small_states=40), 8 * GIBIBYTE)
    assert (ledger.num_states, ledger.num_small_states, ledger.state_bytes) == (None, 0, 0)
    assert "states" not in [item.name for item in ledger.items]


def test_fp32_weights_make_the_convolution_window_larger_not_the_matrices() -> None:
    shape = hybrid_shape(QWEN3_NEXT_80B)
    native, fp32 = (state_bytes(shape, MemoryRequest(weights=kind)) for kind in ("native", "fp32"))
    assert fp32 - native == (36 * 3 * 8192 + 2048) * 2  # and the hidden row


def test_checkpoints_are_eight_for_each_worker_unless_told() -> None:
    shape = hybrid_shape(QWEN3_5_35B)
    assert plan_memory(shape, MemoryRequest(context=131_072), MAC).num_states == 32
    assert plan_memory(shape, MemoryRequest(context=131_072, workers=8), MAC).num_states == 64
    assert plan_memory(shape, MemoryRequest(context=131_072, states=5), MAC).num_states == 5


def test_where_memory_is_short_fewer_states_are_kept_and_that_is_told() -> None:
    shape = hybrid_shape(QWEN3_NEXT_80B)
    ledger = plan_memory(shape, MemoryRequest(), 54 * GIBIBYTE)
    assert ledger.num_states is not None
    assert 4 <= ledger.num_states < 32
    assert f"{ledger.num_states} states are kept, not the usual 32: fewer prefixes are found" in ledger.notes
    assert ledger.total_bytes <= 54 * GIBIBYTE * 0.9
    least = plan_memory(shape, MemoryRequest(context=4096), 50 * GIBIBYTE)
    assert least.num_states == 4  # one a worker, or nothing could ever be resumed


def test_without_a_prefix_cache_no_checkpoints_are_kept() -> None:
    settings = EngineSettings(kvcache=KVCacheSettings(prefix_cache=False, states=9, small_states=9))
    request = request_of(settings, hybrid_shape(QWEN3_5_35B), MAC, is_cpu=False)
    ledger = plan_memory(hybrid_shape(QWEN3_5_35B), request, MAC)
    assert (ledger.num_states, ledger.num_small_states) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "limit", "remedy"),
    [
        (MemoryRequest(context=131_072, states=600), 64, "--states 32"),
        (MemoryRequest(pool_tokens=4_000_000), 64, "--pool-tokens "),
        (MemoryRequest(pool_tokens=900_000, states=64), 64, "--states "),
        (MemoryRequest(pool_tokens=4_000_000, states=600), 64, "--states 32 --pool-tokens "),
        (MemoryRequest(context=131_072, small_states=2000), 64, "--small-states 32"),
        (MemoryRequest(context=131_072, states=600, small_states=2000), 64, "--states 32 --small-states 32"),
        (
            MemoryRequest(pool_tokens=4_000_000, states=600, small_states=9),
            64,
            "--states 32 --small-states 32 --pool",
        ),
        (MemoryRequest(context=262_144), 50, "--context "),
        (MemoryRequest(), 44, "a smaller model, or more memory (--memory 50GB)"),
    ],
)
def test_what_a_hybrid_needs_too_much_of_is_refused_with_settings_that_fit(
    request_: MemoryRequest, limit: int, remedy: str
) -> None:
    shape = hybrid_shape(QWEN3_NEXT_80B)
    with pytest.raises(DoesNotFit) as caught:
        plan_memory(shape, request_, limit * GIBIBYTE)
    words = str(caught.value)
    assert "states " in words
    assert " live, " in words
    remedies = words.partition("would fit: ")[2].split("; or ")
    assert any(one.startswith(remedy) for one in remedies)
    for flags in (one.split() for one in remedies if one.startswith("--")):
        changes: dict[str, Any] = {
            flag.removeprefix("--").replace("-", "_"): int(value)
            for flag, value in zip(flags[::2], flags[1::2], strict=True)
        }
        plan_memory(shape, dataclasses.replace(request_, **changes), limit * GIBIBYTE)


def test_the_memory_that_a_model_needs_at_least_is_enough_for_it() -> None:
    shape = hybrid_shape(QWEN3_NEXT_80B)
    plan_memory(shape, MemoryRequest(), 50 * GIBIBYTE)
    with pytest.raises(DoesNotFit, match="--memory 50GB"):
        plan_memory(shape, MemoryRequest(), 49 * GIBIBYTE)


def test_eight_bit_weights_of_the_largest_leave_no_room_on_that_machine() -> None:
    eight = hybrid_shape(QWEN3_NEXT_80B, bits=8)
    assert eight.native_bytes > 75 * GIBIBYTE
    with pytest.raises(DoesNotFit):
        plan_memory(eight, MILLION_TOKENS, MAC)


def test_an_expert_blocks_rows_count_in_the_scratch() -> None:
    one, ten = (
        shape_of(
            text_config(mixed_config("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": chosen})), 1
        )
        for chosen in (1, 10)
    )
    sizes = [scratch_bytes(shape, 2048, 2) for shape in (one, ten)]
    assert sizes[1] - sizes[0] > 2048 * 9 * 3 * 64 * 2
