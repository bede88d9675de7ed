"""Where a hybrid's turn goes on, what it keeps, and what is never rewritten."""

from __future__ import annotations

import pytest

from kvcache.cache import Cache, Kind, PageCopy
from kvcache.errors import IntegrityError, StateNotReserved

from .hybrid import Driver, ids


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_turn_without_a_checkpoint_begins_at_zero_and_shares_the_pages(driver: Driver) -> None:
    driver.run_bare("aaaabbbbcc")
    opening = driver.open("aaaabbbbccdd")
    path = opening.path
    assert (opening.restore, opening.copy) == (None, None)
    assert (path.num_tokens, path.num_cached, path.num_sealed, path.pages) == (0, 0, 8, [0, 1])


def test_a_turn_goes_on_from_the_deepest_checkpoint(driver: Driver) -> None:
    path = driver.open("aaaabbbbccccdddd").path
    for text in ("aaaa", "aaaabbbbcc", "aaaabbbbccccdddd"):
        driver.keep(path, text)
    driver.cache.close(path)
    assert driver.restored("aaaabbbbccccdddd") == 16
    assert driver.restored("aaaabbbbccccddXX") == 10
    assert driver.restored("aaaabbbbcX") == 4
    assert driver.restored("aaaX") == 0


@pytest.mark.parametrize(("max_match", "num_cached"), [(10, 10), (9, 4), (4, 4), (3, 0), (0, 0), (-1, 0)])
def test_a_restore_is_as_deep_as_it_may_be(driver: Driver, max_match: int, num_cached: int) -> None:
    path = driver.open("aaaabbbbcc").path
    driver.keep(path, "aaaa")
    driver.keep(path, "aaaabbbbcc")
    driver.cache.close(path)
    assert driver.open("aaaabbbbcc", max_match=max_match).path.num_cached == num_cached


def test_an_identical_replay_has_nothing_left_to_run(driver: Driver) -> None:
    driver.run("aaaabbbbcc")
    opening = driver.open("aaaabbbbcc")
    assert opening.path.num_tokens == 10
    assert opening.copy == PageCopy(source=2, target=3, num_tokens=2)
    assert opening.restore is not None


def test_tokens_between_checkpoint_and_match_are_committed_without_new_pages(driver: Driver) -> None:
    path = driver.open("aaaabbbbcccc").path
    driver.keep(path, "aaaabb")
    driver.step(path, "aaaabbbbcccc")
    driver.cache.close(path)
    num_tree = driver.cache.stats().num_tree
    path = driver.open("aaaabbbbcccc").path
    assert (path.num_tokens, path.num_sealed, len(path.pages)) == (6, 12, 3)
    for text in ("aaaabbb", "aaaabbbbccc", "aaaabbbbcccc"):
        driver.step(path, text)
        driver.cache.publish(path)
    assert not path.pending
    driver.cache.close(path)
    assert (driver.cache.stats().num_tree, driver.cache.stats().num_live) == (num_tree, 0)


def test_a_checkpoint_between_sealed_rows_needs_no_page(driver: Driver) -> None:
    driver.run_bare("aaaabbbbcccc")
    path = driver.open("aaaabbbbccccdd").path
    assert driver.keep(path, "aaaabb") is None
    assert driver.keep(path, "aaaabbbb") is None
    assert path.pages == [0, 1, 2]
    assert driver.cached("aaaabbX") == 6
    assert driver.cached("aaaabbbbX") == 8


def test_inside_a_page_the_path_goes_on_in_a_copy(driver: Driver) -> None:
    path = driver.open("aaaabbcc").path
    copy = driver.keep(path, "aaaabb")
    assert copy == PageCopy(source=1, target=2, num_tokens=2)
    assert path.pages == [0, 2]
    assert driver.cache.evict(99) == 0, "the copy has not run"
    assert driver.cached("aaaabbX") == 6
    driver.step(path, "aaaabbc")
    driver.cache.close(path)
    assert driver.cached("aaaabbX") == 6


def test_a_tail_leaves_when_a_whole_page_holds_its_tokens_and_its_checkpoint_moves(driver: Driver) -> None:
    path = driver.open("aaaabbcc").path
    driver.keep(path, "aaaabb")
    driver.step(path, "aaaabbcc")
    driver.cache.publish(path)
    assert driver.cache.stats().num_tree == 2
    assert driver.cached("aaaabbX") == 6
    driver.cache.close(path)
    opening = driver.open("aaaabbX")
    assert opening.copy == PageCopy(source=2, target=1, num_tokens=2)


def test_a_checkpoint_beside_the_matched_pages_is_found_and_kept_until_it_is_restored(driver: Driver) -> None:
    path = driver.open("aaaabbcc").path
    driver.keep(path, "aaaabb")
    driver.step(path, "aaaabbcc")
    driver.cache.close(path)
    driver.run_bare("aaaabbdd")  # the checkpoint lies in the page of "bbcc"
    opening = driver.open("aaaabbddX")
    assert (opening.path.num_tokens, opening.path.num_sealed, opening.copy) == (6, 8, None)
    driver.cache.evict(99)
    driver.cache.check_integrity()
    assert driver.cached("aaaabbX") == 6
    driver.step(opening.path, "aaaabbddX")
    driver.cache.evict(99)
    driver.cache.check_integrity()
    assert driver.cached("aaaabbX") == 0


def test_a_checkpoint_beside_the_matched_pages_keeps_no_more_than_its_page(driver: Driver) -> None:
    driver.run_bare("aaaabbccddddeeee")
    driver.run_bare("aaaabbdd")
    path = driver.open("aaaabb").path
    driver.keep(path, "aaaabb")  # in the page of "bbcc"
    driver.cache.close(path)
    opening = driver.open("aaaabbddX")
    assert (opening.path.num_tokens, opening.path.num_sealed) == (6, 8)
    driver.cache.evict(99)
    assert driver.cache.stats().num_tree == 3
    driver.cache.check_integrity()


def test_a_second_checkpoint_at_a_position_gives_its_row_back(driver: Driver) -> None:
    driver.run("aaaabb", "ann")
    path = driver.open("aaaabb", "bob", max_match=3).path
    assert driver.keep(path, "aaaabb") is None
    assert (driver.cache.stats().num_checkpoints, driver.cache.stats().num_free_states) == (1, 7)


def test_without_a_page_to_go_on_in_no_checkpoint_is_kept() -> None:
    driver = Driver(num_pages=2)
    path = driver.open("aaaabb").path
    assert driver.keep(path, "aaaabb") is None
    assert (driver.cache.stats().num_checkpoints, driver.cache.stats().num_free_states) == (0, 8)
    assert path.pages == [0, 1]
    driver.step(path, "aaaabbcc")
    assert driver.cache.reserve_state(path) is not None
    driver.cache.close(path, kind=Kind.GENERATED, agent="ann")
    assert driver.cached("aaaabbcc") == 8, "a path that ends needs none"


def test_without_a_page_for_the_copy_a_turn_begins_at_a_shallower_checkpoint() -> None:
    driver = Driver(num_pages=2)
    path = driver.open("aaaabb").path
    driver.keep(path, "aaaa")
    assert driver.cache.reserve_state(path) is not None
    driver.step(path, "aaaabb")
    driver.cache.close(path, kind=Kind.TURN, agent="ann")
    assert driver.cached("aaaabb") == 6
    opening = driver.open("aaaabb")
    assert (opening.path.num_tokens, opening.copy, opening.path.pages) == (4, None, [0])


def test_a_reserved_row_that_was_never_filled_is_given_back_at_the_end(driver: Driver) -> None:
    for end in (driver.cache.close, driver.cache.poison, driver.cache.drop_state):
        path = driver.open("aaaabb").path
        row = driver.cache.reserve_state(path)
        assert row == driver.cache.reserve_state(path) == path.state_row
        end(path)
        assert driver.cache.stats().num_free_states == 8
    assert driver.cache.stats().num_checkpoints == 0


def test_a_checkpoint_needs_a_reserved_row(driver: Driver) -> None:
    path = driver.open("aaaa").path
    driver.step(path, "aaaa")
    with pytest.raises(StateNotReserved, match="call reserve_state before the step"):
        driver.cache.keep_state(path, Kind.TURN, "ann")


def test_a_turn_that_ends_before_its_first_step_keeps_no_page_that_was_not_copied(driver: Driver) -> None:
    driver.run("aaaabb")
    path = driver.open("aaaabbX").path
    driver.cache.evict(99)
    assert driver.cache.reserve_state(path) is not None
    driver.cache.close(path, kind=Kind.BORDER, agent="ann")
    driver.cache.check_integrity()
    assert driver.cache.stats().num_tree == 2
    assert driver.cache.stats().num_checkpoints == 1


def test_a_restored_row_is_not_given_to_another_before_it_was_copied() -> None:
    driver = Driver(num_states=1)
    driver.run("aaaabb")
    user = driver.open("aaaabbcc").path
    other = driver.open("X").path
    assert driver.cache.reserve_state(other) is None
    driver.step(user, "aaaabbc")
    assert driver.cache.reserve_state(other) is not None
    driver.cache.check_integrity()


def test_a_partial_page_without_a_state_is_not_kept(driver: Driver) -> None:
    driver.run_bare("aaaabb")
    assert (driver.cache.stats().num_tree, driver.matched("aaaabb")) == (1, 4)


def test_a_tail_leaves_with_its_checkpoint_and_other_pages_stay() -> None:
    driver = Driver(num_states=1)
    driver.run("aaaabb")
    driver.run("ccccdddd")
    assert driver.matched("aaaabb") == 4
    driver.run("eeee")
    stats = driver.cache.stats()
    assert driver.matched("ccccdddd") == 8
    assert (stats.num_states_evicted, stats.num_states_aged, stats.num_evicted_tails) == (2, 2, 1)


def test_a_shortened_leaf_loses_the_checkpoints_of_its_lost_pages(driver: Driver) -> None:
    path = driver.open("aaaabbbbcccc").path
    driver.keep(path, "aaaabbb")
    driver.keep(path, "aaaabbbbcccc")
    driver.cache.close(path)
    driver.cache.evict(1)
    driver.cache.check_integrity()
    assert driver.cached("aaaabbbbcccc") == 7
    assert driver.cache.stats().num_states_lost == 1


def test_pages_behind_the_last_checkpoint_leave_first_then_the_oldest(driver: Driver) -> None:
    driver.run("aaaabbbb")
    path = driver.open("ccccddddeeee").path
    driver.keep(path, "ccccdddd")
    driver.step(path, "ccccddddeeee")
    driver.cache.close(path)
    driver.cache.evict(1)
    assert driver.matched("ccccddddeeee") == 8
    driver.cache.evict(1)
    assert (driver.matched("aaaabbbb"), driver.cached("ccccdddd")) == (4, 8)
    driver.cache.evict(1)
    assert (driver.matched("aaaabbbb"), driver.cached("ccccdddd")) == (0, 8)
    stats = driver.cache.stats()
    assert (stats.num_evicted_bare, stats.num_evicted_aged) == (2, 1)


def test_a_poisoned_paths_checkpoints_are_never_restored(driver: Driver) -> None:
    driver.run_bare("aaaabbbb", "ann")
    faulty = driver.open("aaaabbbbcc", "bob").path
    driver.keep(faulty, "aaaabb")  # lies in a page of ann's
    driver.keep(faulty, "aaaabbbbcc")
    driver.cache.poison(faulty)
    driver.cache.check_integrity()
    assert (driver.matched("aaaabbbbcc"), driver.cached("aaaabbbbcc")) == (8, 0)
    assert driver.cache.stats().num_free_states == 8


def test_what_went_on_from_a_poisoned_checkpoint_goes_too(driver: Driver) -> None:
    driver.run_bare("aaaabbbb", "ann")
    faulty = driver.open("aaaabbbb", "bob").path
    driver.keep(faulty, "aaaabb")
    ended = driver.open("aaaabbYY", "cem").path  # shares ann's pages only, but bob's state
    driver.keep(ended, "aaaabbYY")
    driver.cache.close(ended)
    running = driver.open("aaaabbYYZ", "dan").path
    assert running.num_cached == 8
    driver.cache.poison(faulty)
    driver.cache.check_integrity()
    assert (driver.matched("aaaabbYY"), driver.cached("aaaabbYY")) == (6, 0)
    driver.step(running, "aaaabbYYZ")
    assert driver.cache.reserve_state(running) is None
    driver.cache.close(running)
    driver.cache.check_integrity()
    assert driver.matched("aaaabbYYZ") == 6


@pytest.mark.parametrize(("has_run", "num_cached"), [(False, 0), (True, 6)])
def test_a_checkpoint_goes_with_the_path_that_failed_in_the_step_behind_it(
    driver: Driver, has_run: bool, num_cached: int
) -> None:
    driver.run("aaaabb", "ann")
    path = driver.open("aaaabbcc", "bob").path
    assert path.num_cached == 6
    if has_run:
        driver.step(path, "aaaabbc")
    driver.cache.poison(path)
    driver.cache.check_integrity()
    assert driver.cached("aaaabb") == num_cached
    assert driver.matched("aaaa") == 4


def test_a_row_that_is_being_restored_when_it_is_poisoned_is_not_rewritten() -> None:
    driver = Driver(num_states=1)
    faulty = driver.open("aaaabb", "bob").path
    driver.keep(faulty, "aaaabb")
    user = driver.open("aaaabbX", "cem").path
    driver.cache.poison(faulty)
    driver.cache.check_integrity()
    other = driver.open("Y").path
    assert driver.cache.reserve_state(other) is None
    driver.cache.close(user)
    driver.cache.check_integrity()
    assert driver.cache.reserve_state(other) is not None


def test_without_rows_pages_are_shared_and_nothing_is_restored() -> None:
    driver = Driver(num_states=0)
    driver.run_bare("aaaabbbb")
    path = driver.open("aaaabbbb").path
    assert (path.num_tokens, path.num_sealed) == (0, 8)
    assert driver.cache.reserve_state(path) is None


def test_a_dense_cache_has_no_states() -> None:
    cache = Cache(8, page_tokens=4)
    path = cache.open(b"", ids("aaaa"), max_match=4).path
    assert cache.reserve_state(path) is None
    cache.drop_state(path)
    cache.close(path, kind=Kind.TURN, agent="ann")
    assert (cache.has_states, cache.stats().num_states) == (False, 0)


def test_without_prefixes_no_state_is_kept() -> None:
    cache = Cache(8, page_tokens=4, keep_prefixes=False, num_states=4)
    path = cache.open(b"", ids("aaaa"), max_match=4).path
    assert cache.reserve_state(path) is None


def test_a_probe_of_an_unknown_namespace_leaves_nothing(driver: Driver) -> None:
    assert driver.cached("aaaa") == 0
    assert not driver.cache._tree.roots


def test_integrity_finds_a_checkpoint_that_lies_elsewhere(driver: Driver) -> None:
    driver.run("aaaabbbb")
    (checkpoint,) = driver.cache._states
    checkpoint.position = 9
    with pytest.raises(IntegrityError, match="checkpoint at 9 in row 0 is not where node at page 0"):
        driver.cache.check_integrity()


def test_integrity_finds_a_lost_row(driver: Driver) -> None:
    path = driver.open("aaaa").path
    driver.cache.reserve_state(path)
    path.state_row = None
    with pytest.raises(IntegrityError, match="0 is marked reserved but nobody holds it"):
        driver.cache.check_integrity()
    with pytest.raises(IntegrityError, match="1 rows are reserved and 0 kept, by 0 paths and 0 checkpoints"):
        driver.cache.check_counts()
