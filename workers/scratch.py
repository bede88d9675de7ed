"""What the activations of one step take at most, from a model's shape and the rows of the step.

Layers run one after the other and MLX frees what the one before made, so the largest counts. Pure arithmetic.
"""

from __future__ import annotations

from .shapes import DeltaShape, ExpertShape, ModelShape

_TILE_TOKENS = 4096  # of context that attention over pages scores at a time, at the most,
_TILE_SCORES = 2**23  # and the most scores of one such tile (kvcache/attention.py),
_TILES_IN_FLIGHT = 12  # of which MLX holds about so many results at once (measured on a CPU)
_SOLVED_ROWS = 64  # of one triangular system of the recurrence,
_SOLVED_COPIES = 6  # and the matrices of such systems that live at once (moe/delta.py)


def scratch_bytes(shape: ModelShape, rows: int, compute_bytes: int) -> int:
    """Bytes for a step of `rows` rows whose activations have `compute_bytes` each."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    gates = shape.num_heads * shape.head_dim if shape.delta else 0
    mixer = (2 * heads + 2 * gates) * compute_bytes
    if shape.delta is not None:
        mixer = max(mixer, _delta_row(shape.delta, compute_bytes))
    block = 3 * shape.intermediate_size * compute_bytes
    if shape.experts is not None:
        block = max(block, _expert_row(shape.experts, shape.hidden_size, compute_bytes))
    scores = _TILES_IN_FLIGHT * 4 * min(rows * shape.num_heads * _TILE_TOKENS, _TILE_SCORES)
    masks = 4 * rows * rows * (shape.num_heads // shape.num_kv_heads)  # of a chunk among its own tokens
    return rows * (4 * shape.hidden_size * compute_bytes + mixer + block) + scores + masks


def _delta_row(delta: DeltaShape, compute_bytes: int) -> int:
    """Projections, the convolution and what it gives; in fp32 the recurrence's rows and its systems."""
    projected = 2 * delta.keys + 2 * delta.values + 2 * delta.num_value_heads
    solved = 4 * delta.keys + 4 * delta.values + _SOLVED_COPIES * _SOLVED_ROWS * delta.num_value_heads
    return (projected + 2 * delta.channels) * compute_bytes + 4 * solved


def _expert_row(experts: ExpertShape, hidden_size: int, compute_bytes: int) -> int:
    """Inputs and outputs of the chosen experts, sorted and not, and their inner rows; the shared one's."""
    chosen = experts.per_token * (4 * hidden_size + 3 * experts.intermediate_size)
    shared = 3 * experts.shared_intermediate_size + hidden_size if experts.shared_intermediate_size else 0
    return (chosen + shared + experts.num_experts) * compute_bytes
