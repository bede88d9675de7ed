from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import pytest

from kvcache.rows import row_format
from workers.errors import DoesNotFit, UnsupportedModel
from workers.ledger import choose_weights, plan_memory, request_of
from workers.memory_request import (
    BUS_BYTES,
    MemoryRequest,
    kv_bytes_per_token,
)
from workers.settings import EngineSettings
from workers.shapes import shape_of

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
