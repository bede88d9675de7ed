"""The recurrent states: one live state a worker, and checkpoint rows that keep states of prefixes.

Knows nothing of turns or trees: numbers of workers and rows come in. A state is, for each recurrent layer,
the matrix of the delta rule and the last inputs of its convolution, and once the model's last hidden row. As
with the pools, each array lives in one list here and nowhere else, so that writes need no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What one state holds. dtype is the model's compute dtype: of windows and hidden rows."""

    num_layers: int  # recurrent ones
    num_heads: int
    value_dim: int
    key_dim: int
    window_rows: int  # inputs that the convolution looks back on
    channels: int  # of the convolution
    hidden_size: int
    dtype: mx.Dtype

    def zeros(self, num_states: int) -> list[mx.array]:
        """So many empty states: matrices of all layers (float32), windows of all layers, hidden rows."""
        matrix = (num_states, self.num_heads, self.value_dim, self.key_dim)
        window = (num_states, self.window_rows, self.channels)
        layers = range(self.num_layers)
        return [
            *(mx.zeros(matrix, mx.float32) for _ in layers),
            *(mx.zeros(window, self.dtype) for _ in layers),
            mx.zeros((num_states, self.hidden_size), self.dtype),
        ]


class States:
    """Live states [num_workers, ...] and checkpoint rows [num_rows, ...]; all but `rebuild` is lazy."""

    def __init__(self, layout: StateLayout, *, num_workers: int, num_rows: int) -> None:
        self.layout = layout
        self.num_workers = num_workers
        self.num_rows = num_rows
        self._live: list[mx.array] = []
        self._rows: list[mx.array] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Drop all states and start with zeroed ones."""
        self._live.clear()
        self._rows.clear()
        self._live.extend(self.layout.zeros(self.num_workers))
        self._rows.extend(self.layout.zeros(self.num_rows))
        mx.eval(self._live, self._rows)

    def read(self, layer: int, workers: mx.array) -> tuple[mx.array, mx.array]:
        """Matrices [n, heads, value_dim, key_dim] and windows [n, window_rows, channels] of n workers."""
        matrices, windows = self._live[layer], self._live[self.layout.num_layers + layer]
        return mx.take(matrices, workers, axis=0), mx.take(windows, workers, axis=0)

    def write(self, layer: int, workers: mx.array, matrices: mx.array, windows: mx.array) -> None:
        """Put one layer's new live states; shapes as `read` gives them."""
        self._live[layer][workers] = matrices
        self._live[self.layout.num_layers + layer][workers] = windows

    def write_hidden(self, workers: mx.array, hidden: mx.array) -> None:
        """Put the hidden rows [n, hidden_size] that the model's head would see after these live states."""
        self._live[-1][workers] = hidden

    def hidden(self, row: int) -> mx.array:
        """A checkpoint's hidden row, [1, hidden_size]."""
        return self._rows[-1][row : row + 1]

    def save(self, worker: int, row: int) -> None:
        """Copy a live state into a checkpoint row."""
        for live, rows in zip(self._live, self._rows, strict=True):
            rows[row] = live[worker]

    def restore(self, worker: int, row: int | None) -> None:
        """Copy a checkpoint row into a live state; None: zero the live state."""
        for live, rows in zip(self._live, self._rows, strict=True):
            live[worker] = 0 if row is None else rows[row]

    def clear_row(self, row: int) -> None:
        """Zero a checkpoint row."""
        for rows in self._rows:
            rows[row] = 0

    def arrays(self) -> Sequence[mx.array]:
        """For the step's one evaluation; keep no reference past it."""
        return [*self._live, *self._rows]

    @property
    def dtype_name(self) -> str:
        """Of the matrices, measured."""
        return str(self._live[0].dtype).removeprefix("mlx.core.")

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def bytes_per_state(self) -> int:
        return sum(array.nbytes for array in self._live) // self.num_workers
