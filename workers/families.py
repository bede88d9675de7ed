"""Which models work: model types and features, judged from a config alone. Reads no file, imports no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .architectures import ARCHITECTURES, ROPES, Architecture, is_attention_layer
from .config_numbers import check_numbers, wrong_number
from .errors import ModelError, UnsupportedModel

FAMILIES = tuple(ARCHITECTURES)
QUANTISATION_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")

_WORKS = (
    f"works: {', '.join(FAMILIES)} with full attention (or every n-th layer of a hybrid), silu and "
    f"rope {', '.join(ROPES)}"
)
_CODE_KEYS = ("auto_map", "model_file", "trust_remote_code")
_CONVERTED_METHODS = ("awq", "gptq", "compressed-tensors", "mxfp4", "mxfp8")
"""Quantisations of others that mlx-lm turns into its own while it loads."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel that names what does not work and what does, ModelError for a broken config.

    config is flat (`architectures.text_config`). Afterwards the numbers that sizes are computed from are
    there and add up (`ledger.shape_of`).
    """
    asked = next((key for key in _CODE_KEYS if config.get(key)), None)
    if asked is not None:
        raise UnsupportedModel(
            f"the config asks to run code of its own ({asked}); that is never done here; {_WORKS}"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("the config names no model_type; it is not a language model's config.json")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModel(f"model type {model_type!r} does not work here; {_WORKS}")
    architecture = ARCHITECTURES[model_type]
    judges = (_sliding_window, _rope, _rotary_part, _attention, _experts, _quantisation)
    for feature in (judge(config, architecture) for judge in judges):
        if feature is not None:
            raise UnsupportedModel(f"{model_type} with {feature} does not work here; {_WORKS}")
    check_numbers({**config, **rope_overrides(config)}, architecture)
    if architecture.is_hybrid:
        _check_layer_types(config)


def rope_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config entries that mlx-lm needs in the old place, from the nested `rope_parameters` of newer configs.

    mlx-lm's llama and qwen2 read only the old place and would silently use their default base.
    """
    nested = config.get("rope_parameters")
    architecture = ARCHITECTURES.get(config.get("model_type", ""), Architecture())
    if not isinstance(nested, Mapping) or "text_config" in config or architecture.reads_rope_parameters:
        return {}
    found: dict[str, Any] = {
        name: nested[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in nested and name not in config
    }
    if not config.get("rope_scaling") and _rope_type(nested) != "default":
        found["rope_scaling"] = {key: value for key, value in nested.items() if key != "rope_theta"}
    return found


def left_out(config: Mapping[str, Any]) -> list[str]:
    """Parts of a published model that are not loaded, one line each. config is flat."""
    lines = []
    if config.get("vision_config"):
        lines.append("its vision part is not loaded: it reads text only")
    if config.get("mtp_num_hidden_layers"):
        lines.append("its layers for multi-token prediction are not loaded")
    return lines


def _check_layer_types(config: Mapping[str, Any]) -> None:
    """mlx-lm goes by the interval alone; a config that says otherwise would be run wrong."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != config["num_hidden_layers"]:
        raise wrong_number("layer_types", kinds, f"a list of {config['num_hidden_layers']} kinds")
    for layer, kind in enumerate(kinds):
        expected = "full_attention" if is_attention_layer(config, layer) else "linear_attention"
        if kind != expected:
            raise UnsupportedModel(
                f"{config['model_type']} with layer_types {kind} at layer {layer} does not work here: "
                f"full_attention_interval makes that {expected}; {_WORKS}"
            )


def _sliding_window(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    known = {"full_attention", "linear_attention"} if architecture.is_hybrid else {"full_attention"}
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - known)
    if others:
        return f"{others[0]} layers"
    window = config.get("sliding_window")
    if not window:
        return None
    if config["model_type"] in ("qwen2", "qwen3"):
        first = config.get("max_window_layers") or 0
        used = config.get("use_sliding_window") and first < (config.get("num_hidden_layers") or 0)
    elif config["model_type"].startswith("qwen"):
        used = config.get("use_sliding_window")
    else:
        used = window < (config.get("max_position_embeddings") or window)
    return f"sliding-window attention ({window} tokens)" if used else None


def _rope(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    scaling = _scaling(config, architecture)
    kind = _rope_type(scaling)
    if kind not in architecture.ropes:
        reason = " (mlx-lm would ignore it)" if kind in ROPES else ""
        return f"{'dynamic-NTK' if kind == 'dynamic' else kind} rope{reason}"
    if kind != "default" and not isinstance(scaling.get("factor"), int | float):
        raise ModelError(f"the config's rope_scaling of type {kind} has no factor")
    if kind == "yarn":
        if "original_max_position_embeddings" not in scaling:
            raise ModelError("the config's rope_scaling of type yarn has no original_max_position_embeddings")
        if scaling.get("attention_factor") is not None:
            return "yarn rope with its own attention_factor"
    return None


def _scaling(config: Mapping[str, Any], architecture: Architecture) -> Mapping[str, Any]:
    if not architecture.reads_rope_parameters:
        found = config.get("rope_scaling") or rope_overrides(config).get("rope_scaling") or {}
        if not isinstance(found, Mapping):
            raise ModelError("the config's rope_scaling is not a table")
        return found
    nested = config.get("rope_parameters")
    if not isinstance(nested, Mapping) or "rope_theta" not in nested:
        raise ModelError("the config has no rope_parameters with a rope_theta; mlx-lm would make one up")
    if config.get("rope_scaling"):
        raise ModelError("the config has rope_scaling beside rope_parameters; mlx-lm reads only the latter")
    return nested


def _rope_type(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _rotary_part(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    nested = config.get("rope_parameters")
    inner = nested.get("partial_rotary_factor") if isinstance(nested, Mapping) else None
    if not architecture.is_hybrid:
        factor = inner if isinstance(nested, Mapping) else config.get("partial_rotary_factor")
        return "rope over a part of each head" if (factor or 1) != 1 else None
    if architecture.reads_rope_parameters:
        factor = 0.25 if inner is None else inner
    else:
        factor = config.get("partial_rotary_factor", inner)
    head = config.get("head_dim") or 0
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        raise wrong_number("partial_rotary_factor", factor, "a part of each head, above 0 and up to 1")
    if type(head) is int and int(head * factor) % 2:
        raise wrong_number("partial_rotary_factor", factor, f"an even number of the head's {head} values")
    return None


def _attention(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        return f"activation {activation!r}"
    if config.get("attention_bias") and not architecture.takes_attention_bias:
        return "attention_bias"
    if not architecture.is_hybrid:
        return None
    if not config.get("attn_output_gate", True):
        return "attn_output_gate false"
    gate = config.get("output_gate_type") or "silu"
    return None if gate in ("silu", "swish") else f"output_gate_type {gate!r}"


def _experts(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    if not architecture.has_experts:
        return f"{config['num_experts']} experts" if config.get("num_experts") else None
    if architecture.may_mix_layers:
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return "layers without experts (mlx-lm would give them some)"
    return None


def _quantisation(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    del architecture
    if config.get("quantize_activations"):
        return "quantised activations"
    own = config.get("quantization")
    if own is None:
        return _foreign_quantisation(config.get("quantization_config") or {})
    if not isinstance(own, Mapping):
        raise ModelError("the config's quantization is not a table")
    for entry in (own, *(entry for entry in own.values() if isinstance(entry, Mapping))):
        mode = entry.get("mode", "affine")
        if mode not in QUANTISATION_MODES:
            return f"quantisation mode {str(mode)[:40]!r} (works: {', '.join(QUANTISATION_MODES)})"
        if entry.get("global_scale"):
            return "a global scale of its nvfp4 weights"
        for name in ("bits", "group_size"):
            if type(entry.get(name)) is not int or not 1 <= entry[name] <= 1024:
                raise wrong_number(f"quantization.{name}", entry.get(name), "a whole number from 1 to 1024")
    return None


def _foreign_quantisation(foreign: Mapping[str, Any]) -> str | None:
    method = foreign.get("quant_method") if isinstance(foreign, Mapping) else foreign
    if not foreign or method in _CONVERTED_METHODS:
        return None
    if method == "fp8" and foreign.get("scale_fmt") == "ue8m0":
        return None
    return f"{str(method)[:40]} quantisation"
