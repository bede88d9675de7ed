"""Quantiles are exact over the window; sum and count never shrink."""

from __future__ import annotations

import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics.quantiles import QUANTILES, Ring, quantile


def test_quantiles_equal_numpys() -> None:
    source = random.Random(5)
    values = [source.lognormvariate(-3, 0.6) for _ in range(3000)]
    ring = Ring()
    for value in values:
        ring.add(value, now=0.0)
    assert ring.quantiles(now=1.0) == pytest.approx(tuple(numpy.quantile(values, QUANTILES)))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_lies_between_the_extremes(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= quantile(ordered, fraction) * (1 + 1e-12)
    assert quantile(ordered, fraction) <= ordered[-1] * (1 + 1e-12)


def test_one_sample_is_every_quantile() -> None:
    ring = Ring()
    ring.add(7.0, now=0.0)
    assert ring.quantiles(now=0.0) == (7.0,) * 4


def test_no_samples_have_no_quantiles() -> None:
    assert Ring().quantiles(now=0.0) is None
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_samples_leave_by_age_and_totals_stay() -> None:
    ring = Ring(window_seconds=10)
    ring.add(1.0, now=0.0)
    ring.add(3.0, now=5.0)
    assert ring.quantiles(now=10.0, fractions=(0.0,)) == (1.0,)
    assert ring.quantiles(now=10.1, fractions=(0.0,)) == (3.0,)
    assert ring.quantiles(now=16.0) is None
    assert (ring.total, ring.count) == (4.0, 2)


def test_samples_leave_by_number_and_totals_stay() -> None:
    ring = Ring(max_samples=3)
    for value in (1.0, 2.0, 3.0, 4.0):
        ring.add(value, now=0.0)
    assert ring.quantiles(now=0.0, fractions=(0.0, 1.0)) == (2.0, 4.0)
    assert (ring.total, ring.count) == (10.0, 4)
