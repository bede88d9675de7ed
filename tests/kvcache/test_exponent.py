"""2^x in one fused pass against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvcache.exponent import power_of_two


@pytest.mark.parametrize("fused", [False, True])
def test_relative_error_is_that_of_float32(*, fused: bool) -> None:
    x = -mx.random.uniform(0, 125, (3, 1, 7001), key=mx.random.key(5))
    exact = np.exp2(np.array(x).astype(np.float64))
    found = np.array(power_of_two(x, fused=fused)).astype(np.float64)
    assert np.abs(found / exact - 1).max() < 3e-7


@pytest.mark.parametrize("fused", [False, True])
def test_zero_gives_one_and_a_masked_score_nothing(*, fused: bool) -> None:
    found = np.array(power_of_two(mx.array([0.0, -126.0, -1e30]), fused=fused))
    assert found[0] == pytest.approx(1.0, abs=2e-7)
    assert 0.0 <= found[2] <= found[1] <= 2.0**-125


def test_every_shape_of_scores_takes_the_same_function() -> None:
    for shape in ((1, 3, 12, 64), (4, 1, 3, 1728), (5,)):
        x = -mx.random.uniform(0, 20, shape)
        assert mx.allclose(power_of_two(x, fused=True), mx.power(2.0, x), rtol=1e-6, atol=0).item()
