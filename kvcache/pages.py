"""The pools: one array of pages per attention layer, written by scatter and read by gather.

Knows nothing of turns or trees: page ids come in, rows go in and out. Pools live in this object's one list
and nowhere else, because a second reference to a pool makes its next write copy it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .cache import PageCopy
from .rows import RowFormat, Stored, name_of_rows


class Pools:
    """`num_layers` arrays [num_pages, 2 (K|V), num_kv_heads, page_tokens, width], kept as [rows, width]."""

    def __init__(
        self, row: RowFormat, *, num_layers: int, num_pages: int, num_kv_heads: int, page_tokens: int = 64
    ) -> None:
        self.row = row
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_tokens = page_tokens
        self._page_rows = 2 * num_kv_heads * page_tokens
        self._num_layers = num_layers
        self._layers: list[mx.array] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Drop all pages and start with zeroed ones."""
        self._layers.clear()
        shape = (self.num_pages * self._page_rows, self.row.width)
        self._layers.extend(mx.zeros(shape, self.row.dtype) for _ in range(self._num_layers))
        mx.eval(self._layers)

    def places_of(self, pages: Sequence[int], positions: Sequence[int]) -> mx.array:
        """Where a path with this page table stores tokens, for `write`: int32 [tokens, K|V * kv_heads]."""
        first = [
            pages[position // self.page_tokens] * self._page_rows + position % self.page_tokens
            for position in positions
        ]
        apart = mx.arange(2 * self.num_kv_heads, dtype=mx.int32) * self.page_tokens
        return mx.array(first, mx.int32)[:, None] + apart

    def write(self, layer: int, places: mx.array, keys: mx.array, values: mx.array) -> None:
        """Store one step's rows of one layer; lazy. keys, values: [tokens, num_kv_heads, head_dim]."""
        rows = self.row.pack(mx.concatenate([keys, values], axis=1))
        self._layers[layer][places] = rows

    def read(self, layer: int, blocks: mx.array) -> tuple[Stored, Stored]:
        """K and V of whole pages; lazy. blocks: from `blocks_of`; both [streams, kv_heads, tokens, ...]."""
        by_block = self._layers[layer].reshape(-1, self.page_tokens * self.row.width)
        rows = mx.take(by_block, blocks, axis=0)
        tokens = blocks.shape[-1] * self.page_tokens
        return self.row.unpack(rows.reshape(*blocks.shape[:-1], tokens, self.row.width))

    def blocks_of(self, pages: Sequence[Sequence[int]]) -> mx.array:
        """Page tables of equal length -> int32 [2 (K|V), streams, num_kv_heads, pages] for `read`."""
        table = mx.array([list(table) for table in pages], mx.int32)[:, None]
        block = mx.arange(2 * self.num_kv_heads, dtype=mx.int32).reshape(2, 1, self.num_kv_heads, 1)
        return table * (2 * self.num_kv_heads) + block

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in every layer and evaluate: take, eval, write keeps each pool unshared."""
        if not copies:
            return
        sources = self._rows_of([copy.source for copy in copies])
        targets = self._rows_of([copy.target for copy in copies])
        for pool in self._layers:
            taken = mx.take(pool, sources, axis=0)
            mx.eval(taken)
            pool[targets] = taken
        mx.eval(self._layers)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer and evaluate."""
        targets = self._rows_of(pages)
        for pool in self._layers:
            pool[targets] = mx.zeros((targets.size, self.row.width), self.row.dtype)
        mx.eval(self._layers)

    def _rows_of(self, pages: Sequence[int]) -> mx.array:
        first = mx.array(list(pages), mx.int32)[:, None] * self._page_rows
        return (first + mx.arange(self._page_rows, dtype=mx.int32)).reshape(-1)

    def arrays(self) -> Sequence[mx.array]:
        """For the step's one evaluation; keep no reference past it."""
        return self._layers

    @property
    def dtype_name(self) -> str:
        """What the live arrays hold: `int8`, or a dtype. Raises ValueError for rows of no known format."""
        found = {name_of_rows(pool.dtype, pool.shape[-1], self.row.head_dim) for pool in self._layers}
        if len(found) != 1:
            raise ValueError(f"the pools of the layers differ: {', '.join(sorted(found))}")
        return found.pop()

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._layers)

    @property
    def bytes_per_token(self) -> float:
        return self.nbytes / (self.num_pages * self.page_tokens)
