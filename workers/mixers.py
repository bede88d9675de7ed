"""Token mixers of ours that take the place of mlx-lm's: same parameters, but they speak pages and segments.

A model of mlx-lm passes its `cache` argument on to each layer's mixer untouched, so one `StepAttention` given
there for every layer reaches them all. The rows of all segments lie in one sequence, [1, rows, hidden].
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kvcache.attention import StepAttention


class StepCache(list[StepAttention]):
    """What a model of mlx-lm takes for its per-layer caches: the same step for each layer."""

    def __init__(self, step: StepAttention, num_layers: int) -> None:
        super().__init__([step] * num_layers)


class PagedAttention(nn.Module):
    """Causal attention with grouped K and V heads over pages; optional norms of Q and K per head."""

    def __init__(self, attention: nn.Module, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads: int = attention.n_heads
        self.num_kv_heads: int = attention.n_kv_heads
        self.scale: float = attention.scale
        self.q_proj = attention.q_proj
        self.k_proj = attention.k_proj
        self.v_proj = attention.v_proj
        self.o_proj = attention.o_proj
        self.head_dim: int = self.v_proj.weight.shape[0] // self.num_kv_heads
        self.rope = attention.rope
        self.has_norms = "q_norm" in attention
        if self.has_norms:
            self.q_norm = attention.q_norm
            self.k_norm = attention.k_norm

    def __call__(self, x: mx.array, mask: Any, cache: StepAttention) -> mx.array:
        """x [1, rows, hidden] -> the same shape; the model's mask is unused: the step knows who sees what."""
        rows = x.shape[1]
        queries = self.q_proj(x).reshape(rows, self.num_heads, 1, -1)
        keys = self.k_proj(x).reshape(rows, self.num_kv_heads, 1, -1)
        values = self.v_proj(x).reshape(rows, self.num_kv_heads, -1)
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        # Rope takes one offset per batch entry: each row is one, and Q and K share the sines of one call.
        turned = self.rope(mx.concatenate([queries, keys], axis=1), offset=cache.positions).squeeze(2)
        queries, keys = turned[:, : self.num_heads], turned[:, self.num_heads :]
        output = cache.attend(self.layer, queries, keys, values, scale=self.scale)
        mixed: mx.array = self.o_proj(output.reshape(1, rows, -1))
        return mixed


def swap_mixers(model: nn.Module) -> None:
    """Replace the attention of every layer of a llama-like model in place."""
    for index, layer in enumerate(model.layers):
        layer.self_attn = PagedAttention(layer.self_attn, index)
