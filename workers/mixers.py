"""Token mixers of ours that take the place of mlx-lm's: same parameters, but they speak pages and segments.

A model of mlx-lm passes the entries of its `cache` argument on to the layers' mixers untouched, so one step
given there for every layer of a kind reaches them all. All segments' rows lie in one [1, rows, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from kvcache.attention import StepAttention

from .delta_mixer import GatedDelta, gated_delta


class PagedAttention(nn.Module):
    """Causal attention with grouped K and V heads over pages; optional norms of Q and K per head."""

    def __init__(self, attention: nn.Module, layer: int) -> None:
        """layer: the index among the model's attention layers."""
        super().__init__()
        self.layer = layer
        heads = _heads(attention)
        self.num_heads, self.num_kv_heads = heads.queries, heads.kv
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
        queries = self.q_proj(x).reshape(-1, self.num_heads, 1, self.head_dim)
        mixed: mx.array = self.o_proj(self._attend(queries, x, cache))
        return mixed

    def _attend(self, queries: mx.array, x: mx.array, step: StepAttention) -> mx.array:
        """queries [rows, heads, 1, head_dim] -> what they found, [1, rows, heads * head_dim]."""
        rows = x.shape[1]
        keys = self.k_proj(x).reshape(rows, self.num_kv_heads, 1, -1)
        values = self.v_proj(x).reshape(rows, self.num_kv_heads, -1)
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        # Rope takes one offset per batch entry: each row is one, and Q and K share the sines of one call.
        turned = self.rope(mx.concatenate([queries, keys], axis=1), offset=step.positions).squeeze(2)
        queries, keys = turned[:, : self.num_heads], turned[:, self.num_heads :]
        output = step.attend(self.layer, queries, keys, values, scale=self.scale)
        return output.reshape(1, rows, -1)


class GatedAttention(PagedAttention):
    """The attention of qwen3_next and qwen3_5: each head's query comes with a gate on what it finds."""

    def __call__(self, x: mx.array, mask: Any, cache: StepAttention) -> mx.array:
        """As PagedAttention."""
        rows = x.shape[1]
        queries, gate = mx.split(self.q_proj(x).reshape(rows, self.num_heads, 1, -1), 2, axis=-1)
        found = self._attend(queries, x, cache)
        mixed: mx.array = self.o_proj(found * mx.sigmoid(gate.reshape(1, rows, -1)))
        return mixed


@dataclass(frozen=True, slots=True)
class Mixers:
    """The mixers of a model whose layers have ours, in the order of its layers."""

    layers: tuple[PagedAttention | GatedDelta, ...]

    @property
    def are_recurrent(self) -> tuple[bool, ...]:
        return tuple(isinstance(mixer, GatedDelta) for mixer in self.layers)

    @property
    def attention(self) -> tuple[PagedAttention, ...]:
        return tuple(mixer for mixer in self.layers if isinstance(mixer, PagedAttention))

    @property
    def recurrent(self) -> tuple[GatedDelta, ...]:
        return tuple(mixer for mixer in self.layers if isinstance(mixer, GatedDelta))


def swap_mixers(model: nn.Module) -> Mixers:
    """Replace the mixer of every layer of a model in place."""
    mixers: list[PagedAttention | GatedDelta] = []
    num_recurrent = 0
    for layer in model.layers:
        if "linear_attn" in layer:
            layer.linear_attn = gated_delta(layer.linear_attn, num_recurrent)
            mixers.append(layer.linear_attn)
            num_recurrent += 1
        else:
            layer.self_attn = _attention(layer.self_attn, len(mixers) - num_recurrent)
            mixers.append(layer.self_attn)
    return Mixers(tuple(mixers))


def _attention(attention: nn.Module, layer: int) -> PagedAttention:
    heads = _heads(attention)
    head_dim = attention.v_proj.weight.shape[0] // heads.kv
    is_gated = attention.q_proj.weight.shape[0] == 2 * heads.queries * head_dim
    return (GatedAttention if is_gated else PagedAttention)(attention, layer)


@dataclass(frozen=True, slots=True)
class _Heads:
    queries: int
    kv: int


def _heads(attention: nn.Module) -> _Heads:
    """mlx-lm's families call them differently."""
    if hasattr(attention, "n_heads"):
        return _Heads(attention.n_heads, attention.n_kv_heads)
    return _Heads(attention.num_attention_heads, attention.num_key_value_heads)
