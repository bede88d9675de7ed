"""The engines' own figures as series: gauges, counters that go on over restarts, misses by their cause.

Takes plain numbers: knows no messages and no turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

OTHER = "other"


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What one engine last said about itself; counters grow over one incarnation."""

    incarnation: int
    is_up: bool
    is_ready: bool
    num_workers: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_tree_pages: int
    num_live_pages: int
    num_tree_nodes: int
    num_evicted_pages: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    generated_tokens: int
    num_steps: int
    num_preempted: int
    step_age_seconds: float
    active_memory_bytes: int
    peak_memory_bytes: int
    kv_bytes_per_token: float
    kv_pool_bytes: int
    num_pinned_pages: int
    num_states: int
    num_free_states: int
    num_small_states: int
    num_free_small_states: int
    num_checkpoints: int
    num_restored: int
    num_evicted_states: int
    state_bytes: int
    missed_tokens: Mapping[str, int]  # by cause
    num_derailed: Mapping[str, int]  # by kind


GAUGES: tuple[tuple[str, str, Callable[[EngineSample], float]], ...] = (
    ("engine_up", "1 while the engine's lease is alive", lambda e: e.is_up),
    ("engine_ready", "1 while the engine takes turns and no step is stuck", lambda e: e.is_ready),
    ("engine_workers", "Streams that the engine runs at once", lambda e: e.num_workers),
    ("engine_turns_running", "Turns that have a worker", lambda e: e.num_running),
    ("engine_turns_waiting", "Turns in the engine that wait for a worker", lambda e: e.num_waiting),
    ("engine_pages", "Pages of the KV pool in all", lambda e: e.num_pages),
    ("engine_pages_free", "Pages that nobody holds", lambda e: e.num_free_pages),
    ("engine_pages_tree", "Pages kept by the tree of prefixes", lambda e: e.num_tree_pages),
    ("engine_pages_live", "Pages owned by running turns", lambda e: e.num_live_pages),
    ("engine_tree_nodes", "Nodes of the tree of prefixes", lambda e: e.num_tree_nodes),
    ("engine_step_age_seconds", "Age of the step in flight, 0 when idle", lambda e: e.step_age_seconds),
    ("engine_memory_active_bytes", "Memory that MLX holds now", lambda e: e.active_memory_bytes),
    ("engine_memory_peak_bytes", "Most memory that MLX held", lambda e: e.peak_memory_bytes),
    (
        "engine_kv_bytes_per_token",
        "KV bytes per token, as measured",
        lambda e: e.kv_bytes_per_token,
    ),
    ("engine_kv_pool_bytes", "KV pool bytes, as measured", lambda e: e.kv_pool_bytes),
    ("engine_pages_pinned", "Pages that pins keep from eviction", lambda e: e.num_pinned_pages),
    ("engine_states", "Exact rows for checkpoints of recurrent states in all", lambda e: e.num_states),
    ("engine_states_free", "Exact rows for checkpoints that nobody holds", lambda e: e.num_free_states),
    ("engine_states_small", "Rows for checkpoints in 8 bits in all", lambda e: e.num_small_states),
    (
        "engine_states_small_free",
        "Rows for checkpoints in 8 bits that nobody holds",
        lambda e: e.num_free_small_states,
    ),
    ("engine_checkpoints", "Checkpoints kept in the tree of prefixes", lambda e: e.num_checkpoints),
    ("engine_state_bytes", "Bytes of recurrent states, as measured", lambda e: e.state_bytes),
)

COUNTERS: tuple[tuple[str, str, Callable[[EngineSample], float]], ...] = (
    ("engine_pages_evicted", "Pages that the tree gave up", lambda e: e.num_evicted_pages),
    (
        "engine_prompt_tokens_computed",
        "Prompt tokens computed, while it happens",
        lambda e: e.prompt_tokens_computed,
    ),
    (
        "engine_prompt_tokens_cached",
        "Prompt tokens from the cache, while it happens",
        lambda e: e.prompt_tokens_cached,
    ),
    ("engine_tokens_generated", "Tokens generated, while it happens", lambda e: e.generated_tokens),
    ("engine_steps", "Passes over the model", lambda e: e.num_steps),
    (
        "engine_turns_preempted",
        "Turns that gave their pages back to older ones and waited again",
        lambda e: e.num_preempted,
    ),
    (
        "engine_turns_restored",
        "Turns that went on from a checkpoint of recurrent states",
        lambda e: e.num_restored,
    ),
    ("engine_states_evicted", "Checkpoints that the tree gave up", lambda e: e.num_evicted_states),
)

MISS_CAUSES = ("diverged", "evicted", "never_published", "other_namespace", OTHER)
"""Why tokens were computed again that an earlier turn of the same agent had."""

DERAIL_KINDS = ("token_cycle", "tool_flood", OTHER)
"""How an engine saw turns go astray."""


def _missed(cause: str, sample: EngineSample) -> float:
    return _counted_as(cause, sample.missed_tokens, MISS_CAUSES)


def _derailed(kind: str, sample: EngineSample) -> float:
    return _counted_as(kind, sample.num_derailed, DERAIL_KINDS)


def _counted_as(name: str, counts: Mapping[str, int], names: tuple[str, ...]) -> float:
    if name == OTHER:
        return sum(count for found, count in counts.items() if found not in names)
    return counts.get(name, 0)


_COUNTED: tuple[Callable[[EngineSample], float], ...] = (
    *(read for _, _, read in COUNTERS),
    *(partial(_missed, cause) for cause in MISS_CAUSES),
    *(partial(_derailed, kind) for kind in DERAIL_KINDS),
)
"""All that grows over an incarnation: COUNTERS, the causes of misses, then the kinds of derailments."""


class EngineFigures(Collector):
    """The engines' own words, as they were at this scrape; an engine that is not shown has no series.

    Counters go on over an engine's incarnations: what was last seen of the earlier ones is added.
    """

    def __init__(self) -> None:
        self._samples: dict[str, EngineSample] = {}
        self._earlier: dict[str, list[float]] = {}  # engine -> of its earlier incarnations, as in _COUNTED

    def show(self, samples: dict[str, EngineSample]) -> None:
        self._earlier = {engine: self._counted_before(engine, sample) for engine, sample in samples.items()}
        self._samples = samples

    def _counted_before(self, engine: str, sample: EngineSample) -> list[float]:
        earlier = self._earlier.get(engine, [0.0] * len(_COUNTED))
        last = self._samples.get(engine)
        if last is None or last.incarnation == sample.incarnation:
            return earlier
        return [total + read(last) for total, read in zip(earlier, _COUNTED, strict=True)]

    def collect(self) -> Iterator[Metric]:
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(f"tetrarch_{name}", text, labels=["engine"])
            for engine, sample in self._samples.items():
                gauge.add_metric([engine], read(sample))
            yield gauge
        for index, (name, text, read) in enumerate(COUNTERS):
            counter = CounterMetricFamily(f"tetrarch_{name}", text, labels=["engine"])
            for engine, sample in self._samples.items():
                counter.add_metric([engine], self._earlier[engine][index] + read(sample))
            yield counter
        yield self._misses()
        yield self._derailments()

    def _misses(self) -> Metric:
        text = "Prompt tokens computed again though an earlier turn of the same agent had them, by cause"
        counter = CounterMetricFamily("tetrarch_missed_tokens", text, labels=["engine", "cause"])
        for engine, sample in self._samples.items():
            for index, cause in enumerate(MISS_CAUSES, len(COUNTERS)):
                counter.add_metric([engine, cause], self._earlier[engine][index] + _missed(cause, sample))
        return counter

    def _derailments(self) -> Metric:
        text = "Turns that were seen to go astray, by kind"
        counter = CounterMetricFamily("tetrarch_engine_turns_derailed", text, labels=["engine", "kind"])
        for engine, sample in self._samples.items():
            for index, kind in enumerate(DERAIL_KINDS, len(COUNTERS) + len(MISS_CAUSES)):
                counter.add_metric([engine, kind], self._earlier[engine][index] + _derailed(kind, sample))
        return counter
