"""Every name a dashboard shows (the engines' own: engine_figures.py), with its help text: the documentation.

Owns its registry and bounds its series. Takes plain numbers: knows no messages and no HTTP.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from .derail_figures import DerailFigures
from .engine_figures import OTHER, EngineFigures, EngineSample
from .flow_figures import FlowFigures
from .quantiles import QUANTILES, Ring
from .store_figures import StoreFigures

MAX_ENGINES = 16
"""Engines that are shown: the living ones first; the rest have no series."""
MAX_PLACES = 32
"""(engine, worker) pairs with series of their own. A further one takes that of an engine that is not up, or
shares the label `other`."""
MAX_FAILURES = 20
"""Kinds of failure with a label of their own; later ones share `failed_other`."""
NOBODY = "none"
"""The label of what reached no engine, or no worker."""
BUCKET_RATIO = 1.2

_KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class TurnSample:
    """What one ended turn tells. Durations in seconds; computed tokens are prompt_tokens - cached_tokens.

    Waits begin where the call came in, so that every line it stood in counts.
    """

    reason: str  # stop, length, cancelled, or failed_<kind>
    worker: int | None = None  # None: never reached a worker
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float = 0.0  # call -> worker
    first_token_seconds: float | None = None  # call -> first token
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number measured per turn, shown as exact quantiles per worker and as a histogram of all turns."""

    name: str
    help: str
    lowest: float
    highest: float
    read: Callable[[TurnSample], float | None]  # None: this turn has no such number

    def buckets(self) -> list[float]:
        """Geometric upper borders from `lowest` to at least `highest`, to three digits."""
        steps = math.ceil(math.log(self.highest / self.lowest) / math.log(BUCKET_RATIO))
        return [float(f"{self.lowest * BUCKET_RATIO**step:.3g}") for step in range(steps + 1)]


def _prefill_rate(turn: TurnSample) -> float | None:
    computed = turn.prompt_tokens - turn.cached_tokens
    if turn.generated_tokens < 1 or computed < 1 or turn.prefill_seconds <= 0:
        return None
    return computed / turn.prefill_seconds


def _decode_rate(turn: TurnSample) -> float | None:
    if turn.generated_tokens < 2 or turn.decode_seconds <= 0:
        return None
    return (turn.generated_tokens - 1) / turn.decode_seconds


def _first_token(turn: TurnSample) -> float | None:
    return turn.first_token_seconds if turn.generated_tokens >= 1 else None


def _queue_wait(turn: TurnSample) -> float | None:
    return turn.queue_seconds


QUANTITIES = (
    Quantity(
        "prefill_tokens_per_second",
        "Prompt tokens computed (not from the cache) over the time from worker to first token",
        1.0,
        50_000.0,
        _prefill_rate,
    ),
    Quantity(
        "decode_tokens_per_second",
        "Generated tokens after the first over the time from first to last token",
        0.1,
        2_000.0,
        _decode_rate,
    ),
    Quantity(
        "time_to_first_token_seconds",
        "From the call's start at the gateway to its first token, waiting in both lines included",
        0.02,
        3_600.0,
        _first_token,
    ),
    Quantity(
        "queue_wait_seconds",
        "From the call's start at the gateway to its worker: the gateway's line and the engine's",
        0.005,
        3_600.0,
        _queue_wait,
    ),
)


class _Workers(Collector):
    """Exact quantiles of the last minutes for each worker, as summaries."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rings: dict[tuple[str, str, str], Ring] = {}

    def add(self, quantity: Quantity, place: tuple[str, str], value: float) -> None:
        ring = self._rings.setdefault((quantity.name, *place), Ring())
        ring.add(value, self._clock())

    def forget(self, place: tuple[str, str]) -> None:
        for quantity in QUANTITIES:
            self._rings.pop((quantity.name, *place), None)

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        for quantity in QUANTITIES:
            name = f"tetrarch_worker_{quantity.name}"
            family = SummaryMetricFamily(
                name, f"{quantity.help}; exact, last 15 minutes", labels=["engine", "worker"]
            )
            for (of, engine, worker), ring in self._rings.items():
                if of != quantity.name:
                    continue
                values = ring.quantiles(now) or (math.nan,) * len(QUANTILES)
                for fraction, value in zip(QUANTILES, values, strict=True):
                    labels = {"engine": engine, "worker": worker, "quantile": str(fraction)}
                    family.add_sample(name, labels, value)
                family.add_metric([engine, worker], ring.count, ring.total)
            yield family


class Instruments:
    """What the gateway counts, and the engines' figures beside it. One object per gateway, one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._places: dict[tuple[str, str], None] = {}  # the oldest first
        self._down: set[str] = set()  # engines that were not up at the last scrape
        self._failures: set[str] = set()
        self._workers = _Workers(clock)
        self._engines = EngineFigures()
        self.registry.register(self._workers)
        self.registry.register(self._engines)
        self.flow = FlowFigures(self.registry)
        self.derail = DerailFigures(self.registry)
        self.store = StoreFigures(self.registry)
        by_place = ["engine", "worker"]
        self._histograms = {
            quantity.name: Histogram(
                f"tetrarch_turn_{quantity.name}",
                quantity.help,
                by_place,
                buckets=quantity.buckets(),
                registry=self.registry,
            )
            for quantity in QUANTITIES
        }
        self._turns = self._counter("turns", "Ended turns by finish reason", [*by_place, "reason"])
        self._computed = self._counter(
            "turn_prompt_tokens_computed", "Prompt tokens of ended turns that were computed", by_place
        )
        self._cached = self._counter(
            "turn_prompt_tokens_cached", "Prompt tokens of ended turns that came from the cache", by_place
        )
        self._generated = self._counter("turn_tokens_generated", "Tokens generated by ended turns", by_place)
        self._by_place = (self._turns, self._computed, self._cached, self._generated)
        self._responses = self._counter("http_responses", "HTTP responses by status class", ["status"])
        self._refusals = self._counter("http_too_many_requests", "Calls refused with status 429", [])
        self._runs_live = self._gauge("gateway_runs_live", "Calls of this gateway that have not ended")
        self._runs_waiting = self._gauge(
            "gateway_runs_waiting", "Calls in this gateway's lines, not sent to an engine yet"
        )

    def observe_turn(self, engine_id: str, turn: TurnSample) -> None:
        """Count one ended turn; a number that it does not have (no token, no worker) is left out."""
        place = self._place(engine_id, turn.worker)
        self._turns.labels(*place, self._reason(turn.reason)).inc()
        if turn.worker is None:
            return
        self._computed.labels(*place).inc(max(0, turn.prompt_tokens - turn.cached_tokens))
        self._cached.labels(*place).inc(turn.cached_tokens)
        self._generated.labels(*place).inc(turn.generated_tokens)
        for quantity in QUANTITIES:
            value = quantity.read(turn)
            if value is not None:
                self._histograms[quantity.name].labels(*place).observe(value)
                self._workers.add(quantity, place, value)

    def observe_engines(self, samples: Mapping[str, EngineSample]) -> None:
        """Show these engines, by id, and no other; turns and workers of others are forgotten too."""
        living_first = sorted(samples, key=lambda engine: not samples[engine].is_up)
        self._engines.show({engine: samples[engine] for engine in living_first[:MAX_ENGINES]})
        self._down = {engine for engine, sample in samples.items() if not sample.is_up}
        for place in [place for place in self._places if place[0] not in (*samples, NOBODY)]:
            self._forget(place)

    def observe_runs(self, *, num_live: int, num_waiting: int) -> None:
        """Show how many calls the gateway has, and how many of them wait in its own lines."""
        self._runs_live.set(num_live)
        self._runs_waiting.set(num_waiting)

    def observe_response(self, status: int) -> None:
        """Count one HTTP response by its status code."""
        known = 100 <= status < 600
        self._responses.labels(f"{status // 100}xx" if known else OTHER).inc()
        if status == 429:
            self._refusals.inc()

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"tetrarch_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"tetrarch_{name}", text, registry=self.registry)

    def _place(self, engine_id: str, worker: int | None) -> tuple[str, str]:
        place = (engine_id, NOBODY if worker is None else str(worker))
        if place not in self._places and len(self._places) >= MAX_PLACES:
            down = next((place for place in self._places if place[0] in self._down), None)
            if down is None:
                return (OTHER, OTHER)
            self._forget(down)
        self._places[place] = None
        return place

    def _forget(self, place: tuple[str, str]) -> None:
        del self._places[place]
        self._workers.forget(place)
        for metric in (*self._by_place, *self._histograms.values()):
            metric.remove_by_labels({"engine": place[0], "worker": place[1]})

    def _reason(self, reason: str) -> str:
        if not reason.startswith("failed_"):
            return reason if reason in ("stop", "length", "derailed", "cancelled") else OTHER
        known = reason in self._failures
        if not known and (len(self._failures) >= MAX_FAILURES or not _KIND.fullmatch(reason)):
            return "failed_other"
        self._failures.add(reason)
        return reason
