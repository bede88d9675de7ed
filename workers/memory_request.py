"""What memory is asked for, and what one token, one state and one activation take under that.

Pure arithmetic, in bytes. Knows neither what else needs memory nor what there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvcache.settings import KVBits

from .errors import UnsupportedModel
from .shapes import ModelShape

BUS_BYTES = 256 * 2**20
"""The embedded bus's usual maxmemory."""

HeldWeights = Literal["native", "fp32"]


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """Settings that cost memory. context, pool_tokens and either states None: as is usual and as fits."""

    workers: int = 4
    context: int | None = None
    kv_bits: KVBits = "8"
    pool_tokens: int | None = None
    states: int | None = None  # checkpoints of a hybrid's recurrent state; nothing to a dense model
    small_states: int | None = None  # more of them in 8 bits; None: as many, none with native KV
    weights: HeldWeights = "native"
    bus_bytes: int = BUS_BYTES  # 0 when the bus runs elsewhere


def kv_bytes_per_token(shape: ModelShape, request: MemoryRequest) -> int:
    """K and V of one token in all attention layers. Raises UnsupportedModel for heads unfit for 8 bits."""
    if request.kv_bits == "native":
        row = shape.head_dim * compute_bytes(shape, request)
    else:
        group = 64 if shape.head_dim % 64 == 0 else 32
        if shape.head_dim % group:
            raise UnsupportedModel(
                f"8-bit KV needs heads of a multiple of 32, not {shape.head_dim}: use --kv-bits native"
            )
        row = shape.head_dim + 4 * (shape.head_dim // group)  # codes; an fp16 scale and bias for each group
    return 2 * shape.num_attention_layers * shape.num_kv_heads * row


def state_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    """One recurrent state of all layers, with the hidden row that the head would see; 0 for a dense model."""
    if shape.delta is None:
        return 0
    size = compute_bytes(shape, request)
    return shape.delta.state_bytes(size) + shape.hidden_size * size


def small_state_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    """The same of a small one; 0 for a dense model."""
    if shape.delta is None:
        return 0
    size = compute_bytes(shape, request)
    return shape.delta.small_state_bytes(size) + shape.hidden_size * size


def compute_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    """One activation."""
    return 4 if request.weights == "fp32" else shape.compute_bytes
