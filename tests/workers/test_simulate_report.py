"""Spreads, means over orders, and the two forms of a report."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from workers.simulate_report import Report, Reports, Spread, count_gaps

REPORT = Report(
    hit_rate=0.9,
    prompt_tokens=1000,
    cached_tokens=900,
    prefill_tokens=100,
    generated_tokens=50,
    num_calls=4,
    num_failed=0,
    num_skipped=1,
    num_preempted=2,
    num_checkpoints=7,
    num_restored=3,
    evicted_pages={"oldest": 5, "dead": 6},
    evicted_states={"superseded": 2},
    wait_seconds=Spread(0.1, 0.2, 0.3, 0.4),
    first_wait_seconds=Spread(),
    first_token_seconds=Spread(),
    stall_seconds=Spread(),
    num_steps=12,
    simulated_seconds=34.5,
    real_seconds=0.25,
)


def test_a_spread_has_ranks_of_its_values() -> None:
    assert Spread.of(float(value) for value in range(1, 101)) == Spread(50.0, 90.0, 99.0, 100.0)


def test_a_spread_of_nothing_is_zero() -> None:
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0, 0.0)


def test_counted_values_weigh_as_often_as_they_came() -> None:
    gaps: Counter[float] = Counter()
    count_gaps(gaps, 0.01, 98)
    count_gaps(gaps, 0.3, 2)
    assert Spread.of_counts(gaps) == Spread(0.01, 0.01, 0.3, 0.3)


def test_several_orders_give_their_mean_and_range() -> None:
    reports = Reports.of([REPORT, replace(REPORT, hit_rate=0.8, prefill_tokens=200)])
    assert reports.hit_rate == pytest.approx(0.85)
    assert (reports.hit_rate_min, reports.hit_rate_max) == (0.8, 0.9)
    assert reports.prefill_tokens == 150


def test_json_has_the_hit_rate_at_its_top_and_each_order_below() -> None:
    parsed = json.loads(Reports.of([REPORT]).json())
    assert parsed["hit_rate"] == 0.9
    assert parsed["orders"][0]["evicted_pages"] == {"oldest": 5, "dead": 6}
    assert parsed["orders"][0]["wait_seconds"]["p99"] == 0.3


def test_a_table_of_one_order_names_causes_and_spreads() -> None:
    table = Reports.of([REPORT]).table()
    assert "90.00 %" in table
    assert "dead" in table and "superseded" in table
    assert "0.10 / 0.20 / 0.30 / 0.40" in table
    assert "order 1" not in table


def test_a_table_of_several_orders_has_a_column_each_and_the_mean() -> None:
    other = replace(REPORT, hit_rate=0.8, evicted_pages={"oldest": 5, "pins": 1})
    table = Reports.of([REPORT, other]).table()
    assert "order 2" in table
    assert "mean hit rate 85.00 %, from 80.00 % to 90.00 %" in table
    assert "pins" in table
