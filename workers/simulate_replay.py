"""Replays a trace through the engine that serves: the real scheduler and cache, on a described device.

Knows turns only as the bus does, by messages; the engine's own account is checked as the replay goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer, models

from kvcache.cache import Cache, CacheStats
from kvcache.settings import PAGE_TOKENS

from .engine import Engine
from .errors import IntegrityError
from .line import LineRules
from .messages import Finished, Sampling, Submit, Tokens, TurnEnd
from .pace import PaceLimits
from .simulate_device import NUM_TOKEN_IDS, Device, FreshTokens, SimulatedClock, SimulatedRunner
from .simulate_report import Report, Spread, count_gaps
from .simulate_sessions import Arrival, ClosedLoop
from .simulate_trace import Prompts, Trace
from .text import Detokenizer
from .turn import TurnEvent, TurnRules

GPU_LIMITS = PaceLimits(step_seconds=0.3)
CALLS_BETWEEN_FULL_CHECKS = 100
_HELD_TICK_SECONDS = 1.0
"""Nothing can run and something waits: the scheduler is asked again after this long at least."""
_STUCK_SECONDS = 24 * 3600.0
_LONGEST_PIN_SECONDS = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine has and how many sessions share it."""

    num_agents: int
    pool_tokens: int
    num_states: int  # checkpoints; 0: the model has no recurrent layers
    num_workers: int
    context_tokens: int


class SilentText(Detokenizer):
    """Every token is special, so that no turn has text: there is nobody to read it."""

    def __init__(self) -> None:
        super().__init__(Tokenizer(models.BPE(vocab={}, merges=[])))

    def is_special(self, token_id: int) -> bool:
        return True


@dataclass(slots=True)
class _Open:
    """A call that has not ended."""

    arrival: Arrival
    last_token_at: float | None = None


@dataclass(slots=True)
class _Tally:
    """Sums over the calls that ended."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_calls: int = 0
    num_failed: int = 0
    waits: list[float] = field(default_factory=list)
    first_waits: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)


class Replay:
    """One order of a trace's sessions on one engine."""

    def __init__(
        self, trace: Trace, capacity: Capacity, device: Device, seed: int, rules: LineRules | None = None
    ) -> None:
        kept = trace.within(capacity.context_tokens)
        self._num_skipped = trace.num_calls - kept.num_calls
        self._clock = SimulatedClock()
        self._loop = ClosedLoop(kept, capacity.num_agents, seed)
        self._prompts = Prompts()
        tokens = FreshTokens()
        self._runner = SimulatedRunner(device, self._clock, tokens, PAGE_TOKENS)
        self.cache = Cache(capacity.pool_tokens // PAGE_TOKENS, num_states=capacity.num_states or None)
        self.engine = Engine(
            self._runner,
            self.cache,
            _rules(capacity.context_tokens),
            num_workers=capacity.num_workers,
            limits=GPU_LIMITS,
            line=rules,
            drafter=tokens,
            clock=self._clock,
        )
        self._open: dict[str, _Open] = {}
        self._tally = _Tally()
        self._num_submitted = 0
        self._last_step_at = 0.0

    def run(self, *, check_in_full: bool = False, tell: Callable[[int], None] | None = None) -> Report:
        """Until all sessions have ended; `tell` hears now and then how many calls have.

        Raises IntegrityError when something does not add up or leaks.
        """
        started = time.perf_counter()
        num_checked = 0
        while self._advance():
            if self._tally.num_calls > num_checked:
                num_checked = self._tally.num_calls
                is_due = not num_checked % CALLS_BETWEEN_FULL_CHECKS
                self._check(in_full=check_in_full or is_due)
                if tell is not None and is_due:
                    tell(num_checked)
        simulated_seconds, stats = self._clock.now, self.cache.stats()
        self._check_leaks()
        return self._report(stats, simulated_seconds, time.perf_counter() - started)

    def _advance(self) -> bool:
        """To the next event; False at the end."""
        for arrival in self._loop.take_due(self._clock.now):
            self._submit(arrival)
        if self.engine.has_work:
            self._step()
        elif self._loop.next_seconds is not None:
            self._clock.now = self._loop.next_seconds
        else:
            return False
        return True

    def _submit(self, arrival: Arrival) -> None:
        call = arrival.call
        self._num_submitted += 1
        run_id = f"call {self._num_submitted}"
        self._open[run_id] = _Open(arrival)
        self.engine.submit(
            Submit(
                run_id=run_id,
                attempt=1,
                incarnation=1,
                digest="",
                token_ids=self._prompts.of(call),
                max_tokens=call.output_tokens,
                sampling=Sampling(temperature=0.0),
                ignore_eos=True,
                agent=call.agent,
                session=call.session,
                parent=call.parent,
                expects="tool" if call.waits_for_tool else "",
                is_final=call.is_final,
                turn_tokens=call.repeatable_tokens,
            )
        )

    def _step(self) -> None:
        before, num_steps = self._clock.now, self._runner.num_steps
        self._clock.next_arrival = self._loop.next_seconds
        self._take(self.engine.step(), before)
        if self._runner.num_steps == num_steps and self.engine.has_work:
            self._hold()
        else:
            self._last_step_at = self._clock.now

    def _hold(self) -> None:
        """Something waits and nothing can run: time passes until the scheduler may think otherwise."""
        until = self._clock.now + max(self.engine.rest_seconds, _HELD_TICK_SECONDS)
        if self._loop.next_seconds is not None:
            until = min(until, self._loop.next_seconds)
        self._clock.now = until
        if until - self._last_step_at > _STUCK_SECONDS:
            raise IntegrityError(f"{len(self._open)} calls wait and nothing has run for a day")

    def _take(self, events: list[TurnEvent], before: float) -> None:
        """Events of one step that began at `before`."""
        arrived: Counter[str] = Counter()
        for event in events:
            if isinstance(event.event, Tokens):
                arrived[event.run_id] += len(event.event.token_ids) // 4
        most = max(arrived.values(), default=0)
        for run_id, num_tokens in arrived.items():
            self._take_tokens(self._open[run_id], num_tokens, (self._clock.now - before) / most)
        for event in events:
            if isinstance(event.event, TurnEnd):
                self._end(self._open.pop(event.run_id), event.event)

    def _take_tokens(self, call: _Open, num_tokens: int, pass_seconds: float) -> None:
        gaps = self._tally.gaps
        if call.last_token_at is not None:
            first_at = self._clock.now - (num_tokens - 1) * pass_seconds
            count_gaps(gaps, first_at - call.last_token_at, 1)
        else:
            self._tally.first_tokens.append(self._clock.now - call.arrival.seconds)
        if num_tokens > 1:
            count_gaps(gaps, pass_seconds, num_tokens - 1)
        call.last_token_at = self._clock.now

    def _end(self, open_call: _Open, end: TurnEnd) -> None:
        tally, arrival = self._tally, open_call.arrival
        tally.num_calls += 1
        tally.num_failed += not isinstance(end, Finished)
        tally.prompt_tokens += arrival.call.prompt_tokens
        tally.cached_tokens += end.usage.cached_tokens
        tally.waits.append(end.timings.queue_seconds)
        if arrival.is_first:
            tally.first_waits.append(end.timings.queue_seconds)
        self._loop.ended(arrival.call, self._clock.now)

    def _check(self, *, in_full: bool) -> None:
        self.cache.check_counts()
        if in_full:
            self.engine.check_integrity()

    def _check_leaks(self) -> None:
        """Once every pin has run out nothing but the tree may hold a page, and it lets go of all."""
        self._clock.now += _LONGEST_PIN_SECONDS
        self.engine.step()
        self.engine.check_integrity()
        pinned = self.cache.stats().num_pinned_pages
        if pinned:
            raise IntegrityError(f"{pinned} pages are pinned and nobody is left to come back for them")
        self.cache.clear()
        self.engine.check_integrity()
        stats = self.cache.stats()
        if stats.num_free != stats.num_pages:
            raise IntegrityError(f"{stats.num_pages - stats.num_free} of {stats.num_pages} pages leaked")
        if stats.num_free_states != stats.num_states:
            raise IntegrityError(f"{stats.num_states - stats.num_free_states} rows of states leaked")

    def _report(self, stats: CacheStats, simulated_seconds: float, real_seconds: float) -> Report:
        tally, counts = self._tally, self.engine.stats()
        return Report(
            hit_rate=round(max(0.0, 1 - counts.prompt_tokens_computed / max(tally.prompt_tokens, 1)), 6),
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            prefill_tokens=counts.prompt_tokens_computed,
            generated_tokens=counts.generated_tokens,
            num_calls=tally.num_calls,
            num_failed=tally.num_failed,
            num_skipped=self._num_skipped,
            num_preempted=counts.num_preempted,
            num_checkpoints=self._runner.num_saved,
            num_restored=self._runner.num_restored,
            evicted_pages=_evicted_pages(stats),
            evicted_states=_evicted_states(stats),
            wait_seconds=Spread.of(tally.waits),
            first_wait_seconds=Spread.of(tally.first_waits),
            first_token_seconds=Spread.of(tally.first_tokens),
            stall_seconds=Spread.of_counts(tally.gaps),
            num_steps=counts.num_steps,
            simulated_seconds=round(simulated_seconds, 1),
            real_seconds=round(real_seconds, 2),
        )


def _evicted_pages(stats: CacheStats) -> dict[str, int]:
    return {
        "of agents that are gone": stats.num_evicted_retired,
        "without a checkpoint": stats.num_evicted_bare,
        "used longest ago": stats.num_evicted_aged,
        "with their checkpoint": stats.num_evicted_tails,
    }


def _evicted_states(stats: CacheStats) -> dict[str, int]:
    return {
        "superseded": stats.num_states_superseded,
        "of agents that are gone": stats.num_states_retired,
        "used longest ago": stats.num_states_aged,
        "with their pages": stats.num_states_lost,
    }


def _rules(context_tokens: int) -> TurnRules:
    return TurnRules(
        detokenizer=SilentText(),
        namespace=b"simulation",
        context_length=context_tokens,
        vocab_size=NUM_TOKEN_IDS,
        eos_token_ids=frozenset(),
    )
