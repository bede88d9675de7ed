"""The gated delta rule: how a recurrent layer's state takes up rows and answers them.

Knows one layer's heads and rows; whose rows they are and where states are kept is the caller's business. The
formulas are those of Gated DeltaNet (arXiv 2412.06464) in the layout of mlx_lm.models.gated_delta. Per head,
with S the state [value_dim, key_dim], each row does: S <- g S; d = beta (v - S k); S <- S + d k^T; y = S q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

CHUNK_ROWS = 64
"""Rows that are solved as one triangular system on a CPU."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of some streams, all of equal number. q and k have unit norm, q times its scale; log_decay <= 0.

    q, k [streams, rows, key_heads, key_dim]; v [streams, rows, value_heads, value_dim];
    log_decay, beta [streams, rows, value_heads]. value_heads is a multiple of key_heads.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    log_decay: mx.array
    beta: mx.array

    @property
    def num_rows(self) -> int:
        return int(self.q.shape[1])


@dataclass(frozen=True, slots=True)
class Taken:
    """What rows gave, and the state after the last of them."""

    y: mx.array  # [streams, rows, value_heads, value_dim] in q's dtype
    state: mx.array  # float32 [streams, value_heads, value_dim, key_dim]


def log_decay(a: mx.array, a_log: mx.array, dt_bias: mx.array) -> mx.array:
    """Natural logarithm of a row's decay g, float32, from its projection `a` [..., value_heads]."""
    log: mx.array = -mx.exp(a_log.astype(mx.float32)) * nn.softplus(a + dt_bias)
    return log


def take_rows(rows: Rows, state: mx.array, *, chunk_rows: int | None = CHUNK_ROWS) -> Taken:
    """Run rows through the rule from float32 states [streams, value_heads, value_dim, key_dim]. Lazy.

    Metal takes mlx-lm's kernel. Elsewhere single rows are one batched step and longer stretches are solved in
    chunks of about `chunk_rows`; chunk_rows None: mlx-lm's loop over the rows, to compare with.
    """
    if _has_kernel(rows.k.shape[-1]):
        decay, q = mx.exp(rows.log_decay), rows.q
        return Taken(*gated_delta_kernel(q, rows.k, rows.v, decay, rows.beta, state))
    if chunk_rows is None:
        decay, q = mx.exp(rows.log_decay), rows.q
        return Taken(*gated_delta_ops(q, rows.k, rows.v, decay, rows.beta, state))
    if rows.num_rows == 1:
        return _step(rows, state)
    return _solve(rows, state, chunk_rows)


def _has_kernel(key_dim: int) -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.gpu and key_dim % 32 == 0


def _step(rows: Rows, state: mx.array) -> Taken:
    """One row of each stream; the old state is read once, for S k and S q together."""
    groups = rows.v.shape[2] // rows.k.shape[2]
    q, k, v = (x[:, 0].astype(mx.float32) for x in (rows.q, rows.k, rows.v))
    decay = mx.exp(rows.log_decay[:, 0])[..., None]
    beta = rows.beta[:, 0].astype(mx.float32)[..., None]
    both = mx.repeat(mx.stack([k, q], axis=-1), groups, axis=1)  # [streams, value_heads, key_dim, 2]
    known, asked = mx.split(decay[..., None] * (state @ both), 2, axis=-1)
    delta = beta * (v - known.squeeze(-1))
    overlap = mx.repeat((k * q).sum(axis=-1, keepdims=True), groups, axis=1)
    y = asked.squeeze(-1) + overlap * delta
    keys = mx.repeat(k, groups, axis=1)
    return Taken(
        y[:, None].astype(rows.q.dtype), decay[..., None] * state + delta[..., None] * keys[..., None, :]
    )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What rows say without a state, in chunks of `size` rows.

    All begin with [streams, chunks, key_heads, value heads of each], the last being 1 for k and q. E_ij is
    the decay from row j to row i of a chunk, row 0 being the one before it.
    """

    k: mx.array  # [..., size, key_dim]
    asking: mx.array  # k over q: [..., 2 size, key_dim]
    v: mx.array  # [..., size, value_dim]
    beta: mx.array  # [..., size, 1]
    since_start: mx.array  # E_i0 [..., size, 1]
    to_end: mx.array  # E_nj [..., size, 1]
    inverse: mx.array  # of I + A, A_ij = beta_i E_ij k_i.k_j below the diagonal [..., size, size]
    answers: mx.array  # E_ij q_i.k_j up to the diagonal [..., size, size]


def _solve(rows: Rows, state: mx.array, chunk_rows: int) -> Taken:
    """Chunks one after the other; inside a chunk all innovations d come from one triangular system.

    (I + A) D = beta (V - E_i0 K S^T); Y = E_i0 Q S^T + (E o Q K^T) D; S <- E_n0 S + (E_nj D)^T K.
    """
    streams, num_rows, key_heads, _ = rows.k.shape
    num_chunks = -(-num_rows // chunk_rows)
    size = -(-num_rows // num_chunks)
    chunks = _in_chunks(rows, num_chunks, size)
    current = state.reshape(streams, key_heads, -1, *state.shape[2:])
    outputs = []
    for chunk in range(num_chunks):
        start = chunks.since_start[:, chunk]
        known, asked = mx.split(chunks.asking[:, chunk] @ current.swapaxes(-1, -2), 2, axis=-2)
        surprise = chunks.beta[:, chunk] * (chunks.v[:, chunk] - start * known)
        delta = chunks.inverse[:, chunk] @ surprise
        outputs.append(start * asked + chunks.answers[:, chunk] @ delta)
        taken_up = (delta * chunks.to_end[:, chunk]).swapaxes(-1, -2) @ chunks.k[:, chunk]
        current = start[..., -1:, :] * current + taken_up
    y = mx.stack(outputs, axis=1).transpose(0, 1, 4, 2, 3, 5)
    y = y.reshape(streams, num_chunks * size, *rows.v.shape[2:])[:, :num_rows]
    return Taken(y.astype(rows.q.dtype), current.reshape(state.shape))


def _in_chunks(rows: Rows, num_chunks: int, size: int) -> _Chunks:
    """Rows that are missing in the last chunk have no keys and no decay: they leave a state as it is."""
    streams, num_rows, key_heads, _ = rows.k.shape

    def cut(x: mx.array) -> mx.array:
        """[streams, rows, heads, ...] -> [streams, chunks, key_heads, heads of each, size, ...], float32."""
        missing = num_chunks * size - num_rows
        padded = mx.pad(x.astype(mx.float32), [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        split = padded.reshape(streams, num_chunks, size, key_heads, -1, *x.shape[3:])
        return split.transpose(0, 1, 3, 4, 2, *range(5, split.ndim))

    q, k, beta = cut(rows.q), cut(rows.k), cut(rows.beta)[..., None]
    logs = cut(rows.log_decay)[..., None] * math.log2(math.e)
    below, transposed = mx.tri(size, size, -1), k.swapaxes(-1, -2)
    # Sums of the logs between two rows: a difference of sums from the start would lose small decays behind a
    # large one. Masked before the power, so that nothing overflows. power(2, x) is MLX's quickest on a CPU.
    between = mx.power(2.0, mx.cumsum(logs * below, axis=-2)) * mx.tri(size, size)
    system = mx.eye(size) + beta * between * (k @ transposed) * below
    return _Chunks(
        k=k,
        asking=mx.concatenate([k, q], axis=-2),
        v=cut(rows.v),
        beta=beta,
        since_start=mx.power(2.0, mx.cumsum(logs, axis=-2)),
        to_end=between[..., -1:, :].swapaxes(-1, -2),
        inverse=mx.linalg.tri_inv(system, stream=mx.cpu),
        answers=between * (q @ transposed),
    )
