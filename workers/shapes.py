"""A model as the memory ledger sees it: the sizes that its arithmetic needs, from a checked, flat config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .architectures import ARCHITECTURES, is_attention_layer, is_sparse_layer
from .parameters import num_parameters

_STATE_BYTES = 4  # of one value of a recurrent matrix: always fp32, as is a small state's scale


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The Gated DeltaNet layers of a hybrid, which keep a state where others keep K and V."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_tokens: int  # of the convolution; its window is one less

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_bytes(self, compute_bytes: int) -> int:
        """One state of all layers: recurrent matrices in fp32, convolution windows in the compute dtype."""
        return self.num_layers * (self._matrix_values * _STATE_BYTES + self._window_bytes(compute_bytes))

    def small_state_bytes(self, compute_bytes: int) -> int:
        """The same with matrices in 8 bits and one scale for each head and key channel."""
        scales = self.num_value_heads * self.key_head_dim * _STATE_BYTES
        return self.num_layers * (self._matrix_values + scales + self._window_bytes(compute_bytes))

    @property
    def _matrix_values(self) -> int:
        return self.values * self.key_head_dim

    def _window_bytes(self, compute_bytes: int) -> int:
        return (self.kernel_tokens - 1) * self.channels * compute_bytes


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The expert block of a layer, as far as activations depend on it."""

    num_experts: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the arithmetic needs of a model. native_bytes is the size of its weight files."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int  # of dense layers; 0 where all have experts
    vocab_size: int
    context_length: int
    num_parameters: int
    native_bytes: int
    compute_bytes: int = 2  # of one activation when the weights stay native
    delta: DeltaShape | None = None
    experts: ExpertShape | None = None

    @property
    def num_attention_layers(self) -> int:
        """Those that hold K and V."""
        return self.num_layers - (self.delta.num_layers if self.delta else 0)


def shape_of(config: Mapping[str, Any], native_bytes: int) -> ModelShape:
    """A checked, flat config (`families.check_config`) as a shape."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    layers = range(config["num_hidden_layers"])
    has_dense_layers = not all(is_sparse_layer(config, layer) for layer in layers)
    return ModelShape(
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"] if has_dense_layers else 0,
        vocab_size=config["vocab_size"],
        context_length=config.get("max_position_embeddings") or 32768,
        num_parameters=num_parameters(config),
        native_bytes=native_bytes,
        compute_bytes=4 if (config.get("torch_dtype") or config.get("dtype")) == "float32" else 2,
        delta=_delta_of(config),
        experts=_experts_of(config),
    )


def _delta_of(config: Mapping[str, Any]) -> DeltaShape | None:
    if not ARCHITECTURES[config["model_type"]].is_hybrid:
        return None
    layers = config["num_hidden_layers"]
    return DeltaShape(
        num_layers=sum(not is_attention_layer(config, layer) for layer in range(layers)),
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_head_dim=config["linear_key_head_dim"],
        value_head_dim=config["linear_value_head_dim"],
        kernel_tokens=config["linear_conv_kernel_dim"],
    )


def _experts_of(config: Mapping[str, Any]) -> ExpertShape | None:
    architecture = ARCHITECTURES[config["model_type"]]
    if not architecture.has_experts:
        return None
    shared = config["shared_expert_intermediate_size"] if architecture.has_shared_expert else 0
    return ExpertShape(
        num_experts=config["num_experts"],
        per_token=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        shared_intermediate_size=shared,
    )
