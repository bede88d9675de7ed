"""Which rows read which pages: every visible token exactly once, shared pages once for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.reads import MIN_SHARED_PAGES, Read, Rows, plan_reads

PAGE = 4


def tokens_seen(reads: tuple[Read, ...], num_rows: int) -> list[list[tuple[int, int]]]:
    """(page, offset) pairs that each row attends to."""
    seen: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    for read in reads:
        for index, row in enumerate(read.rows):
            stream, place = divmod(index, read.rows_per_stream)
            tokens = [(page, offset) for page in read.pages[stream] for offset in range(PAGE)]
            if read.lengths is not None:
                tokens = tokens[: read.lengths[stream] - (read.rows_per_stream - 1 - place)]
            seen[row] += tokens
    return seen


@st.composite
def steps(draw: st.DrawFn) -> list[Rows]:
    """Segments whose page tables share leading runs as a tree of prefixes would make them.

    Some begin inside pages that they share: a hybrid's rows from a checkpoint up to what is kept run again.
    """
    segments: list[Rows] = []
    fresh = iter(range(1000))
    tables: list[list[int]] = []
    for _ in range(draw(st.integers(1, 5))):
        shared: list[int] = []
        inherits: bool = draw(st.booleans())
        if tables and inherits:
            parent = draw(st.sampled_from(tables))
            shared = parent[: draw(st.integers(0, len(parent)))]
        sealed = len(shared) * PAGE
        runs_again: bool = draw(st.booleans())
        start = draw(st.integers(0, sealed) if runs_again else st.integers(sealed, sealed + 30))
        num_rows = draw(st.sampled_from([1, 1, 1, 7]))
        num_pages = max(len(shared), -(-(start + num_rows) // PAGE))
        pages = shared + [next(fresh) for _ in range(num_pages - len(shared) + draw(st.integers(0, 1)))]
        segments.append(Rows(start, num_rows, pages, sealed))
        tables.append(pages[: max(len(shared), start // PAGE)])
    return segments


@given(steps())
def test_every_row_sees_each_token_before_it_exactly_once(segments: list[Rows]) -> None:
    num_rows = sum(segment.num_rows for segment in segments)
    seen = tokens_seen(plan_reads(segments, PAGE), num_rows)
    row = 0
    for segment in segments:
        for position in range(segment.start, segment.start + segment.num_rows):
            expected = [(segment.pages[p // PAGE], p % PAGE) for p in range(position + 1)]
            assert sorted(seen[row]) == sorted(expected)
            row += 1


def test_a_prefix_of_all_streams_is_read_once() -> None:
    prefix = list(range(10))
    segments = [Rows(10 * PAGE + 1, 1, [*prefix, 20 + index]) for index in range(4)]
    shared, own = plan_reads(segments, PAGE)
    assert shared == Read(rows=(0, 1, 2, 3), pages=(tuple(prefix),), lengths=None)
    assert own.pages == ((23,), (22,), (21,), (20,)) or own.streams == 4


def test_prefixes_of_prefixes_are_each_read_once() -> None:
    root, left, right = list(range(8)), list(range(10, 18)), list(range(20, 28))
    tables = [[*root, *left, 50], [*root, *left, 51], [*root, *right, 52], [*root, *right, 53]]
    reads = plan_reads([Rows(16 * PAGE, 1, table) for table in tables], PAGE)
    assert [read.rows for read in reads[:3]] == [(0, 1, 2, 3), (0, 1), (2, 3)]


def test_a_short_common_run_is_not_worth_a_read_of_its_own() -> None:
    prefix = list(range(MIN_SHARED_PAGES - 1))
    start = len(prefix) * PAGE
    (read,) = plan_reads([Rows(start, 1, [*prefix, 20]), Rows(start, 1, [*prefix, 21])], PAGE)
    assert read.streams == 2


def test_a_short_stream_does_not_pay_for_a_long_one() -> None:
    long_one = Rows(999, 1, list(range(250)))
    short_one = Rows(7, 1, [300, 301])
    assert [len(read.pages[0]) for read in plan_reads([long_one, short_one], PAGE)] == [250, 2]
