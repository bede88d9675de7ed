"""Unpacking weights to fp32, for each family and each way that mlx-lm packs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model, load_model, quantize_model

from tests.models import make_model
from tests.tiny_models import MIXED_FAMILIES
from workers.weights import dequantise, linear_dtype

PROMPT = mx.array([[token * 37 % 256 for token in range(40)]])


@pytest.mark.parametrize("family", [*MIXED_FAMILIES, "llama", "qwen2"])
def test_every_array_is_unpacked_to_fp32(family: str, tmp_path: Path) -> None:
    model, _ = load_model(make_model(tmp_path / "model", family, bits=4))
    dequantise(model)
    names = dict(tree_flatten(model.parameters()))
    assert {str(array.dtype) for array in names.values()} == {"mlx.core.float32"}
    assert not [name for name in names if name.endswith((".scales", ".biases"))]
    assert linear_dtype(model) == "float32"


@pytest.mark.parametrize("family", MIXED_FAMILIES)
def test_unpacked_weights_are_those_of_mlx_lm(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family, bits=4)
    model, _ = load_model(folder)
    packed = model(PROMPT)
    dequantise(model)
    theirs = dequantize_model(load_model(folder)[0])
    ours, expected = dict(tree_flatten(model.parameters())), dict(tree_flatten(theirs.parameters()))
    assert ours.keys() == expected.keys()
    assert all(mx.array_equal(ours[name], expected[name]) for name in ours)
    assert mx.allclose(model(PROMPT), packed, rtol=0, atol=1e-4)


def test_a_mixed_checkpoint_has_routers_at_8_bits_and_says_so(tmp_path: Path) -> None:
    model, config = load_model(make_model(tmp_path / "model", "qwen3_5_moe", bits=4))
    assert linear_dtype(model) == "4-bit+8-bit"
    gate = "language_model.model.layers.0.mlp.gate"
    assert config["quantization"][gate] == {"group_size": 64, "bits": 8}
    block = model.layers[0].mlp
    assert (block.gate.bits, block.switch_mlp.up_proj.bits) == (8, 4)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_bf16_checkpoint_keeps_its_decay_rates_in_fp32(family: str, tmp_path: Path) -> None:
    model, _ = load_model(make_model(tmp_path / "model", family, dtype="bfloat16"))
    delta = model.layers[0].linear_attn
    assert (delta.A_log.dtype, delta.dt_bias.dtype, delta.conv1d.weight.dtype) == (
        mx.float32,
        mx.bfloat16,
        mx.bfloat16,
    )
    rates = mx.array(delta.A_log)
    assert linear_dtype(model) == "bfloat16"
    dequantise(model)
    assert mx.array_equal(delta.A_log, rates)
    assert delta.dt_bias.dtype == delta.conv1d.weight.dtype == mx.float32


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_weights_with_one_byte_scales_are_unpacked_exactly(mode: str, tmp_path: Path) -> None:
    plain, _ = load_model(make_model(tmp_path / "model", "qwen3_moe"))
    model, _ = quantize_model(plain, {}, None, None, mode=mode, quant_predicate=lambda *_: True)
    assert linear_dtype(model) == mode
    packed = model(PROMPT)
    dequantise(model)
    assert linear_dtype(model) == "float32"
    assert mx.allclose(model(PROMPT), packed, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scales", [mx.float16, mx.bfloat16])
def test_experts_with_a_bias_keep_it(scales: mx.Dtype) -> None:
    experts = SwitchLinear(64, 32, 3, bias=True)
    experts.weight = experts.weight.astype(scales)
    experts.bias = mx.arange(96.0).reshape(3, 32).astype(scales)
    block: Any = nn.Module()
    block.experts = experts.to_quantized(64, 8)
    assert isinstance(block.experts, QuantizedSwitchLinear)
    dequantise(block)
    assert type(block.experts) is SwitchLinear
    assert block.experts.weight.shape == (3, 32, 64)
    assert mx.array_equal(block.experts.bias, mx.arange(96.0).reshape(3, 32))
