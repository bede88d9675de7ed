"""Which rows of a step read which pages: pure planning for attention, done once a step for all layers.

A whole page below the first rows of several segments is full, sealed and older than all these rows, so they
may attend to it at once without a mask. What is left of each segment is read by its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_SHARED_PAGES = 4
"""Below this a shared read costs more in merging than it saves in gathering."""

MAX_PADDING = 1.25
"""Decode reads are batched while the padded size stays under this multiple of the real one."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One segment as attention sees it: `num_rows` rows, one or more, at positions [start, start + num_rows).

    Rows at positions below num_sealed read what stands in their pages already, and write nothing.
    """

    start: int
    num_rows: int
    pages: Sequence[int]
    num_sealed: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """Rows of the flattened step that attend to pages; `rows` holds `streams` groups of equal size in order.

    lengths: valid tokens in each stream's pages for the *last* row of its group; with several rows a group is
    causal: row i of n sees n - 1 - i tokens fewer. None: every row sees every token.
    """

    rows: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] | None

    @property
    def streams(self) -> int:
        return len(self.pages)

    @property
    def rows_per_stream(self) -> int:
        return len(self.rows) // len(self.pages)


def plan_reads(segments: Sequence[Rows], page_tokens: int, *, share: bool = True) -> tuple[Read, ...]:
    """Cover every (row, visible token) pair of a step exactly once; share: common pages are read once."""
    first_rows: list[int] = []
    total = 0
    for segment in segments:
        first_rows.append(total)
        total += segment.num_rows
    shared: list[Read] = []
    own_from = [0] * len(segments)
    if share and len(segments) > 1:
        # A sealed page may hold rows that a segment runs again; only what lies before its rows is common.
        older = [segment.pages[: segment.start // page_tokens] for segment in segments]
        row_ranges = [
            range(first, first + segment.num_rows)
            for first, segment in zip(first_rows, segments, strict=True)
        ]
        _share(older, row_ranges, own_from, list(range(len(segments))), 0, shared)
    suffixes: list[Read] = []
    for index, segment in enumerate(segments):
        end = segment.start + segment.num_rows
        skip = own_from[index]
        pages = tuple(segment.pages[skip : -(-end // page_tokens)])
        rows = tuple(range(first_rows[index], first_rows[index] + segment.num_rows))
        suffixes.append(Read(rows=rows, pages=(pages,), lengths=(end - skip * page_tokens,)))
    return (*shared, *_batch_single_rows(suffixes))


def _share(
    tables: Sequence[Sequence[int]],
    row_ranges: Sequence[range],
    own_from: list[int],
    group: list[int],
    depth: int,
    reads: list[Read],
) -> None:
    """Emit reads for runs of pages that all of a group have from `depth` on, then for its sub-groups."""
    if len(group) < 2:
        return
    run = _common_run([tables[index] for index in group], depth)
    if run >= MIN_SHARED_PAGES:
        rows = tuple(row for index in group for row in row_ranges[index])
        pages = tuple(tables[group[0]][depth : depth + run])
        reads.append(Read(rows=rows, pages=(pages,), lengths=None))
        depth += run
        for index in group:
            own_from[index] = depth
        run = 0
    parting = depth + run
    by_next: dict[int, list[int]] = {}
    for index in group:
        if len(tables[index]) > parting:
            by_next.setdefault(tables[index][parting], []).append(index)
    for sub_group in by_next.values():
        _share(tables, row_ranges, own_from, sub_group, depth, reads)


def _common_run(tables: Sequence[Sequence[int]], depth: int) -> int:
    run = 0
    shortest = min(len(table) for table in tables)
    first = tables[0]
    while depth + run < shortest and all(table[depth + run] == first[depth + run] for table in tables):
        run += 1
    return run


def _batch_single_rows(reads: Sequence[Read]) -> list[Read]:
    """Join one-row reads of similar size into batches; longer ones never make shorter ones pay."""
    singles = sorted((read for read in reads if len(read.rows) == 1), key=lambda read: len(read.pages[0]))
    joined = [read for read in reads if len(read.rows) > 1]
    batch: list[Read] = []
    for read in reversed(singles):
        sizes = [len(other.pages[0]) for other in batch] + [len(read.pages[0])]
        if batch and max(sizes) * len(sizes) > MAX_PADDING * sum(sizes) + 8:
            joined.append(_join(batch))
            batch = []
        batch.append(read)
    if batch:
        joined.append(_join(batch))
    return joined


def _join(reads: Sequence[Read]) -> Read:
    widest = max(len(read.pages[0]) for read in reads)
    pages = tuple(read.pages[0] + (read.pages[0][-1],) * (widest - len(read.pages[0])) for read in reads)
    lengths = tuple(read.lengths[0] for read in reads if read.lengths is not None)
    return Read(rows=tuple(read.rows[0] for read in reads), pages=pages, lengths=lengths)
