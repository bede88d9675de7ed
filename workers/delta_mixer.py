"""Gated DeltaNet layers over the workers' live states: mlx-lm's parameters, our rows and segments.

The rows of all segments lie in one sequence, [1, rows, hidden]: projections see them all at once, convolution
and recurrence go by segment, and single rows of neighbouring segments are one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk

from kvcache.states import States
from moe.delta import Rows, log_decay, take_rows

_NORM_EPSILON = 1e-6  # of the families' l2 norm of q and k


@dataclass(frozen=True, slots=True)
class Run:
    """So many rows of one worker's segment, at least one, in the order of the step."""

    worker: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring runs of equal length: `streams` of the step's runs, `rows` of its rows."""

    streams: slice
    rows: slice

    @property
    def num_streams(self) -> int:
        return int(self.streams.stop - self.streams.start)


class StepRecurrence:
    """One step's runs over the live states; given to each recurrent layer in turn as its cache."""

    def __init__(self, states: States, runs: Sequence[Run]) -> None:
        self._states = states
        self._workers = mx.array([run.worker for run in runs], mx.int32)
        self.batches = _batches(runs)

    def read(self, layer: int) -> tuple[mx.array, mx.array]:
        """Matrices and windows of the runs, as `States.read`."""
        return self._states.read(layer, self._workers)

    def write(self, layer: int, matrices: list[mx.array], windows: list[mx.array]) -> None:
        """What each batch left behind, in order."""
        self._states.write(layer, self._workers, mx.concatenate(matrices), mx.concatenate(windows))


def _batches(runs: Sequence[Run]) -> tuple[_Batch, ...]:
    batches: list[_Batch] = []
    first_row = 0
    for index, run in enumerate(runs):
        rows = slice(first_row, first_row + run.num_rows)
        if run.num_rows == 1 and index and runs[index - 1].num_rows == 1:
            before = batches.pop()
            batches.append(
                _Batch(slice(before.streams.start, index + 1), slice(before.rows.start, rows.stop))
            )
        else:
            batches.append(_Batch(slice(index, index + 1), rows))
        first_row = rows.stop
    return tuple(batches)


@dataclass(frozen=True, slots=True)
class _Projected:
    """A step's rows after the input projections: qkv [rows, channels], z [rows, heads, value_dim], a, b."""

    qkv: mx.array
    z: mx.array
    b: mx.array
    a: mx.array


class GatedDelta(nn.Module):
    """The layer of qwen3_5, with one projection each for q, k and v together, z, b and a."""

    def __init__(self, delta: nn.Module, layer: int) -> None:
        """layer: the index among the model's recurrent layers."""
        super().__init__()
        self.layer = layer
        self.num_k_heads: int = delta.num_k_heads
        self.num_v_heads: int = delta.num_v_heads
        self.head_k_dim: int = delta.head_k_dim
        self.head_v_dim: int = delta.head_v_dim
        self.key_dim: int = delta.key_dim
        self.hidden_size: int = delta.hidden_size
        self.channels: int = delta.conv_dim
        self.window_rows: int = delta.conv_kernel_size - 1
        self.conv1d = delta.conv1d
        self.dt_bias = delta.dt_bias
        self.A_log = delta.A_log
        self.norm = delta.norm
        self.out_proj = delta.out_proj
        self._take_projections(delta)

    def _take_projections(self, delta: nn.Module) -> None:
        self.in_proj_qkv = delta.in_proj_qkv
        self.in_proj_z = delta.in_proj_z
        self.in_proj_b = delta.in_proj_b
        self.in_proj_a = delta.in_proj_a

    def _project(self, x: mx.array) -> _Projected:
        z = self.in_proj_z(x).reshape(-1, self.num_v_heads, self.head_v_dim)
        return _Projected(self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x))

    def __call__(self, x: mx.array, mask: Any, cache: StepRecurrence) -> mx.array:
        """x [1, rows, hidden] -> the same shape; the model's mask is unused: the step knows its segments."""
        projected = self._project(x[0])
        decay = log_decay(projected.a, self.A_log, self.dt_bias)
        beta = mx.sigmoid(projected.b)
        matrices, windows = cache.read(self.layer)
        outputs, new_matrices, new_windows = [], [], []
        for batch in cache.batches:

            def of_batch(rows: mx.array, batch: _Batch = batch) -> mx.array:
                return rows[batch.rows].reshape(batch.num_streams, -1, *rows.shape[1:])

            inputs = mx.concatenate([windows[batch.streams], of_batch(projected.qkv)], axis=1)
            q, k, v = self._heads(nn.silu(self._convolve(inputs)))
            rows = Rows(q, k, v, of_batch(decay), of_batch(beta))
            taken = take_rows(rows, matrices[batch.streams])
            outputs.append(taken.y.reshape(-1, *taken.y.shape[2:]))
            new_matrices.append(taken.state)
            new_windows.append(inputs[:, rows.num_rows :])
        cache.write(self.layer, new_matrices, new_windows)
        normed = self.norm(mx.concatenate(outputs), projected.z)
        mixed: mx.array = self.out_proj(normed.reshape(1, x.shape[1], -1))
        return mixed

    def _convolve(self, inputs: mx.array) -> mx.array:
        """[streams, window_rows + rows, channels] -> [streams, rows, channels]."""
        if mx.metal.is_available():
            output: mx.array = self.conv1d(inputs)
            return output
        # Four shifted products: MLX's CPU convolution takes four times as long.
        taps = self.conv1d.weight.squeeze(-1).astype(mx.float32)  # [channels, window_rows + 1]
        rows = inputs.shape[1] - self.window_rows
        wide = inputs.astype(mx.float32)
        total = wide[:, :rows] * taps[:, 0]
        for tap in range(1, self.window_rows + 1):
            total = total + wide[:, tap : tap + rows] * taps[:, tap]
        convolved: mx.array = total.astype(inputs.dtype)
        return convolved

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """q and k with unit norms, and v, as `moe.delta.Rows` wants them."""
        q, k, v = mx.split(mixed, [self.key_dim, 2 * self.key_dim], axis=-1)
        streams, rows = mixed.shape[:2]
        q = q.reshape(streams, rows, self.num_k_heads, self.head_k_dim)
        k = k.reshape(streams, rows, self.num_k_heads, self.head_k_dim)
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=_NORM_EPSILON)
        return q, k, v.reshape(streams, rows, self.num_v_heads, self.head_v_dim)


class FusedGatedDelta(GatedDelta):
    """The layer of qwen3_next, whose two projections hold q, k, v, z and b, a of each key head together."""

    def _take_projections(self, delta: nn.Module) -> None:
        self.in_proj_qkvz = delta.in_proj_qkvz
        self.in_proj_ba = delta.in_proj_ba

    def _project(self, x: mx.array) -> _Projected:
        rows, per_key_head = x.shape[0], self.num_v_heads // self.num_k_heads
        values = per_key_head * self.head_v_dim
        by_head = self.in_proj_qkvz(x).reshape(rows, self.num_k_heads, -1)
        borders = [self.head_k_dim, 2 * self.head_k_dim, 2 * self.head_k_dim + values]
        q, k, v, z = mx.split(by_head, borders, axis=-1)
        b, a = mx.split(self.in_proj_ba(x).reshape(rows, self.num_k_heads, -1), [per_key_head], axis=-1)
        qkv = mx.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=-1)
        return _Projected(
            qkv,
            z.reshape(rows, self.num_v_heads, self.head_v_dim),
            b.reshape(rows, self.num_v_heads),
            a.reshape(rows, self.num_v_heads),
        )


def gated_delta(delta: nn.Module, layer: int) -> GatedDelta:
    """Our layer for one of mlx-lm's."""
    kind = FusedGatedDelta if "in_proj_qkvz" in delta else GatedDelta
    return kind(delta, layer)
