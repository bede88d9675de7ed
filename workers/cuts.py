"""Where a prefill is cut: into chunks, and at the positions where a checkpoint of the state is due.

Arithmetic over positions; knows neither the cache nor the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.cache import Kind

from .sharing import MIN_SHARED_TOKENS

MAX_CUTS = 3
"""Checkpoints of one prefill; its answer's end may become a fourth."""

_MERGE_TOKENS = 256
"""Two checkpoints closer than this are one: the tokens between cost less than a state."""
_LONG_TOKENS = 4096
_SHORT_OF_END_TOKENS = 1024
"""A prefill that is long leaves a checkpoint so far before the end of its last message too: clients put
reminders there that the next prompt lacks, and would else begin where this prefill began."""
_TINY_ROWS = 64
"""A pass of so few rows costs nearly what a large one does."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint that is due when a prefill reaches this position."""

    position: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a prompt that a prefill shall run, and what is known of it. Positions in tokens."""

    start: int  # restored from a checkpoint, or 0
    num_matched: int  # tokens whose pages the tree holds
    system_tokens: int  # 0: not told
    turn_tokens: int  # where the agent's next prompt is sure to part, or the prompt's length
    is_last: bool  # nobody comes back for this turn's own end
    forks: frozenset[int]  # where other turns are known to go on from
    num_allowed: int = MAX_CUTS


def due_cuts(stretch: Stretch) -> tuple[Cut, ...]:
    """Checkpoints to take in a prefill, by position. What is worth most is taken first."""
    due: list[Cut] = []

    def add(position: int, kind: Kind, *, apart: int) -> None:
        if position > stretch.start and all(abs(position - other.position) >= apart for other in due):
            due.append(Cut(position, kind))

    if not stretch.is_last:
        add(stretch.turn_tokens, Kind.TURN, apart=1)
    for position in sorted(stretch.forks, reverse=True):
        if position - stretch.start >= MIN_SHARED_TOKENS:
            add(position, Kind.BRANCH, apart=1)
    if stretch.num_matched - stretch.start > MIN_SHARED_TOKENS:
        add(stretch.num_matched, Kind.BRANCH, apart=_MERGE_TOKENS)
    add(stretch.system_tokens, Kind.SYSTEM, apart=_MERGE_TOKENS)
    if not stretch.is_last:
        short_of_end = stretch.turn_tokens - _SHORT_OF_END_TOKENS
        before = max((cut.position for cut in due if cut.position < stretch.turn_tokens), default=0)
        if short_of_end - max(before, stretch.start) >= _LONG_TOKENS:
            due.append(Cut(short_of_end, Kind.TURN))
    return tuple(sorted(due[: stretch.num_allowed], key=lambda cut: cut.position))


@dataclass(frozen=True, slots=True)
class Grid:
    """How long chunks are: about `num_rows`, never more than `max_rows`, large ones up to a page's border."""

    num_rows: int
    max_rows: int
    page_tokens: int


def chunk_end(start: int, end: int, cuts: Iterable[Cut], grid: Grid) -> int:
    """Where a chunk from `start` of a prefill up to `end` ends."""
    for cut in cuts:
        if start < cut.position < end:
            end = cut.position
            break
    num_left = end - start
    if num_left <= grid.num_rows:
        return end
    num_over = num_left - grid.num_rows
    if num_over <= min(_TINY_ROWS, grid.num_rows // 8) and num_left <= grid.max_rows:
        return end
    last = start + grid.num_rows
    border = last - last % grid.page_tokens
    is_cheap = grid.num_rows >= grid.page_tokens and border - start >= grid.num_rows // 2
    return border if is_cheap else last
