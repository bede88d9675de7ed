"""The recurrent states: one live state a worker, and checkpoint rows, exact and small, that keep others.

Knows nothing of turns or trees: numbers of workers and rows come in. A state is, for each recurrent layer,
the matrix of the delta rule and the last inputs of its convolution, and once the model's last hidden row. A
small row holds the matrices in 8 bits: quantised once when a state moves there, dequantised once when it is
restored. As with the pools, each array lives in one list here and nowhere else, so that writes need no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

_MAX_CODE = 127


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

    def zeros(self, num_states: int, kind: mx.Dtype = mx.float32) -> list[mx.array]:
        """So many empty states: matrices of all layers (of the dtype `kind`), windows of all, hidden rows."""
        matrix = (num_states, self.num_heads, self.value_dim, self.key_dim)
        window = (num_states, self.window_rows, self.channels)
        layers = range(self.num_layers)
        return [
            *(mx.zeros(matrix, kind) for _ in layers),
            *(mx.zeros(window, self.dtype) for _ in layers),
            mx.zeros((num_states, self.hidden_size), self.dtype),
        ]

    def zero_scales(self, num_states: int) -> list[mx.array]:
        """Those of the matrices of so many small states: float32 [num_states, num_heads, key_dim] a layer."""
        scale = (num_states, self.num_heads, self.key_dim)
        return [mx.zeros(scale, mx.float32) for _ in range(self.num_layers)]


class States:
    """Live states [num_workers, ...] and checkpoint rows; all but `rebuild` is lazy.

    Rows [0, num_rows) hold states as they are, the num_small_rows that follow hold them in 8 bits.
    """

    def __init__(
        self, layout: StateLayout, *, num_workers: int, num_rows: int, num_small_rows: int = 0
    ) -> None:
        self.layout = layout
        self.num_workers = num_workers
        self.num_rows = num_rows
        self.num_small_rows = num_small_rows
        self._live: list[mx.array] = []
        self._rows: list[mx.array] = []
        self._small: list[mx.array] = []
        self._scales: list[mx.array] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Drop all states and start with zeroed ones."""
        for arrays in (self._live, self._rows, self._small, self._scales):
            arrays.clear()
        self._live.extend(self.layout.zeros(self.num_workers))
        self._rows.extend(self.layout.zeros(self.num_rows))
        self._small.extend(self.layout.zeros(self.num_small_rows, mx.int8))
        self._scales.extend(self.layout.zero_scales(self.num_small_rows))
        mx.eval(*self.arrays())

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
        if row < self.num_rows:
            return self._rows[-1][row : row + 1]
        place = row - self.num_rows
        return self._small[-1][place : place + 1]

    def save(self, worker: int, row: int) -> None:
        """Copy a live state into an exact checkpoint row."""
        for live, rows in zip(self._live, self._rows, strict=True):
            rows[row] = live[worker]

    def demote(self, source: int, target: int) -> None:
        """Put the state of an exact row into a small one, in 8 bits. To be evaluated before the next save."""
        place = target - self.num_rows
        for layer, scales in enumerate(self._scales):
            codes, scale = quantise(self._rows[layer][source])
            self._small[layer][place] = codes
            scales[place] = scale
        for small, rows in zip(self._native(self._small), self._native(self._rows), strict=True):
            small[place] = rows[source]

    def restore(self, worker: int, row: int | None) -> None:
        """Copy a checkpoint row into a live state; None: zero the live state."""
        if row is not None and row >= self.num_rows:
            self._restore_small(worker, row - self.num_rows)
            return
        for live, rows in zip(self._live, self._rows, strict=True):
            live[worker] = 0 if row is None else rows[row]

    def _restore_small(self, worker: int, place: int) -> None:
        for layer, scales in enumerate(self._scales):
            self._live[layer][worker] = dequantise(self._small[layer][place], scales[place])
        for live, small in zip(self._native(self._live), self._native(self._small), strict=True):
            live[worker] = small[place]

    def _native(self, arrays: list[mx.array]) -> list[mx.array]:
        """Windows and hidden rows, which are never quantised."""
        return arrays[self.layout.num_layers :]

    def clear_row(self, row: int) -> None:
        """Zero an exact checkpoint row."""
        for rows in self._rows:
            rows[row] = 0

    def arrays(self) -> Sequence[mx.array]:
        """For the step's one evaluation; keep no reference past it."""
        return [*self._live, *self._rows, *self._small, *self._scales]

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

    @property
    def bytes_per_small_state(self) -> int:
        """0 where there is no small row."""
        total = sum(array.nbytes for array in (*self._small, *self._scales))
        return total // self.num_small_rows if self.num_small_rows else 0


def quantise(matrix: mx.array) -> tuple[mx.array, mx.array]:
    """[heads, value_dim, key_dim] float32 -> int8 codes of the same shape and scales [heads, key_dim].

    Symmetric, one scale for each head and key channel; what is not finite makes its channel's scale so.
    """
    scale = mx.abs(matrix).max(axis=-2) / _MAX_CODE
    codes = matrix / mx.where(scale == 0, 1.0, scale)[..., None, :]
    return mx.round(codes).astype(mx.int8), scale


def dequantise(codes: mx.array, scale: mx.array) -> mx.array:
    """Undoes `quantise`, to half a scale."""
    return codes.astype(mx.float32) * scale[..., None, :]
