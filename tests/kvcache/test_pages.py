"""What is said of the pools is measured on their arrays."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvcache.pages import Pools
from kvcache.rows import Int8Rows, NativeRows, RowFormat, name_of_rows, row_format


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    ("bits", "dtype", "name"),
    [
        ("8", mx.float32, "int8"),
        ("8", mx.float16, "int8"),
        ("native", mx.float32, "float32"),
        ("native", mx.bfloat16, "bfloat16"),
    ],
)
def test_the_dtype_is_that_of_the_live_arrays(head_dim: int, bits: str, dtype: mx.Dtype, name: str) -> None:
    pools = Pools(row_format(bits, head_dim, dtype), num_layers=2, num_pages=3, num_kv_heads=2)
    assert pools.dtype_name == name
    assert pools.bytes_per_token == pools.nbytes / (3 * 64)


class Mislabelled(NativeRows):
    """Says int8 and stores something else."""

    def __init__(self, head_dim: int, dtype: mx.Dtype) -> None:
        super().__init__(head_dim, dtype)
        self.name = "int8"


def test_a_formats_own_word_for_itself_does_not_count() -> None:
    row: RowFormat = Mislabelled(64, mx.float16)
    assert Pools(row, num_layers=1, num_pages=2, num_kv_heads=1).dtype_name == "float16"


def test_words_of_another_width_are_not_called_int8() -> None:
    width = Int8Rows(64).width
    assert name_of_rows(mx.uint32, width, 64) == "int8"
    for dtype, wrong in ((mx.uint32, width + 1), (mx.uint8, width), (mx.float16, 65)):
        with pytest.raises(ValueError, match="store no head of 64"):
            name_of_rows(dtype, wrong, 64)
