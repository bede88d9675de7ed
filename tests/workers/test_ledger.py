from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import pytest

from kvcache.rows import row_format
from kvcache.settings import KVCacheSettings
from kvcache.states import StateLayout
from tests.tiny_models import mixed_config
from workers.architectures import text_config
from workers.errors import DoesNotFit, UnsupportedModel
from workers.ledger import (
    BUS_BYTES,
    MemoryRequest,
    choose_weights,
    kv_bytes_per_token,
    plan_memory,
    request_of,
    state_bytes,
)
from workers.parameters import estimated_bytes
from workers.scratch import scratch_bytes
from workers.settings import EngineSettings
from workers.shapes import ModelShape, shape_of

GIBIBYTE = 2**30
TIGHT = 1440 * 2**20  # the whole context fits with native weights and 8-bit pages, in a smaller pool
TIGHTER = 1310 * 2**20  # not the whole context
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
SHAPE = shape_of(SMOLLM2, native_bytes=98_000_000)


def test_the_default_model_has_its_known_figures() -> None:
    assert SHAPE.num_parameters == 134_515_008
    assert kv_bytes_per_token(SHAPE, MemoryRequest()) == 12_240
    assert kv_bytes_per_token(SHAPE, MemoryRequest(kv_bits="native", weights="fp32")) == 46_080


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", ["8", "native"])
def test_a_tokens_bytes_are_those_of_the_rows(head_dim: int, bits: Any) -> None:
    shape = dataclasses.replace(SHAPE, head_dim=head_dim)
    row = row_format(bits, head_dim, mx.float16)
    expected = 2 * shape.num_layers * shape.num_kv_heads * row.width * row.dtype.size
    assert kv_bytes_per_token(shape, MemoryRequest(kv_bits=bits)) == expected


def test_a_head_that_eight_bits_cannot_store_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="--kv-bits native"):
        plan_memory(dataclasses.replace(SHAPE, head_dim=80), MemoryRequest(), 8 * GIBIBYTE)


def test_with_room_the_pool_is_twice_workers_times_context() -> None:
    ledger = plan_memory(SHAPE, MemoryRequest(weights="fp32"), 8 * GIBIBYTE)
    assert (ledger.context, ledger.pool_tokens, ledger.num_pages) == (8192, 65_536, 1024)
    assert ledger.notes == ()
    assert ledger.wired_bytes == 4 * 134_515_008 + 65_536 * 12_240
    assert ledger.total_bytes == sum(item.num_bytes for item in ledger.items) < 8 * GIBIBYTE


def test_with_little_room_the_pool_shrinks_then_the_context_and_both_are_told() -> None:
    small = plan_memory(SHAPE, MemoryRequest(), TIGHT)
    assert small.context == 8192
    assert small.context <= small.pool_tokens < 65_536
    assert small.notes == (
        f"the pool is {small.pool_tokens:,} tokens, not the usual 65,536: fewer prefixes are kept",
    )
    smaller = plan_memory(SHAPE, MemoryRequest(), TIGHTER)
    assert smaller.context == smaller.pool_tokens < 8192
    assert smaller.notes[0].startswith(f"context is {smaller.context:,} of the model's 8,192")


def test_an_explicit_pool_bounds_the_context() -> None:
    ledger = plan_memory(SHAPE, MemoryRequest(pool_tokens=1000), 8 * GIBIBYTE)
    assert (ledger.pool_tokens, ledger.context) == (1024, 1024)


def test_a_context_beyond_the_models_is_cut_and_told() -> None:
    ledger = plan_memory(SHAPE, MemoryRequest(context=100_000), 8 * GIBIBYTE)
    assert ledger.context == 8192
    assert ledger.notes == ("context is 8,192, the model's, not the 100,000 asked for",)


def test_a_short_model_context_is_allowed() -> None:
    shape = dataclasses.replace(SHAPE, context_length=64)
    assert plan_memory(shape, MemoryRequest(workers=1), 8 * GIBIBYTE).context == 64


@pytest.mark.parametrize(
    ("request_", "limit", "remedy"),
    [
        (MemoryRequest(weights="fp32", context=8192), TIGHT, "--weights native"),
        (MemoryRequest(kv_bits="native", context=8192), TIGHT, "--kv-bits 8"),
        (MemoryRequest(context=8192), TIGHTER, "--context "),
        (MemoryRequest(pool_tokens=10_000_000), 8 * GIBIBYTE, "--pool-tokens "),
        (
            MemoryRequest(context=4096, pool_tokens=1024),
            8 * GIBIBYTE,
            "--context 1024; or --pool-tokens 4096",
        ),
        (MemoryRequest(), GIBIBYTE // 4, "a smaller model, or more memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic_and_what_fits(
    request_: MemoryRequest, limit: int, remedy: str
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan_memory(SHAPE, request_, limit)
    assert "\n" not in str(caught.value)
    assert f"would fit: {remedy}" in str(caught.value)


@pytest.mark.parametrize("kind", ["context", "pool_tokens"])
def test_the_named_remedy_does_fit(kind: str) -> None:
    request = MemoryRequest(context=8192) if kind == "context" else MemoryRequest(pool_tokens=9_000_000)
    limit = TIGHTER
    with pytest.raises(DoesNotFit) as caught:
        plan_memory(SHAPE, request, limit)
    tokens = int(str(caught.value).rsplit(" ", 1)[-1])
    replaced: dict[str, Any] = {kind: tokens}
    assert plan_memory(SHAPE, dataclasses.replace(request, **replaced), limit).pool_tokens >= tokens


def test_fp32_is_chosen_only_where_the_whole_context_still_fits() -> None:
    assert choose_weights(SHAPE, MemoryRequest(), 8 * GIBIBYTE) == "fp32"
    assert choose_weights(SHAPE, MemoryRequest(), TIGHT) == "native"
    assert choose_weights(SHAPE, MemoryRequest(pool_tokens=2048), 8 * GIBIBYTE) == "fp32"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (EngineSettings(), BUS_BYTES),
        (EngineSettings(redis_url="unix:///home/bus.sock"), BUS_BYTES),
        (EngineSettings(redis_url="rediss://:word@host:6379"), 0),
        (EngineSettings(redis_url="unix:///run/theirs.sock", bus_bytes=0), 0),
        (EngineSettings(bus_bytes=48 * 2**20), 48 * 2**20),
    ],
)
def test_the_bus_that_runs_here_is_counted(settings: EngineSettings, expected: int) -> None:
    request = request_of(settings, SHAPE, 8 * GIBIBYTE, is_cpu=True)
    ledger = plan_memory(SHAPE, request, 8 * GIBIBYTE)
    assert ledger.bus_bytes == expected
    assert [item.num_bytes for item in ledger.items if item.name == "bus"] == [expected]


def test_auto_weights_are_unpacked_on_a_cpu_where_they_fit() -> None:
    settings = EngineSettings()
    kinds = [
        request_of(settings, SHAPE, limit, is_cpu=is_cpu).weights
        for limit, is_cpu in ((8 * GIBIBYTE, True), (TIGHT, True), (8 * GIBIBYTE, False))
    ]
    assert kinds == ["fp32", "native", "native"]


def test_lines_show_each_item_and_the_sum() -> None:
    lines = plan_memory(SHAPE, MemoryRequest(bus_bytes=0), 8 * GIBIBYTE).lines()
    assert [line.split()[0] for line in lines] == [
        "weights",
        "pages",
        "scratch",
        "sampling",
        "bus",
        "processes",
        "total",
    ]
    assert "65,536 tokens of 12,240 B, kv-bits 8" in lines[1]
    assert lines[4].endswith("not on this machine")


MEBIBYTE = 2**20
MAC = 96 * GIBIBYTE
MILLION_TOKENS = MemoryRequest(pool_tokens=2**20, states=32)
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
    assert item.num_bytes == (4 + 32) * ledger.state_bytes
    assert item.note == "4 live, 32 kept, 73.7 MiB each"
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
    expected = sum(array.nbytes for array in layout.zeros(1))
    assert state_bytes(shape, MemoryRequest(weights=weights)) == expected


def test_a_dense_model_has_no_states() -> None:
    ledger = plan_memory(SHAPE, MemoryRequest(states=40), 8 * GIBIBYTE)
    assert (ledger.num_states, ledger.state_bytes) == (None, 0)
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
    settings = EngineSettings(kvcache=KVCacheSettings(prefix_cache=False, states=9))
    request = request_of(settings, hybrid_shape(QWEN3_5_35B), MAC, is_cpu=False)
    assert plan_memory(hybrid_shape(QWEN3_5_35B), request, MAC).num_states == 0


@pytest.mark.parametrize(
    ("request_", "limit", "remedy"),
    [
        (MemoryRequest(context=131_072, states=600), 64, "--states 32"),
        (MemoryRequest(pool_tokens=4_000_000), 64, "--pool-tokens "),
        (MemoryRequest(pool_tokens=900_000, states=64), 64, "--states "),
        (MemoryRequest(pool_tokens=4_000_000, states=600), 64, "--states 32 --pool-tokens "),
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
