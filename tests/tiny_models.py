"""Configs and random weights of small models of the real mixture-of-experts and hybrid architectures.

Sizes are the smallest that 4-bit weights and 8-bit KV allow. Knows no folder and no engine (tests/models.py).
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

MIXED_FAMILIES = ("qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
NESTED_FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""Their config is that of a vision model: the language model's is a table inside, `text_config`."""

_ROUTER_SHARPNESS = 8.0  # a trained router's margins are clear, those of a random one are near-ties
_FASTEST_DECAY, _SLOWEST_DECAY = 0.1, 0.001  # of the state in one token, before the head's own rate

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 256,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_SPARSE_LAYERS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_LINEAR: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5: dict[str, Any] = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
_PARTS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3_moe": (
        _EXPERTS,
        _SPARSE_LAYERS,
        {"intermediate_size": 192, "rope_theta": 10000.0, "tie_word_embeddings": False},
    ),
    "qwen3_next": (
        _EXPERTS,
        _SPARSE_LAYERS,
        _LINEAR,
        {
            "intermediate_size": 192,
            "shared_expert_intermediate_size": 64,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": (_LINEAR, _QWEN3_5, {"intermediate_size": 192, "tie_word_embeddings": True}),
    "qwen3_5_moe": (
        _EXPERTS,
        _LINEAR,
        _QWEN3_5,
        {"shared_expert_intermediate_size": 64, "tie_word_embeddings": False},
    ),
}


def mixed_config(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A config as its makers publish it; `changes` go to the language model's part, None drops a field."""
    text = {**_COMMON}
    for part in _PARTS[model_type]:
        text |= part
    text |= changes
    if "full_attention_interval" in text and "layer_types" not in changes:
        text["layer_types"] = [
            "linear_attention" if (layer + 1) % text["full_attention_interval"] else "full_attention"
            for layer in range(text["num_hidden_layers"])
        ]
    text = {name: value for name, value in text.items() if value is not None}
    if model_type not in NESTED_FAMILIES:
        return {"model_type": model_type, **text}
    return {
        "model_type": model_type,
        "image_token_id": text["vocab_size"] - 1,
        "text_config": {"model_type": f"{model_type}_text", **text},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {"depth": 2, "hidden_size": 64, "model_type": model_type},
    }


def draw_mixed(model: nn.Module) -> None:
    """Draws anew what mlx-lm's defaults leave unlike a trained model; call it with the seed set.

    Routers get clear margins. Convolutions get the range of their own 4 inputs, not that of all channels.
    States get time constants of tens to hundreds of tokens (by the defaults one forgets within a token).
    """
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.weight = module.weight * _ROUTER_SHARPNESS
        elif isinstance(module, nn.Conv1d):
            bound = 1 / math.sqrt(module.weight.shape[1])
            module.weight = mx.random.uniform(low=-bound, high=bound, shape=module.weight.shape)
        elif name.endswith("linear_attn"):
            heads = module.A_log.shape
            module.A_log = mx.log(mx.random.uniform(low=1, high=4, shape=heads))
            low, high = math.log(_SLOWEST_DECAY), math.log(_FASTEST_DECAY)
            step = mx.exp(mx.random.uniform(low=low, high=high, shape=heads))
            module.dt_bias = mx.log(mx.expm1(step))


def cast_mixed(model: nn.Module, dtype: mx.Dtype) -> None:
    """To the dtype of a published checkpoint; the decay rates stay fp32, as mlx-lm keeps them."""
    model.set_dtype(dtype, lambda kind: mx.issubdtype(kind, mx.floating))
    for name, module in model.named_modules():
        if name.endswith("linear_attn"):
            module.A_log = module.A_log.astype(mx.float32)
