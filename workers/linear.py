"""Linear layers for the few rows of a decode step on a CPU: mlx.nn's parameters, its results up to rounding.

OpenBLAS packs the right-hand matrix of a product. As x @ W.T that is the whole weight, for a handful of rows;
as (W @ x.T).T it is the handful. Its kernels take 16 rows at a time: 28 cost more than 32, so a remainder of
some rows is filled up. docs/performance.md has the figures.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

MAX_FEW_ROWS = 12
KERNEL_ROWS = 16
SMALL_REMAINDER = 3
"""Rows beyond a multiple of KERNEL_ROWS that cost less as they are than filled up."""


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., rows, in] times weight [out, in], transposed: [..., rows, out]."""
    rows = x.size // x.shape[-1]
    if rows > MAX_FEW_ROWS:
        missing = -rows % KERNEL_ROWS
        if missing == 0 or missing >= KERNEL_ROWS - SMALL_REMAINDER:
            return x @ weight.T
        filled = mx.pad(x.reshape(rows, x.shape[-1]), [(0, missing), (0, 0)]) @ weight.T
        return filled[:rows].reshape(*x.shape[:-1], weight.shape[0])
    flat = weight @ x.reshape(rows, x.shape[-1]).T
    return flat.T.reshape(*x.shape[:-1], weight.shape[0])


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` that multiplies few rows the quick way round."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight = linear.weight
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, x: mx.array) -> mx.array:
        product = multiply(x, self.weight)
        return product + self.bias if "bias" in self else product


def quicken(model: nn.Module) -> None:
    """Replace every `nn.Linear` of a model in place."""

    def quick(module: nn.Module) -> nn.Module:
        return FewRowsLinear(module) if type(module) is nn.Linear else module

    model.update_modules(tree_map(quick, model.leaf_modules(), is_leaf=nn.Module.is_module))


def is_quick(model: nn.Module) -> bool:
    """Measured: whether any layer multiplies few rows the quick way round."""
    return any(isinstance(module, FewRowsLinear) for _, module in model.named_modules())
