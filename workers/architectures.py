"""What mlx-lm's model of each type builds, and from which fields of its config. Facts only; refuses nothing.

Source: mlx_lm.models (llama, qwen2, qwen3, qwen3_moe, qwen3_next, qwen3_5, qwen3_5_moe) of mlx-lm 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model type. A hybrid is mostly Gated DeltaNet layers; their state has one size at any length."""

    has_experts: bool = False
    has_shared_expert: bool = False
    may_mix_layers: bool = False  # dense and sparse ones, by decoder_sparse_step and mlp_only_layers
    is_hybrid: bool = False
    has_split_projections: bool = False  # of its Gated DeltaNet: qkv, z, b and a apart
    reads_rope_parameters: bool = False  # in the new place only
    ropes: tuple[str, ...] = ROPES
    takes_attention_bias: bool = True
    has_qkv_bias: bool = False  # and no other, whatever the config says
    has_head_norms: bool = True  # of Q and K
    ties_by_default: bool = True
    required: tuple[str, ...] = ()  # whole numbers that it has no default for, or a made-up one
    required_reals: tuple[str, ...] = ()


_KV = ("num_key_value_heads", "max_position_embeddings")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_LINEAR = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_REALS = ("rope_theta", "rms_norm_eps")
_SHARED = "shared_expert_intermediate_size"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(has_head_norms=False),
    "mistral": Architecture(has_head_norms=False),
    "qwen2": Architecture(has_qkv_bias=True, has_head_norms=False),
    "qwen3": Architecture(takes_attention_bias=False),
    "qwen3_moe": Architecture(
        has_experts=True,
        may_mix_layers=True,
        ropes=("default",),
        takes_attention_bias=False,
        ties_by_default=False,
        required=("head_dim", *_KV, *_EXPERTS),
        required_reals=_REALS,
    ),
    "qwen3_next": Architecture(
        has_experts=True,
        has_shared_expert=True,
        may_mix_layers=True,
        is_hybrid=True,
        ties_by_default=False,
        required=("head_dim", *_KV, *_EXPERTS, *_LINEAR, _SHARED),
        required_reals=_REALS,
    ),
    "qwen3_5": Architecture(
        is_hybrid=True,
        has_split_projections=True,
        reads_rope_parameters=True,
        ties_by_default=False,
        required=(*_KV, *_LINEAR),
    ),
    "qwen3_5_moe": Architecture(
        has_experts=True,
        has_shared_expert=True,
        is_hybrid=True,
        has_split_projections=True,
        reads_rope_parameters=True,
        ties_by_default=False,
        required=(*_KV, *_EXPERTS, *_LINEAR, _SHARED),
    ),
}

_OUTER_FIELDS = (
    *("auto_map", "model_file", "trust_remote_code"),
    *("quantization", "quantization_config", "quantize_activations"),
    *("dtype", "torch_dtype", "eos_token_id", "vision_config"),
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's fields in one flat table, of a config that keeps them in `text_config` too.

    The type stays the outer one: it is the one that mlx-lm goes by. A flat config comes back as it is.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    outer = {name: config[name] for name in _OUTER_FIELDS if name in config}
    return {**outer, **inner, "model_type": config.get("model_type")}


def is_attention_layer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether layer (from 0) holds K and V; the others of a hybrid are Gated DeltaNet."""
    if not ARCHITECTURES[config["model_type"]].is_hybrid:
        return True
    return bool((layer + 1) % config.get("full_attention_interval", 4) == 0)


def is_sparse_layer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether layer (from 0) has experts."""
    architecture = ARCHITECTURES[config["model_type"]]
    if not architecture.may_mix_layers:
        return architecture.has_experts
    is_apart = layer in config["mlp_only_layers"]
    return not is_apart and bool((layer + 1) % config["decoder_sparse_step"] == 0)
