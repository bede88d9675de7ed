"""What one step shall run and what came of it: the words between the scheduler and the runner.

Knows neither MLX nor the cache's policy; everything here is frozen and lives for one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.cache import PageCopy, StateMove

from .messages import Grammar, Sampling


class Constraint(Protocol):
    """What one turn may say next: its grammar, at the place that its tokens have reached.

    It stands after all tokens that the turn has, so a step may ask it for one token: turns that have one get
    no drafts (a mask after each drafted token would need states that can be taken back).
    """

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """By token id, at least one is. Raises DeadEnd."""
        ...

    def advance(self, token_id: int) -> None:
        """Take a token that the turn has."""
        ...


class PendingConstraint(Protocol):
    """A constraint that is being built."""

    def poll(self, now: float) -> Constraint | None:
        """None as long as it is not ready. Raises TurnRefused when it cannot be had, or not in time."""
        ...


class GrammarSource(Protocol):
    """Whoever builds constraints."""

    def begin(self, grammar: Grammar, generated: Sequence[int], now: float) -> PendingConstraint:
        """For a turn that has generated these tokens. Raises TurnRefused."""
        ...


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token after a segment's last row is sampled.

    `prompt` and `generated` are the turn's own growing arrays, for the penalties: read them during the step,
    do not keep them. `generated` holds the tokens before the one to be sampled.
    """

    sampling: Sampling
    seed: int  # resolved: never None
    step: int  # index of the token to be sampled in its turn, from 0
    prompt: Sequence[int]
    generated: Sequence[int]
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class StateSave:
    """Copy a worker's live state, and the hidden row of the last row that made it, into a checkpoint row."""

    worker: int
    row: int


@dataclass(frozen=True, slots=True)
class StateRestore:
    """Copy a checkpoint row into a worker's live state and hidden row; row None: zero the live state."""

    worker: int
    row: int | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one turn at positions [start, start + len(token_ids))."""

    worker: int
    start: int
    token_ids: Sequence[int]
    pages: Sequence[int]  # page table; covers the rows, and may be longer
    row: RowSampling | None  # None: a prompt chunk that is not the last, nothing is sampled
    num_sealed: int = 0  # rows at positions below are run, but their K/V stands already: it is not written
    save: int | None = None  # checkpoint row that takes the state and the hidden row after the last row
    hidden_from: int | None = None  # no rows: the head is applied to this checkpoint row's hidden row
    num_proposed: int = (
        0  # so many of the last token_ids were drafted and may be refused; row samples after each
    )

    @property
    def end(self) -> int:
        """Position after the last row: the length of the turn's path once all rows are committed."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """One sure row that is sampled after; a prompt's last single row is one too, as it costs the same."""
        return self.row is not None and len(self.token_ids) - self.num_proposed == 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One pass over the model: decode segments first, then at most one prefill segment.

    Order inside the step: demotions, saves_before, copies, restores, the forward pass with its writes, the
    segments' saves; then one evaluation. A plan without segments only demotes and saves.
    """

    copies: tuple[PageCopy, ...]  # page copies to make before any write of this step
    segments: tuple[Segment, ...]
    restores: tuple[StateRestore, ...] = ()  # hybrid models: at most one for a worker
    saves_before: tuple[StateSave, ...] = ()  # live states that turns which left their workers leave behind
    demotions: tuple[
        StateMove, ...
    ] = ()  # checkpoints that go on in 8 bits: saves may take the rows they leave

    @property
    def num_rows(self) -> int:
        """Rows that go through the model."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_decode_rows(self) -> int:
        """Rows of the segments that decode, drafted ones included."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.is_decode)

    @property
    def num_prefill_rows(self) -> int:
        """All other rows."""
        return self.num_rows - self.num_decode_rows


@dataclass(frozen=True, slots=True)
class Candidates:
    """Token ids and their natural-log probabilities before temperature and penalties; `top` is best first."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """What one segment gave: its accepted tokens, none (not the last chunk), or a fault that is its own.

    Usually one token. After drafted rows: the drafted tokens that were right, in order, and the one that was
    sampled after them; the live state is then the one after as many rows as there are tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[Candidates, ...] = ()  # one for each token, or none at all
    fault: str | None = None
    error: str = "row_fault"  # what kind of failure a fault is
    are_rows_spoiled: bool = False  # the fault is in the pages too: nobody may share them


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's segments, and the wall time of the pass."""

    segments: tuple[SegmentResult, ...]
    seconds: float


class Runner(Protocol):
    """Whoever evaluates a plan: the model, or a fake in tests."""

    def run(self, plan: StepPlan) -> StepResult:
        """Evaluate every segment. Raises when the whole step failed: the pools are unusable then."""
        ...

    def rebuild(self) -> None:
        """Make new, empty pools."""
        ...
