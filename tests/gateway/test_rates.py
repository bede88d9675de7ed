"""Calls per minute: never more than a minute's calls and what has filled up since."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers.rates import Rates


def test_a_minutes_calls_go_at_once_and_the_next_when_the_bucket_has_filled() -> None:
    rates = Rates()
    assert [rates.take("a", 60, 5.0) for _ in range(60)] == [0.0] * 60
    assert rates.take("a", 60, 5.0) == pytest.approx(1.0)
    assert rates.take("a", 60, 5.5) == pytest.approx(0.5)  # asking does not cost
    assert rates.take("a", 60, 6.0) == 0.0
    assert rates.take("b", 60, 6.0) == 0.0


def test_a_smaller_limit_holds_at_once() -> None:
    rates = Rates()
    rates.take("a", 600, 0.0)
    assert [rates.take("a", 2, 0.0) for _ in range(2)] == [0.0, 0.0]
    assert rates.take("a", 2, 0.0) == pytest.approx(30.0)


def test_the_oldest_bucket_is_forgotten_first() -> None:
    rates = Rates(max_buckets=2)
    for name in ("a", "b", "c"):
        assert rates.take(name, 1, 0.0) == 0.0
    assert rates.take("c", 1, 0.0) > 0
    assert rates.take("a", 1, 0.0) == 0.0


@given(st.integers(1, 300), st.lists(st.floats(0, 20), max_size=200))
def test_whoever_waits_as_told_is_taken_and_no_window_has_more_than_its_share(
    limit: int, pauses: list[float]
) -> None:
    rates, now = Rates(), 1000.0
    for taken, pause in enumerate(pauses, 1):
        now += pause
        seconds = rates.take("a", limit, now)
        if seconds:
            now += seconds + 1e-6
            assert rates.take("a", limit, now) == 0.0
        assert taken <= limit + (now - 1000) * limit / 60 + 1e-3


def test_a_clock_that_steps_back_gives_nothing() -> None:
    rates = Rates()
    assert rates.take("a", 1, 100.0) == 0.0
    assert rates.take("a", 1, 0.0) == pytest.approx(60.0)
    assert rates.take("a", 1, 100.0) == pytest.approx(60.0)
