"""Attention over pages in plain MLX ops: any mix of decode rows and prefill chunks, one call per layer.

Scores are kept in base 2 (log2 e is folded into the queries): on MLX's CPU backend `power(2, x)` takes half
the time of `exp` and is more exact. Each read gives partial results with their maximum; partials of a row
that took part in several reads are merged by the usual log-sum-exp rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .exponent import are_steps_fused, power_of_two
from .pages import Pools
from .reads import Read, Rows, plan_reads
from .rows import Stored

MAX_TILE_PAGES = 64
MAX_TILE_SCORES = 1 << 23
"""Of one tile and layer at the most: 32 MiB in fp32. MLX holds about a dozen such results at once."""

MASKED = -1e30
"""Finite, so that a row which sees nothing of a tile gets weight zero in the merge instead of NaN."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Unnormalised attention of some rows over some tokens: [streams, kv_heads, rows, 1 or head_dim]."""

    maximum: mx.array
    total: mx.array
    output: mx.array


@dataclass(frozen=True, slots=True)
class Tile:
    """Pages attended in one go: blocks for `Pools.read`, and what to add to the scores, or None."""

    blocks: mx.array
    mask: mx.array | None  # float32 [streams, 1, rows, tokens]


@dataclass(frozen=True, slots=True)
class PlannedRead:
    rows: mx.array | None  # int32, rows of the step; None: all of them in order
    num_rows: int
    streams: int
    tiles: tuple[Tile, ...]


class StepAttention:
    """One step's rows, places and reads: built once, then `attend` is called by each layer in turn."""

    def __init__(
        self, pools: Pools, segments: Sequence[Rows], *, queries_per_kv: int, share: bool = True
    ) -> None:
        self._pools = pools
        self._num_rows = sum(segment.num_rows for segment in segments)
        self._queries_per_kv = queries_per_kv
        self._fused = are_steps_fused()
        positions = [p for s in segments for p in range(s.start, s.start + s.num_rows)]
        self.positions = mx.array(positions, mx.int32)
        new = [range(max(s.start, s.num_sealed), s.start + s.num_rows) for s in segments]
        places = [pools.places_of(s.pages, p) for s, p in zip(segments, new, strict=True) if p]
        self._places = mx.concatenate(places) if places else None
        self._new_rows = _new_rows(segments, new)
        reads = plan_reads(segments, pools.page_tokens, share=share)
        self._reads = tuple(self._plan(read) for read in reads)
        self._merge_index = _merge_index(reads, self._num_rows)
        row = pools.row
        nothing = mx.array([MASKED, 0.0] + [0.0] * row.head_dim)
        self._nothing = mx.broadcast_to(nothing, (1, pools.num_kv_heads, queries_per_kv, nothing.size))
        group_of_column = mx.arange(row.code_columns) // (row.head_dim // row.num_groups)
        self._group_columns = (group_of_column == mx.arange(row.num_groups)[:, None]).astype(mx.float32)

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float
    ) -> mx.array:
        """Write this layer's K and V where they are new, then attend to all that the page tables hold.

        queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim], all after rope; gives
        [rows, heads, head_dim] in the queries' dtype. Lazy.
        """
        if self._places is not None:
            if self._new_rows is not None:
                keys, values = mx.take(keys, self._new_rows, axis=0), mx.take(values, self._new_rows, axis=0)
            self._pools.write(layer, self._places, keys, values)
        scaled = queries.astype(mx.float32) * (scale * math.log2(math.e))
        by_kv_head = scaled.reshape(self._num_rows, keys.shape[1], self._queries_per_kv, -1)
        partials = [self._attend_read(layer, read, by_kv_head) for read in self._reads]
        output = self._merge(partials)
        return output.reshape(queries.shape).astype(queries.dtype)

    def _plan(self, read: Read) -> PlannedRead:
        pools = self._pools
        heads = pools.num_kv_heads * self._queries_per_kv
        widest = max(1, MAX_TILE_SCORES // (len(read.rows) * heads * pools.page_tokens))
        borders = _tile_borders(read, min(widest, MAX_TILE_PAGES), pools.page_tokens)
        tiles = []
        for first, last in itertools.pairwise(borders):
            blocks = pools.blocks_of([pages[first:last] for pages in read.pages])
            mask = _mask(read, first * pools.page_tokens, last * pools.page_tokens)
            if mask is not None:
                mask = mx.repeat(mask, self._queries_per_kv, axis=2)
            tiles.append(Tile(blocks, mask))
        in_order = read.rows == tuple(range(self._num_rows))
        rows = None if in_order else mx.array(read.rows, mx.int32)
        return PlannedRead(rows, len(read.rows), read.streams, tuple(tiles))

    def _attend_read(self, layer: int, read: PlannedRead, by_kv_head: mx.array) -> Partial:
        """Partial of one read with its rows first: [rows of the read, kv_heads, queries_per_kv, ...]."""
        _, kv_heads, per_kv, head_dim = by_kv_head.shape
        per_stream = read.num_rows // read.streams
        queries = by_kv_head if read.rows is None else mx.take(by_kv_head, read.rows, axis=0)
        if per_stream > 1:
            queries = queries.reshape(read.streams, per_stream, kv_heads, per_kv, head_dim)
            queries = queries.swapaxes(1, 2).reshape(read.streams, kv_heads, per_stream * per_kv, head_dim)
        partial = None
        for tile in read.tiles:
            blocks = tile.blocks
            if partial is not None:
                # One tile after the other: MLX would else gather all of them first, a copy of the context.
                blocks = mx.depends([blocks], [partial.total, partial.output])[0]
            keys, values = self._pools.read(layer, blocks)
            tile_partial = self._attend_tile(queries, keys, values, tile.mask)
            partial = tile_partial if partial is None else _add(partial, tile_partial)
        assert partial is not None
        if per_stream == 1:
            return partial

        def rows_first(x: mx.array) -> mx.array:
            x = x.reshape(read.streams, kv_heads, per_stream, per_kv, -1).swapaxes(1, 2)
            return x.reshape(read.streams * per_stream, kv_heads, per_kv, -1)

        return Partial(rows_first(partial.maximum), rows_first(partial.total), rows_first(partial.output))

    def _attend_tile(self, queries: mx.array, keys: Stored, values: Stored, mask: mx.array | None) -> Partial:
        """queries [streams, kv_heads, rows, head_dim] over one tile of `Pools.read`."""
        row = self._pools.row
        if queries.shape[2] * row.num_groups > row.head_dim:
            keys, values = _dequantise(keys, row.head_dim), _dequantise(values, row.head_dim)
        scores = self._scores(queries, keys)
        if mask is not None:
            scores = scores + mask
        maximum = scores.max(axis=-1, keepdims=True)
        weights = power_of_two(scores - maximum, fused=self._fused)
        total = weights.sum(axis=-1, keepdims=True)
        return Partial(maximum, total, self._weighted_values(weights, values))

    def _scores(self, queries: mx.array, keys: Stored) -> mx.array:
        """[streams, kv_heads, rows, tokens] in base 2."""
        codes, scale, bias = keys.codes.swapaxes(-1, -2), keys.scale, keys.bias
        if scale is None or bias is None:
            return queries @ codes
        row = self._pools.row
        padded = mx.pad(queries, [(0, 0)] * 3 + [(0, row.code_columns - row.head_dim)])
        if row.num_groups == 1:
            return (padded @ codes) * scale + queries.sum(axis=-1, keepdims=True) * bias
        grouped = padded[:, :, None] * self._group_columns[:, None, :]
        raw = grouped.reshape(*grouped.shape[:2], -1, row.code_columns) @ codes
        raw = raw.reshape(*grouped.shape[:-1], -1)
        sums = grouped.sum(axis=-1, keepdims=True)
        return (raw * scale[..., None, :] + sums * bias[..., None, :]).sum(axis=2)

    def _weighted_values(self, weights: mx.array, values: Stored) -> mx.array:
        """[streams, kv_heads, rows, head_dim]: weights [streams, kv_heads, rows, tokens] times the values."""
        row, scale, bias = self._pools.row, values.scale, values.bias
        if scale is None or bias is None:
            return weights @ values.codes
        biases = weights @ bias.swapaxes(-1, -2)  # [streams, kv_heads, rows, groups]
        if row.num_groups == 1:
            return ((weights * scale) @ values.codes)[..., : row.head_dim] + biases
        scaled = weights[:, :, None] * scale[..., None, :]
        raw = scaled.reshape(*weights.shape[:2], -1, weights.shape[-1]) @ values.codes
        by_group = raw.reshape(*scaled.shape[:-1], -1) + biases.swapaxes(-1, -2)[..., None]
        return (by_group * self._group_columns[:, None, :]).sum(axis=2)[..., : row.head_dim]

    def _merge(self, partials: Sequence[Partial]) -> mx.array:
        """Normalised output of all rows in the step's order."""
        if self._merge_index is None:
            outputs = [partial.output / partial.total for partial in partials]
            return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        packed = [mx.concatenate([p.maximum, p.total, p.output], axis=-1) for p in partials]
        joined = mx.take(mx.concatenate([*packed, self._nothing]), self._merge_index, axis=0)
        maximum = joined[..., :1]
        weight = mx.power(2.0, maximum - maximum.max(axis=0, keepdims=True))
        summed = (joined[..., 1:] * weight).sum(axis=0)
        return summed[..., 1:] / summed[..., :1]


def _new_rows(segments: Sequence[Rows], new: Sequence[range]) -> mx.array | None:
    """int32, rows of the step at the positions whose K and V are to be written; None: all."""
    if all(len(positions) == segment.num_rows for segment, positions in zip(segments, new, strict=True)):
        return None
    rows: list[int] = []
    first = 0
    for segment, positions in zip(segments, new, strict=True):
        rows += [first + position - segment.start for position in positions]
        first += segment.num_rows
    return mx.array(rows, mx.int32)


def _tile_borders(read: Read, widest: int, page_tokens: int) -> list[int]:
    """Page indices that cut a read into tiles; what every row sees is kept apart from what needs a mask."""
    num_pages = len(read.pages[0])
    borders = [*range(0, num_pages, widest), num_pages]
    if read.lengths is not None and read.rows_per_stream > 1:
        seen_by_all = (read.lengths[0] - read.rows_per_stream + 1) // page_tokens
        borders = sorted({*borders, min(seen_by_all, num_pages)})
    return borders


def _mask(read: Read, first_token: int, last_token: int) -> mx.array | None:
    """To add to the scores of tokens [first_token, last_token): [streams, 1, rows, tokens], or None."""
    if read.lengths is None:
        return None
    visible_to_first = [length - read.rows_per_stream + 1 for length in read.lengths]
    if min(visible_to_first) >= last_token:
        return None
    visible = mx.array(visible_to_first)[:, None, None, None] + mx.arange(read.rows_per_stream)[:, None]
    tokens = mx.arange(first_token, last_token)
    return mx.where(tokens < visible, 0.0, MASKED)


def _dequantise(stored: Stored, head_dim: int) -> Stored:
    """Fold scale and bias into the values: cheaper than into the scores when rows are many."""
    if stored.scale is None or stored.bias is None:
        return stored
    scale, bias = stored.scale.swapaxes(-1, -2), stored.bias.swapaxes(-1, -2)
    codes = stored.codes[..., :head_dim]
    grouped = codes.reshape(*codes.shape[:-1], scale.shape[-1], -1)
    values = grouped * scale[..., None] + bias[..., None]
    return Stored(values.reshape(codes.shape))


def _add(left: Partial, right: Partial) -> Partial:
    maximum = mx.maximum(left.maximum, right.maximum)
    keep, gain = mx.power(2.0, left.maximum - maximum), mx.power(2.0, right.maximum - maximum)
    return Partial(maximum, left.total * keep + right.total * gain, left.output * keep + right.output * gain)


def _merge_index(reads: Sequence[Read], num_rows: int) -> mx.array | None:
    """int32 [depth, rows]: where a row's partials stand among all reads' rows; the place after them is none.

    None when every row has one partial and they come in order.
    """
    found: list[list[int]] = [[] for _ in range(num_rows)]
    position = 0
    for read in reads:
        for row in read.rows:
            found[row].append(position)
            position += 1
    if found == [[row] for row in range(num_rows)]:
        return None
    depth = max(len(places) for places in found)
    padded = [places + [position] * (depth - len(places)) for places in found]
    return mx.array(padded, mx.int32).T
