"""The quick way round gives what mlx.nn.Linear gives."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from workers.linear import FewRowsLinear, is_quick, quicken


@pytest.mark.parametrize("rows", [1, 4, 12, 13, 16, 18, 28, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_and_many_give_the_plain_layers_values(rows: int, bias: bool) -> None:
    linear = nn.Linear(64, 96, bias=bias)
    x = mx.random.normal((1, rows, 64))
    assert mx.allclose(FewRowsLinear(linear)(x), linear(x), atol=1e-5)


def test_a_model_is_quickened_whole_and_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4, bias=False)))
    names = sorted(model.parameters().keys())
    x = mx.ones((2, 8))
    before = model(x)
    assert not is_quick(model)
    quicken(model)
    assert is_quick(model)
    assert all(type(child) is not nn.Linear for _, child in model.named_modules())
    assert sorted(model.parameters().keys()) == names
    assert mx.allclose(model(x), before, atol=1e-6)
