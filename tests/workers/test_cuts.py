from __future__ import annotations

import pytest

from kvcache.cache import Kind
from workers.cuts import Cut, Grid, Stretch, chunk_end, due_cuts


def stretch(**changes: object) -> Stretch:
    settings = {
        "start": 0,
        "num_matched": 0,
        "system_tokens": 0,
        "turn_tokens": 5000,
        "is_last": False,
        "forks": frozenset(),
    } | changes
    return Stretch(**settings)  # type: ignore[arg-type]


def test_a_prompt_is_kept_at_its_turns_end_and_at_its_system_texts() -> None:
    assert due_cuts(stretch(system_tokens=500)) == (Cut(500, Kind.SYSTEM), Cut(5000, Kind.TURN))


def test_what_was_restored_needs_no_checkpoint_before_it() -> None:
    assert due_cuts(stretch(start=700, system_tokens=500)) == (Cut(5000, Kind.TURN),)
    assert due_cuts(stretch(start=5000)) == ()


@pytest.mark.parametrize(("system", "is_kept"), [(4744, True), (4745, False)])
def test_a_checkpoint_close_to_the_turns_end_is_left_out(system: int, is_kept: bool) -> None:
    assert (Cut(system, Kind.SYSTEM) in due_cuts(stretch(system_tokens=system))) is is_kept


def test_a_fork_is_kept_however_close_to_the_turns_end_it_is() -> None:
    assert due_cuts(stretch(forks=frozenset({4950}))) == (
        Cut(4950, Kind.BRANCH),
        Cut(5000, Kind.TURN),
    )


def test_a_fork_that_saves_little_is_no_cut() -> None:
    assert due_cuts(stretch(start=4000, forks=frozenset({4500}))) == (Cut(5000, Kind.TURN),)


@pytest.mark.parametrize(("matched", "num_cuts"), [(1000, 1), (1001, 2)])
def test_pages_that_match_far_beyond_the_state_make_a_branch(matched: int, num_cuts: int) -> None:
    assert len(due_cuts(stretch(num_matched=matched))) == num_cuts


def test_there_are_three_at_most_and_the_turns_end_is_among_them() -> None:
    forks = frozenset({5000, 7000, 9000})
    cuts = due_cuts(stretch(turn_tokens=20_000, system_tokens=500, num_matched=3000, forks=forks))
    assert cuts == (Cut(7000, Kind.BRANCH), Cut(9000, Kind.BRANCH), Cut(20_000, Kind.TURN))
    assert due_cuts(stretch(num_allowed=0)) == ()


@pytest.mark.parametrize(("start", "is_kept"), [(14_880, True), (14_881, False)])
def test_a_long_prefill_is_kept_short_of_its_end_too(start: int, is_kept: bool) -> None:
    cuts = due_cuts(stretch(start=start, turn_tokens=20_000))
    assert (Cut(18_976, Kind.TURN) in cuts) is is_kept
    assert cuts[-1] == Cut(20_000, Kind.TURN)


def test_a_checkpoint_not_far_before_makes_that_needless() -> None:
    system = due_cuts(stretch(turn_tokens=20_000, system_tokens=15_000))
    assert system == (Cut(15_000, Kind.SYSTEM), Cut(20_000, Kind.TURN))
    assert due_cuts(stretch(turn_tokens=20_000, is_last=True)) == ()


def test_of_a_last_call_only_what_others_share_is_kept() -> None:
    assert due_cuts(stretch(is_last=True, system_tokens=500)) == (Cut(500, Kind.SYSTEM),)


GRID = Grid(num_rows=512, max_rows=2048, page_tokens=64)


def test_a_chunk_ends_where_a_checkpoint_is_due() -> None:
    assert chunk_end(0, 5000, [Cut(300, Kind.SYSTEM), Cut(400, Kind.TURN)], GRID) == 300
    assert chunk_end(300, 5000, [Cut(300, Kind.SYSTEM), Cut(400, Kind.TURN)], GRID) == 400


@pytest.mark.parametrize(("end", "expected"), [(512, 512), (576, 576), (577, 512), (5000, 512)])
def test_a_tiny_last_chunk_rides_with_the_one_before(end: int, expected: int) -> None:
    assert chunk_end(0, end, [], GRID) == expected


def test_the_most_rows_are_never_exceeded() -> None:
    assert chunk_end(0, 520, [], Grid(512, 512, 64)) == 512


def test_a_chunk_ends_on_a_pages_border_unless_that_costs_half_of_it() -> None:
    assert chunk_end(10, 5000, [], GRID) == 512
    assert chunk_end(10, 5000, [], Grid(40, 2048, 64)) == 50
