"""What a simulation adds up to: rates, counts and spreads of times, as a table and as JSON.

Plain Python. Knows figures only, and not where they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

_GAP_DIGITS = 4
"""Gaps between tokens are counted in steps of 0.1 ms."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles by nearest rank, in seconds; zeros where there was nothing to measure."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        return Spread.of_counts(Counter(values))

    @staticmethod
    def of_counts(counts: Mapping[float, int]) -> Spread:
        """Each value as often as its count says."""
        if not counts:
            return Spread()
        ordered = sorted(counts.items())
        total = sum(counts.values())
        return Spread(*(_ranked(ordered, fraction * total) for fraction in (0.5, 0.9, 0.99, 1.0)))


def _ranked(ordered: Sequence[tuple[float, int]], rank: float) -> float:
    num_before = 0
    for value, num in ordered:
        num_before += num
        if num_before >= rank:
            return round(value, 4)
    return round(ordered[-1][0], 4)


@dataclass(frozen=True, slots=True)
class Report:
    """One order of sessions. hit_rate: the share of prompt tokens that nobody computed."""

    hit_rate: float
    prompt_tokens: int
    cached_tokens: int  # of prompts, when each was started first
    prefill_tokens: int  # rows computed, those of resumed turns included
    generated_tokens: int
    num_calls: int
    num_failed: int
    num_skipped: int  # longer than the context
    num_preempted: int
    num_checkpoints: int  # taken
    num_restored: int
    evicted_pages: dict[str, int]  # by cause
    evicted_states: dict[str, int]
    wait_seconds: Spread  # arrival -> worker
    first_wait_seconds: Spread  # the same of sessions' first calls
    first_token_seconds: Spread  # arrival -> first token
    stall_seconds: Spread  # between a turn's tokens
    num_steps: int
    simulated_seconds: float
    real_seconds: float


@dataclass(frozen=True, slots=True)
class Reports:
    """All orders; the top figures are means."""

    hit_rate: float
    hit_rate_min: float
    hit_rate_max: float
    prefill_tokens: float
    simulated_seconds: float
    real_seconds: float
    orders: tuple[Report, ...]

    @staticmethod
    def of(reports: Sequence[Report]) -> Reports:
        rates = [report.hit_rate for report in reports]
        return Reports(
            hit_rate=round(fmean(rates), 6),
            hit_rate_min=min(rates),
            hit_rate_max=max(rates),
            prefill_tokens=fmean(report.prefill_tokens for report in reports),
            simulated_seconds=round(fmean(report.simulated_seconds for report in reports), 1),
            real_seconds=round(sum(report.real_seconds for report in reports), 2),
            orders=tuple(reports),
        )

    def json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def table(self) -> str:
        """For people: one column for each order and, of several, their mean."""
        columns = [_column(report) for report in self.orders]
        names = [f"order {number}" for number in range(1, len(columns) + 1)]
        rows = _merged(columns)
        lines = [("", *names)] + [(row, *(column.get(row, "0") for column in columns)) for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if not index else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (lines if len(columns) > 1 else lines[1:])
        ]
        if len(columns) > 1:
            text += ["", f"mean hit rate {_percent(self.hit_rate)}, from {_percent(self.hit_rate_min)}"]
            text[-1] += f" to {_percent(self.hit_rate_max)}"
        return "\n".join(text)


def count_gaps(counts: Counter[float], seconds: float, num_tokens: int) -> None:
    """So many tokens came this long after the one before."""
    counts[round(seconds, _GAP_DIGITS)] += num_tokens


def _column(report: Report) -> dict[str, str]:
    return {
        "hit rate": _percent(report.hit_rate),
        "prompt tokens": f"{report.prompt_tokens:,}",
        "  prefilled": f"{report.prefill_tokens:,}",
        "generated tokens": f"{report.generated_tokens:,}",
        "calls": f"{report.num_calls:,}",
        "  failed": f"{report.num_failed:,}",
        "  skipped, longer than the context": f"{report.num_skipped:,}",
        "  preempted": f"{report.num_preempted:,}",
        "checkpoints taken": f"{report.num_checkpoints:,}",
        "  restored": f"{report.num_restored:,}",
        **_evictions("pages evicted", report.evicted_pages),
        **_evictions("checkpoints evicted", report.evicted_states),
        "seconds: p50 / p90 / p99 / max": "",
        "  wait for a worker": _spread(report.wait_seconds),
        "  the same, first call of a session": _spread(report.first_wait_seconds),
        "  until the first token": _spread(report.first_token_seconds),
        "  between tokens": _spread(report.stall_seconds),
        "steps": f"{report.num_steps:,}",
        "simulated time": f"{report.simulated_seconds:,.0f} s",
        "real time": f"{report.real_seconds:.1f} s",
    }


def _merged(columns: Sequence[Mapping[str, str]]) -> list[str]:
    """The rows of all columns in their order: a cause that only one order has stands behind its title too."""
    rows: list[str] = []
    for column in columns:
        above = 0
        for row in column:
            if row not in rows:
                rows.insert(above, row)
            above = rows.index(row) + 1
    return rows


def _evictions(title: str, by_cause: Mapping[str, int]) -> dict[str, str]:
    rows = {title: f"{sum(by_cause.values()):,}"}
    return rows | {f"  {title[0]}. {cause}": f"{num:,}" for cause, num in by_cause.items()}


def _spread(spread: Spread) -> str:
    return f"{spread.p50:.2f} / {spread.p90:.2f} / {spread.p99:.2f} / {spread.max:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
