"""Counts and sizes from a config alone, against what mlx-lm builds and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from tests.models import make_model
from tests.tiny_models import MIXED_FAMILIES
from workers.architectures import text_config
from workers.errors import UnsupportedModel
from workers.families import check_config
from workers.parameters import estimated_bytes, num_parameters, weights_of


def config_of(folder: Path) -> dict[str, Any]:
    config = text_config(json.loads((folder / "config.json").read_text()))
    check_config(config)
    return config


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        *((family, {}) for family in MIXED_FAMILIES),
        ("qwen3_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
        ("qwen3_next", {"attention_bias": True, "num_hidden_layers": 6, "full_attention_interval": 3}),
        ("qwen3_5", {"tie_word_embeddings": False}),
    ],
)
def test_parameters_and_bytes_are_those_of_the_files(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", family, **changes, dtype="float32")
    config = config_of(folder)
    model, _ = load_model(folder)
    arrays = dict(tree_flatten(model.parameters()))
    assert num_parameters(config) == sum(array.size for array in arrays.values())
    assert estimated_bytes(config) == sum(array.nbytes for array in arrays.values())
    modules = {name.removesuffix(".weight").removesuffix(".biases") for name in arrays}
    assert {weight.path for weight in weights_of(config)} == modules


@pytest.mark.parametrize("family", MIXED_FAMILIES)
def test_a_mixed_checkpoints_bytes_follow_its_entries(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family, bits=4, dtype="bfloat16")
    model, _ = load_model(folder)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    estimate = estimated_bytes(config_of(folder))
    assert held - 2 * 4 * 4 <= estimate <= held  # decay rates of the 4 value heads of 4 layers are in fp32


def test_entries_of_one_path_change_that_path_alone(tmp_path: Path) -> None:
    config = config_of(make_model(tmp_path / "model", "qwen3_moe", bits=4, dtype="bfloat16"))
    size = estimated_bytes(config)
    head = config["vocab_size"] * config["hidden_size"]
    kept = config | {"quantization": config["quantization"] | {"lm_head": False}}
    eight = config | {"quantization": config["quantization"] | {"lm_head": {"bits": 8, "group_size": 64}}}
    fine = config | {"quantization": config["quantization"] | {"lm_head": {"bits": 4, "group_size": 32}}}
    assert estimated_bytes(kept) - size == head * 23 // 16  # 16 bits in place of 4.5
    assert estimated_bytes(eight) - size == head // 2
    assert estimated_bytes(fine) - size == head // 16


def test_quantisations_of_others_are_sized_where_their_config_tells_it(tmp_path: Path) -> None:
    config = config_of(make_model(tmp_path / "model", "qwen3_moe", dtype="bfloat16"))
    sizes = [
        estimated_bytes(config | {"quantization_config": foreign})
        for foreign in (
            {"quant_method": "mxfp4"},
            {"quant_method": "gptq", "bits": 4, "group_size": 64},
            {"quant_method": "mxfp8"},
        )
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] < estimated_bytes(config) * 0.6
    with pytest.raises(UnsupportedModel, match="compressed-tensors quantisation does not tell the size"):
        estimated_bytes(config | {"quantization_config": {"quant_method": "compressed-tensors"}})
