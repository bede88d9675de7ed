"""Weights in the form that the machine computes fastest: fp32 where quantised matmul is slow."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

_QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def dequantise(model: nn.Module) -> None:
    """Replace every quantised layer by its plain fp32 twin and cast the rest to fp32, a layer at a time.

    fp16 scales are multiplied in fp16, which gives the very weights of mlx-lm's own dequantisation; bf16 ones
    are cast first, as a product in bf16 would round every weight to 8 bits once more. Scales of one byte
    (mxfp4, mxfp8, nvfp4) are exact in fp32.
    """
    for name, module in model.named_modules():
        if isinstance(module, _QUANTISED):
            _replace(model, name, _plain(module))
    model.update(tree_map(_to_fp32, model.parameters()))
    mx.eval(model.parameters())
    mx.clear_cache()


def linear_dtype(model: nn.Module) -> str:
    """Measured: `float32`, `bfloat16`, `4-bit`, `mxfp4`, or several joined by `+` for a mixed checkpoint."""
    kinds = set()
    for _, module in model.named_modules():
        if isinstance(module, _QUANTISED):
            kinds.add(f"{module.bits}-bit" if module.mode == "affine" else module.mode)
        elif isinstance(module, nn.Linear | SwitchLinear):
            kinds.add(str(module.weight.dtype).removeprefix("mlx.core."))
    return "+".join(sorted(kinds))


def narrow_experts(model: nn.Module) -> str | None:
    """The dtype of plain expert weights that are not fp32; None where there are none."""
    for _, module in model.named_modules():
        if isinstance(module, SwitchLinear) and module.weight.dtype != mx.float32:
            return str(module.weight.dtype).removeprefix("mlx.core.")
    return None


def _plain(module: nn.Module) -> nn.Module:
    """The twin of one of _QUANTISED."""
    scales, biases = module.scales, module.get("biases")
    if scales.dtype == mx.bfloat16:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(
        module.weight,
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        dtype=None if module.mode == "affine" else mx.float32,
    ).astype(mx.float32)
    mx.eval(weight)
    if isinstance(module, nn.QuantizedEmbedding):
        plain: nn.Module = nn.Embedding(1, 1)
    elif isinstance(module, QuantizedSwitchLinear):
        plain = SwitchLinear(1, 1, 1, bias="bias" in module)
    else:
        plain = nn.Linear(1, 1, bias="bias" in module)
    if "bias" in module:
        plain.bias = module.bias
    plain.weight = weight
    return plain


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    *path, last = name.split(".")
    parent = model
    for part in path:
        parent = parent[int(part)] if isinstance(parent, list) else getattr(parent, part)
    setattr(parent, last, module)


def _to_fp32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
