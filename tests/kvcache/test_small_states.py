"""The second chance in 8 bits: who gets it, who pays for it, and what it never costs."""

from __future__ import annotations

import pytest

from kvcache.cache import StateMove
from kvcache.errors import IntegrityError

from .hybrid import Driver


def test_the_state_that_makes_room_moves_to_a_small_row_and_can_still_be_gone_on_from() -> None:
    driver = Driver(num_states=1, num_small_states=2)
    driver.run("aaaa")
    driver.run("bbbb", "bob")
    assert (driver.cached("aaaa"), driver.cached("bbbb")) == (4, 4)
    assert driver.open("aaaa").restore == 1, "numbered after the exact rows"
    stats = driver.cache.stats()
    assert (stats.num_states_demoted, stats.num_states_evicted, stats.num_checkpoints) == (1, 0, 2)
    assert (stats.num_small_states, stats.num_free_small_states) == (2, 1)


def test_a_move_is_given_out_once_and_before_the_row_it_leaves_is_filled() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    driver.run("aaaa")
    path = driver.open("bbbb", "bob").path
    assert driver.cache.take_demotions() == ()
    assert driver.cache.reserve_state(path) == 0
    assert driver.cache.take_demotions() == (StateMove(0, 1),)
    assert driver.cache.take_demotions() == ()


def test_only_the_worst_of_the_small_ones_leaves_for_good() -> None:
    driver = Driver(num_states=1, num_small_states=2)
    for text, agent in (("aaaa", "ann"), ("bbbb", "bob"), ("cccc", "cem")):
        driver.run(text, agent)
    assert driver.restored("aaaaQ", "ann") == 4
    driver.run("dddd", "dan")
    assert [driver.cached(text) for text in ("aaaa", "bbbb", "cccc", "dddd")] == [4, 0, 4, 4]
    stats = driver.cache.stats()
    assert (stats.num_states_evicted, stats.num_states_aged, stats.num_states_demoted) == (1, 1, 3)


def test_a_superseded_state_leaves_rather_than_cost_a_better_one_its_row() -> None:
    driver = Driver(num_states=3, num_small_states=1)
    driver.run("xxxx", "bob")
    driver.run("aaaa", "ann")
    driver.run("aaaabbbb", "ann")
    driver.run("aaaabbbbcccc", "ann")  # xxxx had been used longest ago; from here on aaaa is superseded
    assert driver.cache.stats().num_states_demoted == 1
    driver.run("yyyy", "cem")
    assert (driver.cached("xxxx"), driver.cached("aaaaQ")) == (4, 0)
    assert driver.cache.stats().num_states_superseded == 1


def test_a_state_of_an_agent_that_is_gone_gives_its_small_row_to_a_better_one() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    gone = driver.run("aaaa", "ann")
    driver.run("bbbb", "bob")
    driver.cache.retire(gone)
    driver.run("cccc", "cem")
    assert [driver.cached(text) for text in ("aaaa", "bbbb", "cccc")] == [0, 4, 4]
    assert driver.cache.stats().num_states_retired == 1


def test_a_free_small_row_is_nobodys_loss() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    gone = driver.run("aaaa", "ann")
    driver.cache.retire(gone)
    driver.run("bbbb", "bob")
    assert driver.cached("aaaa") == 4


def test_whoever_leaves_before_the_step_that_would_have_moved_it_moves_no_more() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    driver.run("aaaa")
    path = driver.open("bbbb", "bob").path
    driver.cache.reserve_state(path)
    driver.cache.evict(1)
    driver.cache.check_integrity()
    assert driver.cached("aaaa") == 0
    assert driver.cache.take_demotions() == ()
    assert driver.cache.stats().num_free_small_states == 1


def test_a_cancelled_turn_leaves_the_move_to_the_next_step() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    driver.run("aaaa")
    cancelled = driver.open("bbbb", "bob").path
    driver.cache.reserve_state(cancelled)
    driver.cache.close(cancelled, keep=False)
    driver.cache.check_integrity()
    assert driver.cached("aaaa") == 4
    assert driver.cache.stats().num_free_states == 1
    path = driver.open("cccc", "cem").path
    assert driver.cache.reserve_state(path) == 0
    assert driver.cache.take_demotions() == (StateMove(0, 1),)


def test_what_is_about_to_be_restored_keeps_its_row_in_either_tier() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    driver.run("aaaa")
    driver.run("bbbb", "bob")
    small, exact = driver.open("aaaaQ", "ann"), driver.open("bbbbQ", "bob")
    assert (small.restore, exact.restore) == (1, 0)
    assert driver.cache.reserve_state(exact.path) is None, "it is to be read from in the same step"
    driver.step(exact.path, "bbbbQ")
    assert driver.cache.reserve_state(exact.path) == 0, "bbbb had to leave: its second chance is being read"
    assert (driver.cached("aaaa"), driver.cached("bbbb")) == (4, 0)


def test_what_is_pinned_keeps_its_exact_row() -> None:
    driver = Driver(num_states=1, num_small_states=4)
    kept = driver.run("aaaa")
    assert driver.cache.pin(kept)
    path = driver.open("bbbb", "bob").path
    assert driver.cache.reserve_state(path) is None


def test_a_poisoned_paths_state_is_served_from_no_row() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    path = driver.open("aaaabbbb").path
    driver.keep(path, "aaaa")
    other = driver.open("cccc", "bob").path
    driver.cache.reserve_state(other)
    assert driver.cached("aaaa") == 4
    driver.cache.poison(path)
    driver.cache.check_integrity()
    assert driver.cached("aaaa") == 0
    assert driver.cache.take_demotions() == ()


def test_a_cleared_cache_has_all_rows_and_no_moves() -> None:
    driver = Driver(num_states=1, num_small_states=1)
    driver.run("aaaa")
    path = driver.open("bbbb", "bob").path
    driver.cache.reserve_state(path)
    driver.cache.close(path, keep=False)
    driver.cache.clear()
    driver.cache.check_integrity()
    stats = driver.cache.stats()
    assert (stats.num_free_states, stats.num_free_small_states) == (1, 1)
    assert driver.cache.take_demotions() == ()


@pytest.mark.parametrize("row", [0, 1])
def test_integrity_finds_a_checkpoint_in_a_row_that_is_not_its_own(row: int) -> None:
    driver = Driver(num_states=1, num_small_states=1)
    driver.run("aaaa")
    driver.run("bbbb", "bob")
    for checkpoint in driver.cache._states:
        checkpoint.row = row
    with pytest.raises(IntegrityError, match=f"page {row} has two kept owners"):
        driver.cache.check_integrity()


def test_integrity_finds_a_move_from_a_row_that_was_filled_again() -> None:
    driver = Driver(num_states=2, num_small_states=1)
    driver.run("aaaa")
    driver.run("bbbb", "bob")
    path = driver.open("cccc", "cem").path
    assert driver.cache.reserve_state(path) == 0
    assert driver.cache.reserve(path, 4)
    driver.cache.commit(path, [99] * 4)
    driver.cache.close(path, agent="cem", kind=None, keep=False)
    rows = driver.cache._states.rows
    rows._sources[2] = 1
    with pytest.raises(IntegrityError, match="from a row that another checkpoint's state is in"):
        driver.cache.check_integrity()
