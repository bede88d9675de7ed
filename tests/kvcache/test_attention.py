"""Attention over pages against dense attention over the same stored values, and what a step may cost."""

from __future__ import annotations

import random
from dataclasses import dataclass

import mlx.core as mx
import pytest

from kvcache.attention import StepAttention
from kvcache.cache import PageCopy
from kvcache.pages import Pools
from kvcache.reads import Rows
from kvcache.rows import Int8Rows, row_format

PAGE = 64
HEADS = [(64, 3, 3), (96, 2, 1), (128, 2, 2), (192, 1, 2), (256, 2, 4)]  # head_dim, kv heads, queries each


@dataclass(frozen=True)
class Stream:
    """`context` tokens were stored before, `num_rows` come in this step; leading pages may be shared."""

    context: int
    num_rows: int
    shared_pages: int = 0


STEPS = {
    "first token": [Stream(0, 1)],
    "page border": [Stream(64, 64)],
    "prefill and decode": [Stream(65, 1), Stream(0, 200)],
    "ragged decode": [Stream(1700, 1), Stream(300, 1), Stream(63, 1)],
    "shared prefix": [Stream(1700, 1, 9), Stream(1300, 1, 9), Stream(700, 1, 5), Stream(640, 130, 9)],
}


def stored(pools: Pools, values: mx.array) -> mx.array:
    """[tokens, kv_heads, head_dim] as it reads back after storing: [1, kv_heads, tokens, head_dim]."""
    row = pools.row
    if not isinstance(row, Int8Rows):
        return values.transpose(1, 0, 2)[None]
    words, scale, bias = mx.quantize(values.astype(mx.float16), group_size=row.group_size, bits=8)
    scale, bias = scale.astype(mx.float32), bias.astype(mx.float32)
    return mx.dequantize(words, scale, bias, group_size=row.group_size, bits=8).transpose(1, 0, 2)[None]


def worst_difference(bits: str, heads: tuple[int, int, int], streams: list[Stream]) -> float:
    head_dim, kv_heads, per_kv = heads
    rnd = random.Random(3)
    mx.random.seed(3)
    pools = Pools(row_format(bits, head_dim, mx.float32), num_layers=1, num_pages=300, num_kv_heads=kv_heads)
    free = rnd.sample(range(300), 300)
    num_shared = max(stream.shared_pages for stream in streams)
    shared = [free.pop() for _ in range(num_shared)]
    common = mx.random.normal((2, num_shared * PAGE, kv_heads, head_dim))
    segments, keys, values = [], [], []
    for stream in streams:
        length, sealed = stream.context + stream.num_rows, stream.shared_pages * PAGE
        pages = shared[: stream.shared_pages] + [free.pop() for _ in range(sealed, length + PAGE, PAGE)]
        both = mx.concatenate(
            [common[:, :sealed], mx.random.normal((2, length - sealed, kv_heads, head_dim))], axis=1
        )
        segments.append(Rows(stream.context, stream.num_rows, pages))
        keys.append(both[0])
        values.append(both[1])
        if stream.context:
            places = pools.places_of(pages, range(stream.context))
            pools.write(0, places, both[0, : stream.context], both[1, : stream.context])
            mx.eval(pools.arrays())
    queries = mx.random.normal((sum(s.num_rows for s in streams), kv_heads * per_kv, head_dim))
    new = [slice(stream.context, None) for stream in streams]
    output = StepAttention(pools, segments, queries_per_kv=per_kv).attend(
        0,
        queries,
        mx.concatenate([k[s] for k, s in zip(keys, new, strict=True)]),
        mx.concatenate([v[s] for v, s in zip(values, new, strict=True)]),
        scale=head_dim**-0.5,
    )
    mx.eval(output, *pools.arrays())
    worst, first = 0.0, 0
    for stream, k, v in zip(streams, keys, values, strict=True):
        own = slice(first, first + stream.num_rows)
        seen = mx.arange(k.shape[0])[None] <= mx.arange(stream.context, k.shape[0])[:, None]
        expected = mx.fast.scaled_dot_product_attention(
            queries[own].transpose(1, 0, 2)[None],
            stored(pools, k),
            stored(pools, v),
            scale=head_dim**-0.5,
            mask=seen,
        )[0].transpose(1, 0, 2)
        worst = max(worst, float(mx.abs(expected - output[own]).max()))
        first += stream.num_rows
    return worst


@pytest.mark.parametrize("streams", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"head_dim {heads[0]}")
@pytest.mark.parametrize("bits", ["8", "native"])
def test_attention_over_pages_equals_dense_attention(
    bits: str, heads: tuple[int, int, int], streams: list[Stream]
) -> None:
    assert worst_difference(bits, heads, streams) < 1e-5


def test_long_contexts_are_tiled_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.attention.MAX_TILE_PAGES", 3)
    streams = [Stream(1500, 1), Stream(900, 1), Stream(600, 200)]
    assert worst_difference("8", (64, 2, 2), streams) < 1e-5


def test_garbage_beyond_a_streams_length_never_reaches_it() -> None:
    pools = Pools(row_format("8", 64, mx.float32), num_layers=1, num_pages=4, num_kv_heads=1)
    huge = mx.full((128, 1, 64), 60000.0)
    pools.write(0, pools.places_of([0, 1], range(128)), huge, huge)
    mx.eval(pools.arrays())
    row = mx.ones((1, 1, 64))
    output = StepAttention(pools, [Rows(0, 1, [0, 1])], queries_per_kv=1).attend(0, row, row, row, scale=0.1)
    assert float(mx.abs(output - 1).max()) < 0.01


def test_a_head_that_eight_bits_cannot_store_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"head_dim 80 .* --kv-bits native"):
        row_format("8", 80, mx.float32)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_row_takes_the_promised_bytes(head_dim: int) -> None:
    row = Int8Rows(head_dim)
    assert row.pack(mx.ones((1, head_dim))).nbytes == head_dim + 4 * (head_dim // row.group_size)


def test_page_copies_take_all_layers_and_leave_the_source() -> None:
    pools = Pools(row_format("8", 64, mx.float32), num_layers=2, num_pages=3, num_kv_heads=1)
    values = mx.random.normal((10, 1, 64))
    for layer in range(2):
        pools.write(layer, pools.places_of([0], range(10)), values, values)
    pools.copy([PageCopy(source=0, target=2, num_tokens=10)])
    for layer in range(2):
        source, target = (pools.read(layer, pools.blocks_of([[page]])) for page in (0, 2))
        assert mx.array_equal(source[0].codes, target[0].codes)
        assert mx.array_equal(source[1].codes, target[1].codes)


@pytest.mark.parametrize("bits", ["8", "native"])
def test_no_step_grows_peak_memory_by_a_pool(bits: str) -> None:
    pools = Pools(row_format(bits, 64, mx.float32), num_layers=2, num_pages=4000, num_kv_heads=2)
    one_layer = pools.nbytes // 2
    table = [list(range(first, first + 20)) for first in (0, 20, 40, 60)]

    def step(context: int, num_rows: int) -> None:
        segments = [Rows(context, 1, pages) for pages in table[1:]] + [Rows(context, num_rows, table[0])]
        attention = StepAttention(pools, segments, queries_per_kv=1)
        x = mx.ones((3 + num_rows, 2, 64))
        for layer in range(2):
            x = attention.attend(layer, x, x, x, scale=0.1)
        mx.eval(x, *pools.arrays())

    step(700, 64)
    pools.copy([PageCopy(source=1, target=100, num_tokens=5)])
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    step(764, 64)
    pools.copy([PageCopy(source=2, target=101, num_tokens=5)])
    pools.clear([102])
    step(828, 1)
    assert mx.get_peak_memory() - before < one_layer / 2


@pytest.mark.parametrize("num_rows", [1, 16])
def test_attention_needs_no_more_memory_at_four_times_the_depth(num_rows: int) -> None:
    """A dense copy of the whole context would: K and V of all tiles gathered before the first is used."""
    pools = Pools(Int8Rows(64), num_layers=1, num_pages=2048, num_kv_heads=2)

    def peak_bytes(num_pages: int) -> int:
        rows = Rows(start=num_pages * 64 - num_rows, num_rows=num_rows, pages=range(num_pages))
        step = StepAttention(pools, [rows], queries_per_kv=2)
        output = step.attend(0, mx.ones((num_rows, 4, 64)), *[mx.ones((num_rows, 2, 64))] * 2, scale=0.1)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(output, *pools.arrays())
        return int(mx.get_peak_memory() - before)

    assert peak_bytes(2048) < 1.3 * peak_bytes(512)
