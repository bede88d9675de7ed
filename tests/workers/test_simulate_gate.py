"""The gate: what the cache must answer of a day of coding agents' calls, with the policies that serve them.

One order of sessions, and the means over several: `make gate`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from time import process_time

import pytest

from workers.simulate_device import Device
from workers.simulate_replay import Capacity, Replay
from workers.simulate_report import Report, Reports
from workers.simulate_trace import Trace, read_trace

NUM_CALLS = 1700
MAX_CPU_SECONDS = 30.0


@cache
def trace() -> Trace:
    return read_trace(Path(__file__).parent.parent / "traces" / "agents_1700.jsonl.gz")


def replay(agents: int, pool_tokens: int, seed: int) -> Report:
    capacity = Capacity(agents, pool_tokens, 32, num_workers=4, context_tokens=131_072)
    return Replay(trace(), capacity, Device(), seed).run()


@pytest.mark.gate
def test_eight_agents_in_a_million_tokens() -> None:
    started = process_time()
    report = replay(8, 1_048_576, seed=0)
    assert process_time() - started < MAX_CPU_SECONDS
    assert (report.num_calls, report.num_failed, report.num_skipped) == (NUM_CALLS, 0, 0)
    assert report.hit_rate >= 0.945
    assert report.num_restored > 0.9 * NUM_CALLS


@pytest.mark.gate
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("agents", "pool_tokens", "least"),
    [(8, 1_048_576, 0.945), (4, 524_288, 0.945), (8, 524_288, 0.90)],
)
def test_the_mean_over_orders(agents: int, pool_tokens: int, least: float) -> None:
    reports = Reports.of([replay(agents, pool_tokens, seed) for seed in range(1, 6)])
    assert reports.hit_rate >= least, f"from {reports.hit_rate_min} to {reports.hit_rate_max}"
    assert all(report.num_failed == 0 for report in reports.orders)
