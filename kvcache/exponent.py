"""2^x for attention's weights: the elementwise function that prefill attention spends most of its time on.

MLX's CPU backend takes `power` an element at a time. Where it can fuse elementwise steps (for that it calls
g++), a polynomial in one pass costs less than half; where it cannot, the polynomial's passes would cost more.
"""

from __future__ import annotations

import functools
import shutil

import mlx.core as mx

# 2^f for f in [-0.5, 0.5]: least squares of the relative error on 400 Chebyshev nodes; at most 7.7e-8 off.
_COEFFICIENTS = (
    1.000000071029699,
    0.693146949161063,
    0.24022121753561543,
    0.05550742616001791,
    0.009675459745527012,
    0.001326697038665406,
)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest whole number in the lowest bits of the sum
_SMALLEST = -126.0  # 2^-126 is the smallest normal number; below it a weight is nothing anyway


@functools.cache
def are_steps_fused() -> bool:
    """Whether MLX compiles elementwise functions on this machine's CPU."""
    return not mx.metal.is_available() and shutil.which("g++") is not None


def power_of_two(x: mx.array, *, fused: bool) -> mx.array:
    """2^x of float32 x <= 0, any shape. fused: relative error under 3e-7, and 2^-126 for all x below -126."""
    if not fused:
        return mx.power(2.0, x)
    fraction, shifted = _split(x)
    return _scale(fraction.view(mx.int32), shifted.view(mx.int32)).view(mx.float32)


def _split_plain(x: mx.array) -> tuple[mx.array, mx.array]:
    """2^(x - round(x)), and round(x) in the lowest bits of a float."""
    x = mx.maximum(x, _SMALLEST)
    shifted = x + _ROUND
    rest = x - (shifted - _ROUND)
    power = rest * _COEFFICIENTS[-1] + _COEFFICIENTS[-2]
    for coefficient in _COEFFICIENTS[-3::-1]:
        power = power * rest + coefficient
    return power, shifted


def _scale_plain(power_bits: mx.array, shifted_bits: mx.array) -> mx.array:
    """Adds the whole part to the exponent bits."""
    return power_bits + (shifted_bits << 23)


_split = mx.compile(_split_plain, shapeless=True)
_scale = mx.compile(_scale_plain, shapeless=True)
