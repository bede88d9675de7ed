"""Checks the numbers in a model's config, so that sizes computed from them add up. Knows no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .architectures import Architecture
from .errors import ModelError

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL_SIZES = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("full_attention_interval", "decoder_sparse_step"),
)
_REALS = ("rms_norm_eps", "rope_theta")
_SWITCHES = ("tie_word_embeddings", "norm_topk_prob", "attention_bias")
_MOST = 2**31 - 1
_MOST_LAYERS = 1024


def check_numbers(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Raises ModelError that names the field, its value and what would be right. config is flat."""
    has_dense_layers = not architecture.has_experts or architecture.may_mix_layers
    required = (*_SIZES, *(["intermediate_size"] if has_dense_layers else []), *architecture.required)
    for name in (*required, *_OPTIONAL_SIZES):
        _check_size(config, name, is_required=name in required)
    for name in _REALS:
        _check_real(config, name, is_required=name in architecture.required_reals)
    for name in _SWITCHES:
        if config.get(name) not in (None, True, False):
            raise wrong_number(name, config[name], "true or false")
    _check_heads(config)
    if architecture.may_mix_layers:
        _check_mixed_layers(config)
    if architecture.has_experts and config["num_experts_per_tok"] > config["num_experts"]:
        limit = f"at most num_experts, {config['num_experts']}"
        raise wrong_number("num_experts_per_tok", config["num_experts_per_tok"], limit)
    if architecture.is_hybrid:
        _check_hybrid(config)


def wrong_number(name: str, value: Any, right: str) -> ModelError:
    """For a field of the config that cannot be used."""
    found = "is missing" if value is None else f"is {repr(value)[:40]}"
    return ModelError(f"the config's {name} {found}; it must be {right}: correct it or get the model again")


def _check_size(config: Mapping[str, Any], name: str, *, is_required: bool) -> None:
    value = config.get(name)
    most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    if value is None and not is_required:
        return
    if type(value) is not int or not 1 <= value <= most:
        raise wrong_number(name, value, f"a whole number from 1 to {most}")


def _check_real(config: Mapping[str, Any], name: str, *, is_required: bool) -> None:
    value = config.get(name, None if is_required else 1.0)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise wrong_number(name, value, "a number above 0")


def _check_heads(config: Mapping[str, Any]) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise wrong_number("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise wrong_number("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")


def _check_mixed_layers(config: Mapping[str, Any]) -> None:
    if config.get("decoder_sparse_step") is None:
        raise wrong_number("decoder_sparse_step", None, "a whole number, usually 1")
    layers = config.get("mlp_only_layers")
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise wrong_number("mlp_only_layers", layers, "a list of layers, usually []")


def _check_hybrid(config: Mapping[str, Any]) -> None:
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if value_heads % key_heads:
        right = f"a multiple of linear_num_key_heads, {key_heads}"
        raise wrong_number("linear_num_value_heads", value_heads, right)
    if config["linear_conv_kernel_dim"] < 2:
        raise wrong_number("linear_conv_kernel_dim", config["linear_conv_kernel_dim"], "at least 2")
    layers, interval = config["num_hidden_layers"], config.get("full_attention_interval", 4)
    if interval is None or not 2 <= interval <= layers:
        raise wrong_number("full_attention_interval", interval, f"from 2 to num_hidden_layers, {layers}")
