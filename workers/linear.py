"""Linear layers for the few rows of a decode step on a CPU: mlx.nn's parameters, its results up to rounding.

OpenBLAS packs the right-hand matrix of a product. As x @ W.T that is the whole weight, for a handful of rows;
as (W @ x.T).T it is the handful: 1.6 times faster at 4 rows, slower from about 6 on (docs/performance.md).
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

MAX_FEW_ROWS = 4


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., rows, in] times weight [out, in], transposed: [..., rows, out]."""
    rows = x.size // x.shape[-1]
    if rows > MAX_FEW_ROWS:
        return x @ weight.T
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
