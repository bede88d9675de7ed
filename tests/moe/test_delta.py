"""The gated delta rule in chunks and in single steps against mlx-lm's loop over rows."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import compute_g

from moe.delta import Rows, Taken, log_decay, take_rows

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 32, 16
KINDS = ["plain", "collinear keys", "strong decay"]


def random_rows(num_rows: int, kind: str = "plain", *, streams: int = 2) -> tuple[Rows, mx.array]:
    """Rows and a state to start from; the hard kinds are repeated tokens and forgetting layers."""
    mx.random.seed(num_rows)
    normal = mx.random.normal
    keys = normal((streams, num_rows, KEY_HEADS, KEY_DIM))
    logs = -mx.exp(2 * normal((streams, num_rows, VALUE_HEADS)) - 2)
    asked_beta = normal((streams, num_rows, VALUE_HEADS))
    if kind == "collinear keys":
        keys = 0.01 * keys + normal((1, 1, KEY_HEADS, KEY_DIM))
        logs, asked_beta = 1e-3 * logs, asked_beta + 6
    if kind == "strong decay":
        logs = mx.where(mx.random.uniform(shape=logs.shape) < 0.3, -300.0, -1e-3)
    rows = Rows(
        q=unit(normal((streams, num_rows, KEY_HEADS, KEY_DIM))) * KEY_DIM**-0.5,
        k=unit(keys),
        v=normal((streams, num_rows, VALUE_HEADS, VALUE_DIM)),
        log_decay=logs,
        beta=mx.sigmoid(asked_beta),
    )
    return rows, normal((streams, VALUE_HEADS, VALUE_DIM, KEY_DIM))


def unit(x: mx.array) -> mx.array:
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def difference(found: mx.array, expected: mx.array) -> float:
    return float(mx.abs(found - expected).max() / mx.abs(expected).max())


def part(rows: Rows, first: int, last: int) -> Rows:
    arrays = (rows.q, rows.k, rows.v, rows.log_decay, rows.beta)
    return Rows(*(array[:, first:last] for array in arrays))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65, 130])
def test_rows_give_what_a_loop_over_them_gives(num_rows: int, kind: str) -> None:
    rows, state = random_rows(num_rows, kind)
    found, expected = take_rows(rows, state), take_rows(rows, state, chunk_rows=None)
    assert difference(found.y, expected.y) < 5e-6
    assert difference(found.state, expected.state) < 5e-6


@pytest.mark.parametrize("cut", [1, 37, 64, 99])
def test_a_cut_anywhere_changes_nothing_but_rounding(cut: int) -> None:
    rows, state = random_rows(100)
    whole = take_rows(rows, state)
    first = take_rows(part(rows, 0, cut), state)
    second = take_rows(part(rows, cut, 100), first.state)
    assert difference(mx.concatenate([first.y, second.y], axis=1), whole.y) < 2e-6
    assert difference(second.state, whole.state) < 2e-6


def test_streams_of_a_batch_do_not_touch_each_other() -> None:
    rows, state = random_rows(1, streams=3)
    together = take_rows(rows, state)
    for stream in range(3):
        one = slice(stream, stream + 1)
        alone = take_rows(
            Rows(*(x[one] for x in (rows.q, rows.k, rows.v, rows.log_decay, rows.beta))), state[one]
        )
        assert mx.array_equal(together.state[one], alone.state)


@pytest.mark.parametrize("num_rows", [1, 70])
def test_the_state_stays_float32_and_y_has_the_rows_dtype(num_rows: int) -> None:
    rows, state = random_rows(num_rows)
    narrow = Rows(
        rows.q.astype(mx.bfloat16),
        rows.k.astype(mx.bfloat16),
        rows.v.astype(mx.bfloat16),
        rows.log_decay,
        rows.beta.astype(mx.bfloat16),
    )
    found, expected = take_rows(narrow, state), take_rows(narrow, state, chunk_rows=None)
    assert (found.y.dtype, found.state.dtype) == (mx.bfloat16, mx.float32)
    assert difference(found.state, expected.state) < 5e-6


@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_shows_in_the_last_row(num_rows: int, bad: float) -> None:
    """The runner relies on it: it looks at rows, not at states, for faults."""
    rows, state = random_rows(num_rows, streams=1)
    state[0, 3, 5, 7] = bad
    found: Taken = take_rows(rows, state)
    assert not mx.isfinite(found.y[0, -1]).all()


def test_decay_is_the_logarithm_of_mlx_lms() -> None:
    mx.random.seed(1)
    a, a_log, dt_bias = mx.random.normal((1, 40, 4)) * 3, mx.random.normal((4,)), mx.random.normal((4,))
    assert mx.allclose(mx.exp(log_decay(a, a_log, dt_bias)), compute_g(a_log, a, dt_bias), rtol=1e-5, atol=0)


def test_a_long_stretch_is_bounded_in_memory() -> None:
    """Eight arrays of a chunk's square per row and head, at the most; no square of the stretch."""
    rows, state = random_rows(2048, streams=1)
    mx.eval(rows.q, rows.k, rows.v, rows.log_decay, rows.beta, state)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    taken = take_rows(rows, state)
    mx.eval(taken.y, taken.state)
    assert mx.get_peak_memory() - before < 8 * 4 * 2048 * VALUE_HEADS * 64
