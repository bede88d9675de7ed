"""The weights of a model from its config alone: each array by its module path, how many, how many bytes.

Pure arithmetic on a checked, flat config. Paths are mlx-lm's, as entries of `quantization` name them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .architectures import ARCHITECTURES, Architecture, is_attention_layer, is_sparse_layer
from .errors import UnsupportedModel

Config = Mapping[str, Any]

_FOREIGN_BITS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "fp8": (8, 32)}  # and group size


@dataclass(frozen=True, slots=True)
class Weight:
    """One array: a matrix that may be quantised along its columns, or (columns None) one that never is."""

    path: str
    rows: int  # of all experts together
    columns: int | None = None

    @property
    def num_values(self) -> int:
        return self.rows * (self.columns or 1)


def num_parameters(config: Config) -> int:
    """As mlx-lm builds the model: without vision part and multi-token prediction."""
    return sum(weight.num_values for weight in weights_of(config))


def estimated_bytes(config: Config) -> int:
    """Bytes of the weight files by the config's quantization, per-path entries included.

    Raises UnsupportedModel where the config does not tell the size.
    """
    table = _quantisation(config)
    return sum(_bytes_of(weight, config, table) for weight in weights_of(config))


def weights_of(config: Config) -> Iterator[Weight]:
    """Every array of the model."""
    architecture = ARCHITECTURES[config["model_type"]]
    top = "language_model." if architecture.has_split_projections else ""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield Weight(f"{top}model.embed_tokens", vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        path = f"{top}model.layers.{layer}."
        if is_attention_layer(config, layer):
            yield from _attention(f"{path}self_attn.", config, architecture)
        else:
            yield from _gated_delta(f"{path}linear_attn.", config, architecture)
        if is_sparse_layer(config, layer):
            yield from _experts(f"{path}mlp.", config, architecture)
        else:
            yield from _mlp(f"{path}mlp.", hidden, config["intermediate_size"])
        yield Weight(f"{path}input_layernorm", hidden)
        yield Weight(f"{path}post_attention_layernorm", hidden)
    yield Weight(f"{top}model.norm", hidden)
    if not config.get("tie_word_embeddings", architecture.ties_by_default):
        yield Weight(f"{top}lm_head", vocabulary, hidden)


def _attention(path: str, config: Config, architecture: Architecture) -> Iterator[Weight]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries = heads * head_dim
    keys = (config.get("num_key_value_heads") or heads) * head_dim
    gated = 2 * queries if architecture.is_hybrid else queries
    outputs = {"q_proj": gated, "k_proj": keys, "v_proj": keys}
    has_bias = bool(config.get("attention_bias")) and not architecture.has_qkv_bias
    for name, rows in outputs.items():
        yield Weight(path + name, rows, hidden)
        if has_bias or architecture.has_qkv_bias:
            yield Weight(f"{path}{name}.bias", rows)
    yield Weight(f"{path}o_proj", hidden, queries)
    if has_bias:
        yield Weight(f"{path}o_proj.bias", hidden)
    if architecture.has_head_norms:
        yield Weight(f"{path}q_norm", head_dim)
        yield Weight(f"{path}k_norm", head_dim)


def _gated_delta(path: str, config: Config, architecture: Architecture) -> Iterator[Weight]:
    hidden, value_heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = value_heads * config["linear_value_head_dim"]
    if architecture.has_split_projections:
        inputs = {"qkv": 2 * keys + values, "z": values, "b": value_heads, "a": value_heads}
    else:
        inputs = {"qkvz": 2 * keys + 2 * values, "ba": 2 * value_heads}
    for name, rows in inputs.items():
        yield Weight(f"{path}in_proj_{name}", rows, hidden)
    yield Weight(f"{path}conv1d", (2 * keys + values) * config["linear_conv_kernel_dim"])
    yield Weight(f"{path}dt_bias", value_heads)
    yield Weight(f"{path}A_log", value_heads)
    yield Weight(f"{path}norm", config["linear_value_head_dim"])
    yield Weight(f"{path}out_proj", hidden, values)


def _experts(path: str, config: Config, architecture: Architecture) -> Iterator[Weight]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    yield Weight(f"{path}gate", experts, hidden)
    yield from _mlp(f"{path}switch_mlp.", hidden, config["moe_intermediate_size"], num_experts=experts)
    if architecture.has_shared_expert:
        yield from _mlp(f"{path}shared_expert.", hidden, config["shared_expert_intermediate_size"])
        yield Weight(f"{path}shared_expert_gate", 1, hidden)


def _mlp(path: str, hidden: int, inner: int, *, num_experts: int = 1) -> Iterator[Weight]:
    yield Weight(f"{path}gate_proj", num_experts * inner, hidden)
    yield Weight(f"{path}up_proj", num_experts * inner, hidden)
    yield Weight(f"{path}down_proj", num_experts * hidden, inner)


def _quantisation(config: Config) -> Config | None:
    """In the form of mlx-lm's `quantization`; None for plain weights."""
    own: Config | None = config.get("quantization")
    foreign: Config = config.get("quantization_config") or {}
    if own is not None or not foreign:
        return own
    method = foreign.get("quant_method")
    if method in _FOREIGN_BITS:
        bits, group_size = _FOREIGN_BITS[method]
        return {"bits": bits, "group_size": group_size, "mode": "mxfp8"}
    if type(foreign.get("bits")) is int and type(foreign.get("group_size")) is int:
        return {"bits": foreign["bits"], "group_size": max(1, foreign["group_size"])}
    raise UnsupportedModel(
        f"a config with {str(method)[:40]} quantisation does not tell the size of the weights: "
        "give the folder with its weights"
    )


def _bytes_of(weight: Weight, config: Config, table: Config | None) -> int:
    plain = weight.num_values * (4 if (config.get("dtype") or config.get("torch_dtype")) == "float32" else 2)
    if table is None or weight.columns is None:
        return plain
    entry = table.get(weight.path, True)
    if entry is False:
        return plain
    chosen: Config = entry if isinstance(entry, Mapping) else table
    group_size, bits = int(chosen["group_size"]), int(chosen["bits"])
    if weight.columns % group_size:
        return plain
    # affine: 2-byte scale and bias for each group; the others: a scale of one byte
    per_group = 32 if chosen.get("mode", "affine") == "affine" else 8
    return weight.num_values * (bits * group_size + per_group) // group_size // 8
