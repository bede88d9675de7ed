"""A GGUF file of a llama-type model, converted once into a model folder that mlx-lm loads.

Quantised tensors stay quantised (MLX 4 or 8 bits in groups of 32); nothing is rounded again.
Knows neither where folders are kept nor who asks.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .errors import ModelError, UnsupportedModel
from .gguf_metadata import Metadata
from .gguf_tokenizer import GgufTokenizer, read_tokenizer

FORMAT = 1
"""Rises when the same file would be converted differently, so that kept folders are made anew."""

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_GROUP = 32  # of every GGUF quantisation that MLX keeps: Q4_0, Q4_1, Q8_0
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASED = ("attn_q", "attn_k", "attn_v")
_ROPE_FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Contents:
    source: str  # file name, for messages
    architecture: str
    metadata: Metadata
    tensors: dict[str, mx.array]  # by GGUF name; a quantised one has .weight, .scales and .biases


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model folder `target` (which must not exist) whole or not at all.

    Raises ModelError for a broken or truncated file, UnsupportedModel for one that is not llama-type.
    """
    contents = _read(source)
    try:
        tokenizer = read_tokenizer(contents.metadata)
    except ModelError as error:
        raise type(error)(f"{source.name}: {error}") from None
    weights = _weights(contents)
    config = _config(contents, weights, tokenizer)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        mx.save_safetensors(str(partial / "model.safetensors"), weights, metadata={"format": "mlx"})
        _write_texts(partial, config, tokenizer)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_texts(folder: Path, config: dict[str, Any], tokenizer: GgufTokenizer) -> None:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {name: config[name] for name in names if name in config}
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    tokenizer_config = tokenizer.config | {"model_max_length": config["max_position_embeddings"]}
    for name, values in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
        ("config.json", config),
    ):
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def _read(source: Path) -> _Contents:
    try:
        with source.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{source.name}: not a GGUF file (it does not start with GGUF)")
        loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
    except OSError as error:
        raise ModelError(f"{source}: cannot be read: {error.strerror or error}") from None
    except (RuntimeError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise ModelError(f"{source.name}: {_reason(str(error))}") from None
    tensors, values = loaded
    metadata = Metadata(source.name, values)
    architecture = metadata.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        works = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(
            f"{source.name}: architecture {architecture!r} does not work here; works: {works}"
        )
    if metadata.whole("split.count", 1) > 1:
        raise UnsupportedModel(f"{source.name}: one part of a split file; merge the parts first")
    for feature in ("expert_count", "attention.sliding_window"):
        if metadata.number(f"{architecture}.{feature}", 0) > 0:
            raise UnsupportedModel(f"{source.name}: its {feature!r} does not work here; dense models do")
    return _Contents(source.name, architecture, metadata, tensors)


def _reason(message: str) -> str:
    """MLX's message as one line with what to do."""
    if "f16" in message:
        return "holds a quantisation that cannot be read; works: F32, F16, BF16, Q4_0, Q4_1, Q8_0"
    detail = message.split("] ", 1)[-1].splitlines()[0].split(". Perhaps")[0] if message else "unreadable"
    return f"incomplete or broken: {detail}; download it again"


def _weights(contents: _Contents) -> dict[str, mx.array]:
    """Tensors under mlx-lm's names. Every layer has what it needs and nothing that is not understood."""
    weights: dict[str, mx.array] = {}
    for name, tensor in contents.tensors.items():
        if name == _ROPE_FREQUENCIES:
            continue
        new_name = _new_name(name)
        if new_name is None:
            raise UnsupportedModel(
                f"{contents.source}: the tensor {name!r} does not belong to a llama-type model"
            )
        weights[new_name] = tensor
    missing = [name for name in _required(contents) if name not in contents.tensors]
    if missing:
        raise ModelError(f"{contents.source}: the tensor {missing[0]!r} is missing; the file is incomplete")
    for name, tensor in weights.items():
        if mx.issubdtype(tensor.dtype, mx.floating) and not mx.all(mx.isfinite(tensor)).item():
            raise ModelError(f"{contents.source}: the tensor for {name!r} holds values that are not finite")
    return weights


def _new_name(name: str) -> str | None:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases|bias)", name)
    if match is None:
        return None
    layer, stem, suffix = match.groups()
    if layer is None:
        return f"{_OUTER[stem]}.{suffix}" if stem in _OUTER else None
    return f"model.layers.{layer}.{_INNER[stem]}.{suffix}" if stem in _INNER else None


def _required(contents: _Contents) -> list[str]:
    stems = [
        stem for stem in _INNER if contents.architecture == "qwen3" or not stem.endswith(("q_norm", "k_norm"))
    ]
    names = ["token_embd.weight", "output_norm.weight"]
    for layer in range(contents.metadata.whole(f"{contents.architecture}.block_count")):
        names += [f"blk.{layer}.{stem}.weight" for stem in stems]
        if contents.architecture == "qwen2":
            names += [f"blk.{layer}.{stem}.bias" for stem in _BIASED]
    return names


def _config(contents: _Contents, weights: dict[str, mx.array], tokenizer: GgufTokenizer) -> dict[str, Any]:
    metadata, prefix = contents.metadata, contents.architecture
    heads = metadata.whole(f"{prefix}.attention.head_count")
    hidden = metadata.whole(f"{prefix}.embedding_length")
    head_dim = metadata.whole(f"{prefix}.attention.key_length", hidden // max(heads, 1))
    if metadata.whole(f"{prefix}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{contents.source}: rope over a part of each head does not work here")
    vocabulary = weights["model.embed_tokens.weight"].shape[0]
    if tokenizer.tokenizer.get_vocab_size() > vocabulary:
        raise ModelError(f"{contents.source}: more tokens than the {vocabulary} rows of the embedding")
    config: dict[str, Any] = {
        "model_type": prefix,
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[prefix] + "ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.whole(f"{prefix}.block_count"),
        "intermediate_size": metadata.whole(f"{prefix}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole(f"{prefix}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "vocab_size": vocabulary,
        "max_position_embeddings": metadata.whole(f"{prefix}.context_length"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10000.0),
        # The llama converter permutes the rows of q and k for interleaved rope; the others do not.
        "rope_traditional": prefix == "llama",
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in weights,
        "eos_token_id": list(tokenizer.eos_ids) if len(tokenizer.eos_ids) > 1 else tokenizer.eos_ids[0],
    }
    if tokenizer.bos_id is not None:
        config["bos_token_id"] = tokenizer.bos_id
    scaling = _rope_scaling(contents, head_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    quantization = _quantization(weights)
    if quantization is not None:
        config["quantization"] = quantization
    return config


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any] | None:
    """mlx-lm's form: the most common width, and one entry for each module that has another."""
    bits = {
        name.removesuffix(".scales"): weights[f"{name.removesuffix('.scales')}.weight"].shape[-1]
        * 32
        // (tensor.shape[-1] * _GROUP)
        for name, tensor in weights.items()
        if name.endswith(".scales")
    }
    if not bits:
        return None
    widths = list(bits.values())
    common = max(sorted(set(widths)), key=widths.count)
    result: dict[str, Any] = {"group_size": _GROUP, "bits": common}
    for name, width in sorted(bits.items()):
        if width != common:
            result[name] = {"group_size": _GROUP, "bits": width}
    return result


def _rope_scaling(contents: _Contents, head_dim: int, base: float) -> dict[str, Any] | None:
    metadata, prefix = contents.metadata, f"{contents.architecture}.rope.scaling"
    frequencies = contents.tensors.get(_ROPE_FREQUENCIES)
    if frequencies is not None:
        factors: Any = frequencies.astype(mx.float32).reshape(-1).tolist()
        scaling = llama3_scaling(factors, head_dim, base)
        if scaling is None:
            raise UnsupportedModel(f"{contents.source}: its rope_freqs are not those of Llama 3")
        return scaling
    kind = metadata.text(f"{prefix}.type", "none")
    if kind == "none":
        return None
    factor = metadata.number(f"{prefix}.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and metadata.number(f"{prefix}.attn_factor", 1.0) == 1.0:
        original = metadata.whole(f"{prefix}.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModel(f"{contents.source}: rope scaling {kind!r} does not work; works: linear, yarn")


def llama3_scaling(factors: list[float], head_dim: int, base: float) -> dict[str, Any] | None:
    """Llama 3's settings from the per-frequency divisors that GGUF keeps instead; None when they are not its.

    The published models differ in `factor` alone.
    """
    factor, low, high, original = max(factors), 1.0, 4.0, 8192
    if len(factors) != head_dim // 2:
        return None
    for index, found in enumerate(factors):
        wavelength = 2 * math.pi * base ** (2 * index / head_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(found - expected) > 1e-3 * expected:
            return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
