"""Four streams at great depth on a small random hybrid: is a step's time bound by the bytes it reads?

    python -m bench.depth                     decode steps and a prefill chunk at 16k to 131k filled tokens
    python -m bench.depth --prefill 131072    one real prefill of that many tokens, chunk by chunk
    python -m bench.depth --beside 16384      a real prefill beside three decoding workers: their longest gap

Runs the model runner itself, without a gateway: the figures are ratios between depths of one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from workers.machine import load_blas

load_blas()  # before anything that imports MLX

import mlx.core as mx  # noqa: E402

from kvcache.cache import Cache  # noqa: E402
from kvcache.pages import Pools  # noqa: E402
from kvcache.settings import PAGE_TOKENS, KVCacheSettings  # noqa: E402
from kvcache.states import States  # noqa: E402
from tests.models import make_model  # noqa: E402
from workers.engine import Engine  # noqa: E402
from workers.messages import Sampling, Submit, Tokens  # noqa: E402
from workers.model import Loaded, load  # noqa: E402
from workers.pace import PaceLimits  # noqa: E402
from workers.plan import RowSampling, Segment, StateRestore, StepPlan  # noqa: E402
from workers.process import CPU_STEP_SECONDS, rules_of  # noqa: E402
from workers.settings import EngineSettings  # noqa: E402

NUM_STREAMS = 4
DEPTHS = (16_384, 32_768, 65_536, 131_072)
DECODE_STEPS = 32
CHUNK_ROWS = 256
_FILL_TOKENS = 4_096  # written at a time
_GREEDY = RowSampling(Sampling(temperature=0), 1, 0, (), ())


def load_hybrid(folder: Path, pool_tokens: int) -> Loaded:
    """A random qwen3_next of three recurrent layers and one of attention, int8 KV."""
    make_model(folder, "qwen3_next", max_position_embeddings=2 * DEPTHS[-1])
    return load(
        EngineSettings(
            model=str(folder),
            workers=NUM_STREAMS,
            context=pool_tokens // NUM_STREAMS,
            kvcache=KVCacheSettings(bits="8", pool_tokens=pool_tokens, states=NUM_STREAMS),
        )
    )


def tables(depth: int) -> list[range]:
    """Page tables of the streams, with room for a chunk after `depth` tokens."""
    num_pages = (depth + CHUNK_ROWS) // PAGE_TOKENS
    return [range(stream * num_pages, (stream + 1) * num_pages) for stream in range(NUM_STREAMS)]


def fill(pools: Pools, states: States, depth: int) -> None:
    """Random rows below `depth` in every stream's pages, and random live states."""
    for table in tables(depth):
        for start in range(0, depth, _FILL_TOKENS):
            shape = (_FILL_TOKENS, pools.num_kv_heads, pools.row.head_dim)
            places = pools.places_of(table, range(start, start + _FILL_TOKENS))
            for layer in range(len(pools.arrays())):
                pools.write(layer, places, mx.random.normal(shape), mx.random.normal(shape))
            mx.eval(*pools.arrays())
    workers = mx.arange(NUM_STREAMS)
    for layer in range(states.layout.num_layers):
        matrices, windows = states.read(layer, workers)
        states.write(layer, workers, 0.1 * mx.random.normal(matrices.shape), mx.random.normal(windows.shape))
    mx.eval(*states.arrays())


def bytes_read(loaded: Loaded, depth: int) -> float:
    """By a decode step: weights once, and of each stream its pages and, to read and to write, its state."""
    assert loaded.states is not None
    weights = next(item.num_bytes for item in loaded.ledger.items if item.name == "weights")
    per_stream = depth * loaded.kv.bytes_per_token + 2 * loaded.states.bytes_per_state
    return weights + NUM_STREAMS * per_stream


def seconds_at(loaded: Loaded, depth: int) -> tuple[float, float]:
    """Median seconds of a decode step of all streams, and of one chunk beside three decoding streams."""
    runner = loaded.runner
    assert runner.states is not None
    fill(runner.pools, runner.states, depth)
    pages = tables(depth)

    def decoding(streams: Sequence[int]) -> Iterator[Segment]:
        return (Segment(stream, depth + 1, [stream + 1], pages[stream], _GREEDY) for stream in streams)

    steps = [
        runner.run(StepPlan((), tuple(decoding(range(NUM_STREAMS))))).seconds for _ in range(DECODE_STEPS)
    ]
    chunk = Segment(NUM_STREAMS - 1, depth, [7] * CHUNK_ROWS, pages[-1], None)
    mixed = [runner.run(StepPlan((), (*decoding(range(NUM_STREAMS - 1)), chunk))).seconds for _ in range(3)]
    return statistics.median(steps), statistics.median(mixed)


def compare_depths(folder: Path) -> int:
    """Prints each depth against the one before it; 1 when time grows faster than the bytes."""
    loaded = load_hybrid(folder, NUM_STREAMS * (DEPTHS[-1] + CHUNK_ROWS))
    print(f"{loaded.kv.bytes_per_token:,.0f} B of {loaded.kv.dtype} KV a token")
    print(f"{'depth':>8} {'bytes':>14} {'step ms':>9} {'chunk ms':>9} {'time/bytes growth':>18}")
    before: tuple[float, float] | None = None
    is_bound = True
    for depth in DEPTHS:
        step, chunk = seconds_at(loaded, depth)
        size = bytes_read(loaded, depth)
        growth = (step / before[0]) / (size / before[1]) if before else 0.0
        is_bound &= growth <= 1.1
        print(
            f"{depth:>8,} {size:>14,.0f} {1e3 * step:>9.1f} {1e3 * chunk:>9.1f} {growth:>18.2f}", flush=True
        )
        before = step, size
    return 0 if is_bound else 1


def prefill(folder: Path, num_tokens: int, num_rows: int) -> int:
    """One real prefill, its rate by depth, and its peak memory against the ledger's."""
    loaded = load_hybrid(folder, NUM_STREAMS * (num_tokens + CHUNK_ROWS))
    table = tables(num_tokens)[0]
    mx.reset_peak_memory()
    started = time.perf_counter()
    for start in range(0, num_tokens, num_rows):
        ids = [(position * 7919) % 251 for position in range(start, min(start + num_rows, num_tokens))]
        restores = () if start else (StateRestore(0, None),)
        step = loaded.runner.run(StepPlan((), (Segment(0, start, ids, table, None),), restores=restores))
        if start % 16_384 == 0:
            rate = len(ids) / step.seconds
            print(f"{start:>8,} tokens: {rate:>7,.0f} tok/s", flush=True)
    seconds = time.perf_counter() - started
    predicted = sum(
        i.num_bytes for i in loaded.ledger.items if i.name in ("weights", "pages", "states", "scratch")
    )
    print(f"{num_tokens:,} tokens in {seconds:.0f} s")
    print(f"peak {mx.get_peak_memory() / 2**20:,.0f} MiB, the ledger says {predicted / 2**20:,.0f} MiB")
    return 0


def beside(folder: Path, num_tokens: int) -> int:
    """The longest gap of three decoding workers while a fourth prefills, in budgets of a chunk."""
    loaded = load_hybrid(folder, NUM_STREAMS * (num_tokens + CHUNK_ROWS))
    limits = PaceLimits(step_seconds=CPU_STEP_SECONDS)
    cache = Cache(
        loaded.kv.num_pages,
        num_states=loaded.ledger.num_states,
        num_small_states=loaded.ledger.num_small_states,
    )
    engine = Engine(
        loaded.runner, cache, rules_of(loaded, EngineSettings()), num_workers=NUM_STREAMS, limits=limits
    )
    for stream in range(NUM_STREAMS - 1):
        engine.submit(_call(f"decode {stream}", 512, num_tokens // 2, loaded.digest))
    told_at: dict[str, float] = {}
    gaps: list[float] = []
    is_prefilling = False
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        for told in events:
            if isinstance(told.event, Tokens):
                if is_prefilling and told.run_id in told_at:
                    gaps.append(now - told_at[told.run_id])
                told_at[told.run_id] = now
        if len(told_at) == NUM_STREAMS:  # the prefill has its first token
            break
        if len(told_at) == NUM_STREAMS - 1 and not is_prefilling:
            engine.submit(_call("prefill", num_tokens, 1, loaded.digest))
            is_prefilling = True
    gaps.sort()
    longest, late = gaps[-1] / CPU_STEP_SECONDS, gaps[int(0.99 * len(gaps))] / CPU_STEP_SECONDS
    print(f"{len(gaps):,} gaps, budget {CPU_STEP_SECONDS} s: p99 {late:.2f} budgets, longest {longest:.2f}")
    return 0 if longest < 2 else 1


def _call(name: str, num_tokens: int, max_tokens: int, digest: str) -> Submit:
    prompt = array("I", ((position * 7919 + len(name)) % 251 for position in range(num_tokens)))
    return Submit(
        run_id=name,
        attempt=1,
        incarnation=1,
        digest=digest,
        token_ids=prompt.tobytes(),
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        ignore_eos=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help="one real prefill of so many tokens")
    parser.add_argument(
        "--beside", type=int, metavar="TOKENS", help="a prefill beside three decoding workers"
    )
    parser.add_argument("--rows", type=int, default=1024, help="rows of a chunk of the real prefill")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if asked.prefill:
            return prefill(Path(folder) / "hybrid", asked.prefill, asked.rows)
        if asked.beside:
            return beside(Path(folder) / "hybrid", asked.beside)
        return compare_depths(Path(folder) / "hybrid")


if __name__ == "__main__":
    sys.exit(main())
