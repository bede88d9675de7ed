"""What the scheduler's own Python costs in a decode step: four workers at 128k tokens beside a warm tree.

    python -m bench.scheduler_cost

No model runs and no MLX is imported: a runner that samples the same token at once stands for it, the real
engine, scheduler and cache do all else. Exit code 1 when the median is 0.3 ms or more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer, models

from kvcache.cache import Cache
from workers.engine import Engine
from workers.messages import Sampling, Submit
from workers.pace import PaceLimits
from workers.plan import SegmentResult, StepPlan, StepResult
from workers.text import Detokenizer
from workers.turn import TurnRules

NUM_WORKERS = 4
NUM_SESSIONS = 36
SESSION_TOKENS = 65_536
CONTEXT_TOKENS = 131_072
VOCABULARY = 1_000
DECODE_STEPS = 2_000
GOAL_SECONDS = 0.3e-3


class InstantRunner:
    """Samples token 1 wherever that is asked, and counts the seconds between its steps: the scheduler's."""

    def __init__(self) -> None:
        self.between: list[float] = []
        self.num_rows: list[int] = []
        self._ended_at: float | None = None

    def run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        if self._ended_at is not None:
            self.between.append(started - self._ended_at)
            self.num_rows.append(plan.num_rows)
        results = tuple(SegmentResult((1,) if segment.row else ()) for segment in plan.segments)
        self._ended_at = time.perf_counter()
        return StepResult(results, 0.02)

    def rebuild(self) -> None:
        raise AssertionError("no step fails here")


class SkippingClock:
    """Real seconds, and those that nobody waits for: agents are held for room in the pool for minutes."""

    def __init__(self) -> None:
        self._num_skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._num_skipped

    def skip(self, seconds: float) -> None:
        self._num_skipped += seconds


def run(engine: Engine, clock: SkippingClock) -> None:
    """Until nothing is left."""
    while engine.has_work:
        clock.skip(engine.rest_seconds)
        engine.step()


def make_engine(runner: InstantRunner, clock: SkippingClock, *, is_hybrid: bool) -> Engine:
    """An engine whose pool holds all sessions and the running contexts."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    rules = TurnRules(
        detokenizer=Detokenizer(words),
        namespace=b"bench",
        context_length=CONTEXT_TOKENS + DECODE_STEPS,
        vocab_size=VOCABULARY,
        eos_token_ids=frozenset({0}),
    )
    num_tokens = NUM_SESSIONS * SESSION_TOKENS + 2 * NUM_WORKERS * (CONTEXT_TOKENS + DECODE_STEPS)
    cache = Cache(num_tokens // 64, num_states=64 if is_hybrid else None)
    limits = PaceLimits(min_rows=2048, min_idle_rows=2048)
    return Engine(runner, cache, rules, num_workers=NUM_WORKERS, limits=limits, clock=clock)


def call(name: str, num_tokens: int, max_tokens: int, source: random.Random) -> Submit:
    """An agent's turn over tokens of its own."""
    prompt = array("I", (source.randrange(2, VOCABULARY) for _ in range(num_tokens)))
    return Submit(
        run_id=name,
        attempt=1,
        incarnation=1,
        digest="",
        token_ids=prompt.tobytes(),
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        agent=name,
        session=name,
    )


def measure(*, is_hybrid: bool) -> list[float]:
    """Seconds of the scheduler's own in each pure decode step of four workers, ascending."""
    source = random.Random(3)
    runner = InstantRunner()
    clock = SkippingClock()
    engine = make_engine(runner, clock, is_hybrid=is_hybrid)
    for number in range(NUM_SESSIONS):
        engine.submit(call(f"session {number}", SESSION_TOKENS - 64, 8, source))
        run(engine, clock)
    clock.skip(600.0)  # the sessions' prefixes stay, but nobody is held for their sake
    for number in range(NUM_WORKERS):
        engine.submit(call(f"worker {number}", CONTEXT_TOKENS - 64, DECODE_STEPS, source))
    first = len(runner.between)
    run(engine, clock)
    steps = zip(runner.between[first:], runner.num_rows[first:], strict=True)
    return sorted(seconds for seconds, num_rows in steps if num_rows == NUM_WORKERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    is_met = True
    for name, is_hybrid in (("dense", False), ("hybrid", True)):
        seconds = measure(is_hybrid=is_hybrid)
        median, late = statistics.median(seconds), seconds[int(0.99 * len(seconds))]
        print(f"{name:<7} {len(seconds):,} steps: median {1e3 * median:.3f} ms, p99 {1e3 * late:.3f} ms")
        is_met &= median < GOAL_SECONDS
    print(f"goal: {1e3 * GOAL_SECONDS:.1f} ms, {'met' if is_met else 'missed'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
