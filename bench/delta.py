"""The gated delta rule in chunks against mlx-lm's loop over rows, on this machine's CPU: one layer's time.

python -m bench.delta                 # the heads of Qwen3-Next-80B and Qwen3.5-35B, 2,048 rows
python -m bench.delta --rows 512
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from workers.machine import load_blas

load_blas()

import mlx.core as mx  # noqa: E402 - after BLAS

from moe.delta import CHUNK_ROWS, Rows, Taken, take_rows  # noqa: E402

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the gated delta rule of one layer.")
    parser.add_argument("--rows", type=int, default=2048)
    num_rows: int = parser.parse_args().rows
    rows, state = random_rows(1, num_rows)
    print(f"{num_rows} rows in chunks of {CHUNK_ROWS}: {seconds_of(lambda: take_rows(rows, state)):.3f} s")
    loop = seconds_of(lambda: take_rows(rows, state, chunk_rows=None), repeats=1)
    print(f"{num_rows} rows in mlx-lm's loop: {loop:.3f} s")
    decode, states = random_rows(4, 1)
    print(f"4 decode rows, one step: {1e3 * seconds_of(lambda: take_rows(decode, states), 20):.1f} ms")
    loop = seconds_of(lambda: take_rows(decode, states, chunk_rows=None), 20)
    print(f"4 decode rows, mlx-lm's step: {1e3 * loop:.1f} ms")


def random_rows(streams: int, num_rows: int) -> tuple[Rows, mx.array]:
    mx.random.seed(0)
    keys, values = (streams, num_rows, KEY_HEADS, HEAD_DIM), (streams, num_rows, VALUE_HEADS)
    k = mx.random.normal(keys)
    rows = Rows(
        q=mx.random.normal(keys) / HEAD_DIM,
        k=k / mx.linalg.norm(k, axis=-1, keepdims=True),
        v=mx.random.normal((*values, HEAD_DIM)),
        log_decay=-mx.random.uniform(shape=values),
        beta=mx.random.uniform(shape=values),
    )
    state = mx.random.normal((streams, VALUE_HEADS, HEAD_DIM, HEAD_DIM))
    mx.eval(rows.q, rows.k, rows.v, rows.log_decay, rows.beta, state)
    return rows, state


def seconds_of(run: Callable[[], Taken], repeats: int = 3) -> float:
    """Least time of some runs."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        taken = run()
        mx.eval(taken.y, taken.state)
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
