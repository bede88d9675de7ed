"""Live states and checkpoint rows: what is copied where, and that nothing else is."""

from __future__ import annotations

import mlx.core as mx

from kvcache.states import StateLayout, States, dequantise, quantise

LAYOUT = StateLayout(
    num_layers=2,
    num_heads=2,
    value_dim=4,
    key_dim=8,
    window_rows=3,
    channels=10,
    hidden_size=6,
    dtype=mx.bfloat16,
)
ONE_STATE = 2 * (2 * 4 * 8 * 4 + 3 * 10 * 2) + 6 * 2  # bytes


def filled(num_rows: int = 5, num_small_rows: int = 0) -> States:
    """Worker w holds w + 1 in layer 0 and 10 (w + 1) in layer 1; its hidden row is 100 (w + 1)."""
    states = States(LAYOUT, num_workers=3, num_rows=num_rows, num_small_rows=num_small_rows)
    workers, values = mx.arange(3), mx.arange(1, 4)
    for layer, factor in ((0, 1), (1, 10)):
        matrices = mx.broadcast_to((factor * values)[:, None, None, None], (3, 2, 4, 8))
        windows = mx.broadcast_to((factor * values)[:, None, None], (3, 3, 10))
        states.write(layer, workers, matrices.astype(mx.float32), windows.astype(mx.bfloat16))
    hidden = mx.broadcast_to((100 * values)[:, None], (3, 6))
    states.write_hidden(workers, hidden.astype(mx.bfloat16))
    return states


def live_values(states: States, layer: int) -> list[set[float]]:
    """What each worker's state of a layer is filled with, matrix and window together."""
    matrices, windows = states.read(layer, mx.arange(3))
    return [
        {*matrices[worker].flatten().tolist(), *windows[worker].flatten().tolist()}  # type: ignore[misc]
        for worker in range(3)
    ]


def test_a_restored_state_is_the_saved_one_in_every_layer() -> None:
    states = filled()
    states.save(1, 4)
    states.restore(1, None)
    assert live_values(states, 0) == [{1}, {0}, {3}]
    states.restore(0, 4)
    assert live_values(states, 0) == [{2}, {0}, {3}]
    assert live_values(states, 1) == [{20}, {0}, {30}]
    states.save(0, 3)
    assert states.hidden(3).tolist() == [[200.0] * 6]


def test_a_cleared_row_is_zero_and_the_others_stay() -> None:
    states = filled()
    for worker in range(3):
        states.save(worker, worker)
    states.clear_row(1)
    assert [states.hidden(row)[0, 0].item() for row in range(3)] == [100, 0, 300]
    states.restore(0, 1)
    assert live_values(states, 1) == [{0}, {20}, {30}]


def test_rebuilt_states_are_zero_and_of_the_same_size() -> None:
    states = filled()
    before = states.nbytes
    states.rebuild()
    assert live_values(states, 0) == [{0}] * 3
    assert states.nbytes == before == (3 + 5) * ONE_STATE
    assert (states.bytes_per_state, states.dtype_name) == (ONE_STATE, "float32")


def test_a_live_state_may_be_saved_where_no_row_is_needed() -> None:
    states = filled(num_rows=0)
    assert states.nbytes == 3 * ONE_STATE


def test_a_small_row_costs_half_a_code_and_keeps_window_and_hidden_row() -> None:
    states = filled(num_rows=2, num_small_rows=2)
    matrices = mx.random.normal((1, 2, 4, 8), key=mx.random.key(1)) * mx.array([1.0, 1e-6] * 4)
    windows = mx.random.normal((1, 3, 10), key=mx.random.key(2)).astype(mx.bfloat16)
    for layer in range(2):
        states.write(layer, mx.array([1]), matrices, windows)
    states.save(1, 0)
    states.demote(0, 3)
    mx.eval(*states.arrays())
    states.restore(1, None)
    states.save(1, 0)
    states.restore(0, 3)
    largest = mx.abs(matrices[0]).max(axis=1, keepdims=True)
    for layer in range(2):
        found, window = states.read(layer, mx.array([0]))
        assert bool((mx.abs(found[0] - matrices[0]) <= largest * (0.5001 / 127)).all())
        assert mx.array_equal(window, windows)
    assert states.hidden(3).tolist() == [[200.0] * 6]
    assert live_values(states, 0)[1:] == [{0}, {3}]


def test_what_is_not_finite_stays_so_in_eight_bits_and_zeros_stay_zeros() -> None:
    matrix = mx.zeros((1, 4, 3))
    matrix[0, 1] = mx.array([float("nan"), float("inf"), 0.0])
    back = dequantise(*quantise(matrix))
    assert mx.isfinite(back).tolist() == [[[False, False, True]] * 4]
    assert back[0, :, 2].tolist() == [0] * 4


def test_small_rows_take_a_byte_a_value_and_a_scale_a_channel() -> None:
    states = filled(num_rows=2, num_small_rows=7)
    assert states.bytes_per_small_state == 2 * (2 * 4 * 8 + 2 * 8 * 4 + 3 * 10 * 2) + 6 * 2
    assert states.nbytes == (3 + 2) * ONE_STATE + 7 * states.bytes_per_small_state
    assert filled().bytes_per_small_state == 0
