"""Row formats: how one token's K or V of one head is stored in a page, and how attention reads it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

CODES_PER_WORD = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows read back for attention, as factors: value[i] = codes[i] * scale[group of i] + bias[group of i].

    codes: float32 [..., tokens, width]; columns from head_dim on are junk that the caller multiplies by zero.
    scale, bias: float32 [..., groups, tokens], or None when codes are the values themselves.
    """

    codes: mx.array
    scale: mx.array | None = None
    bias: mx.array | None = None


class RowFormat(Protocol):
    """A format has a storage dtype, a row width in that dtype, and both directions."""

    name: str
    dtype: mx.Dtype
    head_dim: int
    width: int
    num_groups: int
    code_columns: int  # width of `Stored.codes`

    def pack(self, values: mx.array) -> mx.array:
        """[..., head_dim] in the compute dtype -> [..., width] in `dtype`."""

    def unpack(self, rows: mx.array) -> tuple[Stored, Stored]:
        """K and V as stored, [2, ..., tokens, width] -> factors for attention of each."""


class NativeRows:
    """Rows in the compute dtype: for parity tests and for machines with memory to spare."""

    num_groups = 1

    def __init__(self, head_dim: int, dtype: mx.Dtype) -> None:
        self.name = str(dtype).removeprefix("mlx.core.")
        self.dtype = dtype
        self.head_dim = head_dim
        self.width = self.code_columns = head_dim

    def pack(self, values: mx.array) -> mx.array:
        return values.astype(self.dtype)

    def unpack(self, rows: mx.array) -> tuple[Stored, Stored]:
        # Splits are views here; an index by a number would copy.
        keys, values = mx.split(rows.astype(mx.float32), 2)
        return Stored(keys.squeeze(0)), Stored(values.squeeze(0))


class Int8Rows:
    """Affine 8-bit codes in groups along head_dim, then fp16 scales, then fp16 biases, all in uint32 words.

    The format is MLX's own affine quantisation (`mx.quantize`, bits=8) of the fp16 value, its three parts in
    one row; groups are 64 wide, 32 where 64 does not divide head_dim.
    """

    dtype = mx.uint32

    def __init__(self, head_dim: int) -> None:
        self.name = "int8"
        self.head_dim = head_dim
        self.group_size = 64 if head_dim % 64 == 0 else 32
        if head_dim % self.group_size:
            raise ValueError(
                f"head_dim {head_dim} is not a multiple of 32: 8-bit KV cannot store it; use --kv-bits native"
            )
        self.num_groups = head_dim // self.group_size
        self.code_words = head_dim // CODES_PER_WORD
        self.width = self.code_words + self.num_groups
        self.code_columns = self.width * CODES_PER_WORD

    def pack(self, values: mx.array) -> mx.array:
        codes, scale, bias = mx.quantize(values.astype(mx.float16), group_size=self.group_size, bits=8)
        affine = mx.concatenate([scale, bias], axis=-1).view(mx.uint32)
        return mx.concatenate([codes, affine], axis=-1)

    def unpack(self, rows: mx.array) -> tuple[Stored, Stored]:
        # Casting whole rows costs less than cutting the codes out first; the affine words become junk.
        codes = mx.split(rows.view(mx.uint8).astype(mx.float32), 2)
        halves = rows.view(mx.float16)[..., 2 * self.code_words :]
        affine = mx.split(halves.swapaxes(-1, -2).astype(mx.float32), 2)
        return (self._stored(codes[0], affine[0]), self._stored(codes[1], affine[1]))

    def _stored(self, codes: mx.array, affine: mx.array) -> Stored:
        scale, bias = mx.split(affine.squeeze(0), 2, axis=-2)
        return Stored(codes.squeeze(0), scale, bias)


def row_format(bits: str, head_dim: int, compute_dtype: mx.Dtype) -> RowFormat:
    """The format for a `bits` setting: `8` or `native`. Raises ValueError for a head_dim it cannot store."""
    return Int8Rows(head_dim) if bits == "8" else NativeRows(head_dim, compute_dtype)


def name_of_rows(dtype: mx.Dtype, width: int, head_dim: int) -> str:
    """The format's name by an array's own dtype and row width. Raises ValueError: they are no format's."""
    formats: list[RowFormat] = [NativeRows(head_dim, dtype)]
    if head_dim % 32 == 0:
        formats.append(Int8Rows(head_dim))
    for row in formats:
        if (row.dtype, row.width) == (dtype, width):
            return row.name
    raise ValueError(f"rows of {width} x {dtype} store no head of {head_dim}")
