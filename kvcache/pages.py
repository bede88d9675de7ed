"""The pools: one array of pages per attention layer, written by scatter and read by gather.

Knows nothing of turns or trees: page ids come in, rows go in and out. Pools live in this object's one list
and nowhere else, because a second reference to a pool makes its next write copy it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .cache import PageCopy
from .rows import RowFormat, Stored

KEYS, VALUES = 0, 1


@dataclass(frozen=True, slots=True)
class Places:
    """Where a step's rows are stored: int32 [rows] page ids, and offsets within the page."""

    pages: mx.array
    offsets: mx.array

    @classmethod
    def of(cls, places: Sequence[int], page_tokens: int) -> Places:
        """places: page * page_tokens + offset of each row."""
        return cls(
            mx.array([place // page_tokens for place in places], mx.int32),
            mx.array([place % page_tokens for place in places], mx.int32),
        )


class Pools:
    """`num_layers` arrays of shape [num_pages, 2 (K|V), num_kv_heads, page_tokens, width]."""

    def __init__(
        self, row: RowFormat, *, num_layers: int, num_pages: int, num_kv_heads: int, page_tokens: int = 64
    ) -> None:
        self.row = row
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_tokens = page_tokens
        self._layers: list[mx.array] = []
        self._num_layers = num_layers
        self.rebuild()

    def rebuild(self) -> None:
        """Drop all pages and start with zeroed ones."""
        self._layers.clear()
        shape = (self.num_pages, 2, self.num_kv_heads, self.page_tokens, self.row.width)
        self._layers.extend(mx.zeros(shape, self.row.dtype) for _ in range(self._num_layers))
        mx.eval(self._layers)

    def write(self, layer: int, places: Places, keys: mx.array, values: mx.array) -> None:
        """Store one step's rows of one layer; lazy. keys, values: [rows, num_kv_heads, head_dim]."""
        rows = self.row.pack(mx.stack([keys, values], axis=1))
        pool = self._layers[layer]
        pool[places.pages, :, :, places.offsets] = rows
        self._layers[layer] = pool

    def read(self, layer: int, blocks: mx.array) -> tuple[Stored, Stored]:
        """K and V of whole pages; lazy. blocks: from `blocks_of`; both [streams, kv_heads, tokens, ...]."""
        pool = self._layers[layer]
        flat = pool.reshape(self.num_pages * 2 * self.num_kv_heads, self.page_tokens * self.row.width)
        rows = mx.take(flat, blocks, axis=0)
        tokens = blocks.shape[-1] * self.page_tokens
        # Splits and slices are views here; an index by a number would copy.
        keys, values = mx.split(rows.reshape(*blocks.shape[:-1], tokens, self.row.width), 2)
        return self.row.unpack(keys.squeeze(0)), self.row.unpack(values.squeeze(0))

    def blocks_of(self, pages: Sequence[Sequence[int]]) -> mx.array:
        """Page tables of equal length -> int32 [2 (K|V), streams, num_kv_heads, pages] for `read`."""
        table = mx.array([list(table) for table in pages], mx.int32)[None, :, None, :] * (
            2 * self.num_kv_heads
        )
        kinds = mx.array([KEYS, VALUES], mx.int32)[:, None, None, None] * self.num_kv_heads
        heads = mx.arange(self.num_kv_heads, dtype=mx.int32)[None, None, :, None]
        return table + kinds + heads

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the heads of pages in every layer and evaluate: take, eval, write keeps each pool unshared."""
        if not copies:
            return
        sources = mx.array([copy.source for copy in copies], mx.int32)
        targets = mx.array([copy.target for copy in copies], mx.int32)
        for layer in range(self._num_layers):
            taken = mx.take(self._layers[layer], sources, axis=0)
            mx.eval(taken)
            pool = self._layers[layer]
            pool[targets] = taken
            self._layers[layer] = pool
            del pool
            mx.eval(self._layers[layer])

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer and evaluate."""
        targets = mx.array(list(pages), mx.int32)
        for pool in self._layers:
            pool[targets] = mx.zeros((len(pages), *pool.shape[1:]), pool.dtype)
        mx.eval(self._layers)

    def arrays(self) -> Sequence[mx.array]:
        """For the step's one evaluation; keep no reference past it."""
        return self._layers

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._layers)

    @property
    def bytes_per_token(self) -> float:
        return self.nbytes / (self.num_pages * self.page_tokens)
