"""Which models work: model types and features, judged from a config alone. Reads no file, imports no MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import ModelError, UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3", "yarn")
_WORKS = f"works: {', '.join(FAMILIES)} with full attention, silu and rope {', '.join(ROPES)}"
_CODE_KEYS = ("auto_map", "model_file", "trust_remote_code")
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_REALS = ("rms_norm_eps", "rope_theta")
_MOST = 2**31 - 1
_MOST_LAYERS = 1024


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel that names what does not work and what does, ModelError for a broken config.

    Afterwards the numbers that sizes are computed from are there and add up (`ledger.shape_of`).
    """
    asked = next((key for key in _CODE_KEYS if config.get(key)), None)
    if asked is not None:
        raise UnsupportedModel(
            f"the config asks to run code of its own ({asked}); that is never done here; {_WORKS}"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError("the config names no model_type; it is not a language model's config.json")
    if model_type not in FAMILIES:
        raise UnsupportedModel(f"model type {model_type!r} does not work here; {_WORKS}")
    for feature in (_sliding_window(config), _rope(config), _other(config)):
        if feature is not None:
            raise UnsupportedModel(f"{model_type} with {feature} does not work here; {_WORKS}")
    _check_sizes(config)


def rope_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config entries that mlx-lm needs in the old place, from the nested `rope_parameters` of newer configs.

    mlx-lm's llama and qwen2 read only the old place and would silently use their default base.
    """
    nested = config.get("rope_parameters")
    if not isinstance(nested, Mapping):
        return {}
    found: dict[str, Any] = {}
    if "rope_theta" not in config and "rope_theta" in nested:
        found["rope_theta"] = nested["rope_theta"]
    if not config.get("rope_scaling") and _rope_type(nested) != "default":
        found["rope_scaling"] = {key: value for key, value in nested.items() if key != "rope_theta"}
    return found


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Raises ModelError that names the field, its value and what would be right."""
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        value = config.get(name)
        most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
        if value is None and name in _OPTIONAL_SIZES:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise _wrong_number(name, value, f"a whole number from 1 to {most}")
    for name in _REALS:
        value = config.get(name, 1.0)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise _wrong_number(name, value, "a number above 0")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise _wrong_number("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise _wrong_number("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")


def _wrong_number(name: str, value: Any, right: str) -> ModelError:
    found = "is missing" if value is None else f"is {repr(value)[:40]}"
    return ModelError(f"the config's {name} {found}; it must be {right}: correct it or get the model again")


def _sliding_window(config: Mapping[str, Any]) -> str | None:
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if others:
        return f"{others[0]} layers"
    window = config.get("sliding_window")
    if not window:
        return None
    if config["model_type"].startswith("qwen"):
        first = config.get("max_window_layers") or 0
        used = config.get("use_sliding_window") and first < (config.get("num_hidden_layers") or 0)
    else:
        used = window < (config.get("max_position_embeddings") or window)
    return f"sliding-window attention ({window} tokens)" if used else None


def _rope(config: Mapping[str, Any]) -> str | None:
    scaling = config.get("rope_scaling") or rope_overrides(config).get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError("the config's rope_scaling is not a table")
    kind = _rope_type(scaling)
    if kind not in ROPES:
        return f"{'dynamic-NTK' if kind == 'dynamic' else kind} rope"
    if kind != "default" and not isinstance(scaling.get("factor"), int | float):
        raise ModelError(f"the config's rope_scaling of type {kind} has no factor")
    if kind == "yarn":
        if "original_max_position_embeddings" not in scaling:
            raise ModelError("the config's rope_scaling of type yarn has no original_max_position_embeddings")
        if scaling.get("attention_factor") is not None:
            return "yarn rope with its own attention_factor"
    return None


def _rope_type(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _other(config: Mapping[str, Any]) -> str | None:
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        return f"activation {activation!r}"
    nested = config.get("rope_parameters")
    rotary = (nested if isinstance(nested, Mapping) else config).get("partial_rotary_factor") or 1
    return "rope over a part of each head" if rotary != 1 else None
