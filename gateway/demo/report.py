"""The demo's figures: read from /metrics and the calls, judged, shown as a table and as JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

NUM_WORKERS = 4
MIN_CACHED_SHARE = 0.75

_QUANTILES = {"0.1": "p10", "0.5": "p50", "0.9": "p90"}


@dataclass(frozen=True, slots=True)
class CallResult:
    """One sub-agent call as its caller saw it. Seconds count from sending it."""

    agent: str
    round: int
    answer: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_seconds: float | None = None
    seconds: float = 0.0
    finish_reason: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Three quantiles of one worker's calls."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker over the session, as the gateway's metrics tell. None: no call had such a number."""

    worker: str
    calls: int
    prefill_tokens_per_second: Spread | None
    decode_tokens_per_second: Spread | None
    time_to_first_token_seconds: Spread | None


@dataclass(frozen=True, slots=True)
class KV:
    """The KV cache as measured on the live pools."""

    dtype: str
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Report:
    """What build/demo.json holds."""

    model: str
    calls: int
    errors: tuple[str, ...]
    workers: tuple[WorkerFigures, ...]
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    generated_tokens: int
    kv: KV
    start_seconds: float
    wall_seconds: float


def report(
    model: str,
    results: Sequence[CallResult],
    metrics: str,
    kv: KV,
    *,
    start_seconds: float,
    wall_seconds: float,
) -> Report:
    """Everything together; `metrics` is the text of /metrics after the last call."""
    prompt_tokens = sum(result.prompt_tokens for result in results)
    cached_tokens = sum(result.cached_tokens for result in results)
    return Report(
        model=model,
        calls=len(results),
        errors=tuple(f"{r.agent}, round {r.round}: {r.error}" for r in results if r.error is not None),
        workers=read_workers(metrics),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        cached_share=round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
        generated_tokens=sum(result.generated_tokens for result in results),
        kv=kv,
        start_seconds=round(start_seconds, 2),
        wall_seconds=round(wall_seconds, 2),
    )


def read_workers(metrics: str) -> tuple[WorkerFigures, ...]:
    """Each worker's calls and quantiles out of the text of /metrics."""
    calls: Counter[str] = Counter()
    quantiles: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            worker, quantile = sample.labels.get("worker", ""), sample.labels.get("quantile", "")
            if sample.name == "tetrarch_turns_total" and worker.isdigit():
                calls[worker] += int(sample.value)
            elif quantile in _QUANTILES and sample.value == sample.value:  # NaN: nothing measured
                quantity = sample.name.removeprefix("tetrarch_worker_")
                quantiles.setdefault((worker, quantity), {})[_QUANTILES[quantile]] = round(sample.value, 4)

    def spread(worker: str, quantity: str) -> Spread | None:
        values = quantiles.get((worker, quantity), {})
        return Spread(**values) if len(values) == len(_QUANTILES) else None

    return tuple(
        WorkerFigures(
            worker=worker,
            calls=calls[worker],
            prefill_tokens_per_second=spread(worker, "prefill_tokens_per_second"),
            decode_tokens_per_second=spread(worker, "decode_tokens_per_second"),
            time_to_first_token_seconds=spread(worker, "time_to_first_token_seconds"),
        )
        for worker in sorted(calls, key=int)
    )


def complaints(figures: Report) -> Iterator[str]:
    """What the session failed to show; nothing when it showed all."""
    yield from figures.errors
    busy = sum(worker.calls > 0 for worker in figures.workers)
    if busy < NUM_WORKERS:
        yield f"{busy} of {NUM_WORKERS} workers served calls"
    unmeasured = [w.worker for w in figures.workers if w.decode_tokens_per_second is None]
    if unmeasured:
        yield f"no decode speed was measured for worker {', '.join(unmeasured)}"
    if figures.cached_share < MIN_CACHED_SHARE:
        yield f"{figures.cached_share:.1%} of prompt tokens came from the cache, under {MIN_CACHED_SHARE:.0%}"
    if not figures.kv.dtype or figures.kv.bytes_per_token <= 0:
        yield "/health reports no KV dtype and bytes per token"


def table(figures: Report) -> str:
    """The figures for a person: a line per worker, then the sums."""
    rows = [
        ("worker", "calls", "prefill tok/s", "decode tok/s", "first token s"),
        ("", "", "p10 / p50 / p90", "p10 / p50 / p90", "p10 / p50 / p90"),
        *(
            (
                worker.worker,
                str(worker.calls),
                _three(worker.prefill_tokens_per_second, 0),
                _three(worker.decode_tokens_per_second, 1),
                _three(worker.time_to_first_token_seconds, 2),
            )
            for worker in figures.workers
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(2, "-" * len(lines[0]))
    lines += ["", *_sums(figures)]
    return "\n".join(lines)


def _sums(figures: Report) -> Iterator[str]:
    rate = figures.generated_tokens / figures.wall_seconds if figures.wall_seconds else 0.0
    yield f"model           {figures.model}"
    yield (
        f"prompt tokens   {figures.prompt_tokens:,}, of these {figures.cached_tokens:,} "
        f"({figures.cached_share:.1%}) from the cache"
    )
    kv = figures.kv
    yield f"KV cache        {kv.bytes_per_token:,.0f} bytes per token ({kv.dtype}), as measured"
    yield f"generated       {figures.generated_tokens:,} tokens, {rate:.1f} tok/s in all"
    yield (
        f"wall time       {figures.wall_seconds:.1f} s for {figures.calls} calls, "
        f"after {figures.start_seconds:.1f} s to start"
    )


def _three(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{value:.{digits}f}" for value in (spread.p10, spread.p50, spread.p90))
