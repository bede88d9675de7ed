"""The engine's share of EngineStats: totals, and how turns, pages and speed stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.cache import CacheStats

from .pace import Pace


@dataclass(slots=True)
class Counters:
    """Totals since the engine's incarnation began."""

    num_steps: int = 0
    prompt_tokens_computed: int = 0  # rows of prefills, those of resumed turns included
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    num_preempted: int = 0
    num_restored: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)  # by cause
    num_derailed: dict[str, int] = field(default_factory=dict)  # by kind
    num_evicted_before: int = 0  # pages that the cache, which outlives an incarnation, had given up by then
    num_evicted_states_before: int = 0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Named as in EngineStats."""

    num_running: int
    num_waiting: int
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
    num_free_states: int
    num_free_small_states: int
    num_checkpoints: int
    num_restored: int
    num_evicted_states: int
    num_pinned_pages: int
    missed_tokens: dict[str, int]
    num_derailed: dict[str, int]
    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    @staticmethod
    def of(
        pages: CacheStats, counters: Counters, pace: Pace, num_running: int, num_waiting: int
    ) -> EngineCounts:
        """Gather them."""
        return EngineCounts(
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_pages=pages.num_free,
            num_tree_pages=pages.num_tree,
            num_live_pages=pages.num_live,
            num_tree_nodes=pages.num_nodes,
            num_evicted_pages=pages.num_evicted - counters.num_evicted_before,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            generated_tokens=counters.generated_tokens,
            num_steps=counters.num_steps,
            num_preempted=counters.num_preempted,
            num_free_states=pages.num_free_states,
            num_free_small_states=pages.num_free_small_states,
            num_checkpoints=pages.num_checkpoints,
            num_restored=counters.num_restored,
            num_evicted_states=pages.num_states_evicted - counters.num_evicted_states_before,
            num_pinned_pages=pages.num_pinned_pages,
            missed_tokens=dict(counters.missed_tokens),
            num_derailed=dict(counters.num_derailed),
            prefill_tokens_per_second=pace.prefill_tokens_per_second,
            decode_tokens_per_second=pace.decode_tokens_per_second,
        )
