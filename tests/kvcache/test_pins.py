"""What is kept on purpose, and what leaves first because its agent is gone."""

from __future__ import annotations

from array import array

import pytest

from kvcache.cache import Cache, Kind

from .hybrid import Driver, ids


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_pinned_prefix_and_its_state_are_never_evicted() -> None:
    driver = Driver(num_states=1)
    kept = driver.run("aaaabb")
    assert driver.cache.pin(kept)
    driver.cache.check_integrity()
    assert driver.cache.evict(99) == 0
    other = driver.open("X").path
    assert driver.cache.reserve_state(other) is None
    assert driver.cached("aaaabb") == 6
    driver.cache.unpin(kept)
    driver.cache.unpin(kept)
    driver.cache.check_integrity()
    assert driver.cache.evict(99) == 2


def test_a_pin_holds_one_checkpoint_and_lets_older_ones_go() -> None:
    driver = Driver(num_states=3)
    path = driver.open("aaaabbbbcccc").path
    driver.keep(path, "aaaa")
    driver.keep(path, "aaaabbbb")
    driver.step(path, "aaaabbbbcccc")
    kept = driver.cache.kept(path)
    driver.cache.close(path)
    assert driver.cache.pin(kept)
    for text in ("xxxx", "yyyy", "zzzz"):
        driver.run(text, "bob")
    assert (driver.cached("aaaaQ"), driver.cached("aaaabbbbQ")) == (0, 8)


def test_pinned_pages_count_once_and_stay_within_half_the_pool() -> None:
    driver = Driver(num_pages=12)
    first = driver.run("aaaabbbb")
    second = driver.run("aaaabbbbcccc")
    third = driver.run("xxxxyyyyzzzz")
    fourth = driver.run("vvvv")
    assert driver.cache.pin(first)
    assert driver.cache.pin(second)
    assert driver.cache.pin(second)
    assert driver.cache.stats().num_pinned_pages == 3
    assert driver.cache.pin(third)
    assert not driver.cache.pin(fourth)
    driver.cache.unpin(second)
    assert driver.cache.stats().num_pinned_pages == 5
    assert driver.cache.pin(fourth)
    driver.cache.check_integrity()


def test_a_pin_ends_with_its_own_pages_not_with_the_run_they_lie_in(driver: Driver) -> None:
    path = driver.open("aaaabbbbccccdddd").path
    driver.step(path, "aaaabbbbccccdddd")
    driver.cache.close(path)
    path = driver.open("aaaabbbb").path  # computes the states again, in the pages that are there
    driver.keep(path, "aaaabb")
    kept = driver.cache.kept(path)
    driver.cache.close(path)
    assert driver.cache.pin(kept)
    driver.cache.check_integrity()
    assert driver.cache.evict(99) == 2
    assert driver.cached("aaaabbX") == 6


def test_a_handle_follows_its_path_to_the_tail(driver: Driver) -> None:
    path = driver.open("aaaabb").path
    driver.step(path, "aaaabb")
    kept = driver.cache.kept(path)
    assert driver.cache.reserve_state(path) is not None
    driver.cache.close(path, kind=Kind.GENERATED, agent="ann")
    assert driver.cache.pin(kept)
    assert driver.cache.evict(99) == 0


def test_a_handle_on_evicted_pages_pins_what_is_left_or_nothing(driver: Driver) -> None:
    kept = driver.run("aaaabbbbcc")
    driver.cache.evict(1)
    assert driver.cache.pin(kept)
    assert driver.cache.stats().num_pinned_pages == 2
    driver.cache.unpin(kept)
    driver.cache.evict(99)
    assert not driver.cache.pin(kept)
    driver.cache.retire(kept)
    driver.cache.unpin(kept)
    driver.cache.check_integrity()


def test_a_handle_survives_a_cleared_cache(driver: Driver) -> None:
    pinned, other = driver.run("aaaabb"), driver.run("cccc")
    assert driver.cache.pin(pinned)
    driver.cache.clear()
    driver.cache.check_integrity()
    assert driver.cache.stats().num_pinned_pages == 0
    assert not driver.cache.pin(other)
    driver.cache.unpin(pinned)
    driver.cache.retire(other)
    assert driver.cache.stats().num_free == 24


def test_a_poisoned_prefix_cannot_be_pinned_and_a_pinned_one_leaves_with_its_pin(driver: Driver) -> None:
    faulty = driver.open("aaaabbbb", "bob").path
    driver.keep(faulty, "aaaabbbb")
    kept = driver.cache.kept(faulty)
    assert driver.cache.pin(kept)
    driver.cache.poison(faulty)
    driver.cache.check_integrity()
    assert driver.cached("aaaabbbb") == 0
    driver.cache.unpin(kept)
    driver.cache.check_integrity()
    assert not driver.cache.pin(kept)
    assert driver.cache.stats().num_free == 24


def test_a_dense_prefix_is_pinned_too() -> None:
    cache = Cache(12, page_tokens=4)
    path = cache.open(b"", ids("aaaabb"), max_match=6).path
    cache.reserve(path, 6)
    cache.commit(path, ids("aaaabb"))
    kept = cache.kept(path)
    cache.close(path)
    assert cache.pin(kept)
    cache.check_integrity()
    assert cache.evict(99) == 0


def test_what_a_gone_agent_alone_used_leaves_first(driver: Driver) -> None:
    driver.run("xxxxyyyy", "bob")
    driver.cache.retire(driver.run("aaaabbbbcc", "ann"))
    driver.cache.evict(3)
    assert (driver.matched("aaaabbbbcc"), driver.matched("xxxxyyyy")) == (0, 8)
    assert driver.cache.stats().num_evicted_retired == 3


def test_what_others_built_on_stays_when_an_agent_goes(driver: Driver) -> None:
    parent = driver.run("aaaabbbb", "ann")
    child = driver.run("aaaabbbbcccc", "ann/bob")
    driver.run("xxxx", "cem")
    driver.cache.retire(parent)
    driver.cache.evict(1)
    assert driver.matched("aaaabbbbcccc") == 8, "bob's page is the oldest leaf, not a retired one"
    assert driver.cache.stats().num_evicted_retired == 0
    driver.cache.retire(child)
    driver.cache.evict(1)
    assert driver.cache.stats().num_evicted_retired == 1


def test_a_parent_outlives_its_children(driver: Driver) -> None:
    driver.run("aaaabbbb", "ann")
    driver.cache.retire(driver.run("aaaabbbbcccc", "ann/bob"))
    driver.run("xxxx", "cem")
    driver.cache.evict(2)
    assert driver.cache.stats().num_evicted_retired == 1
    assert driver.matched("xxxx") == 4


def test_a_parent_that_went_first_leaves_with_its_last_child(driver: Driver) -> None:
    driver.run("xxxx", "cem")
    parent = driver.run("aaaabbbb", "ann")
    children = [driver.run(f"aaaabbbb{letter * 4}", f"ann/{letter}") for letter in "cde"]
    driver.cache.retire(parent)
    for child in children:
        driver.cache.retire(child)
    driver.cache.evict(5)
    assert (driver.cache.stats().num_evicted_retired, driver.matched("xxxx")) == (5, 4)


def test_all_branches_of_a_gone_agent_leave(driver: Driver) -> None:
    driver.run("xxxx", "cem")
    driver.run("aaaabbbbcc", "ann")
    driver.cache.retire(driver.run("aaaabbbbdddd", "ann"))
    driver.cache.evict(4)
    assert (driver.cache.stats().num_evicted_retired, driver.matched("xxxx")) == (4, 4)


def test_the_system_prompt_of_a_gone_agent_stays(driver: Driver) -> None:
    driver.run("xxxx", "cem")
    path = driver.open("ssssaaaabbbb").path
    driver.keep(path, "ssssa", Kind.SYSTEM)
    driver.step(path, "ssssaaaabbbb")
    kept = driver.cache.kept(path)
    driver.cache.close(path)
    driver.cache.retire(kept)
    driver.cache.check_integrity()
    driver.cache.evict(1)
    assert driver.cache.stats().num_evicted_retired == 1
    assert driver.cached("ssssaX") == 5


def test_what_is_used_again_is_not_retired_any_more(driver: Driver) -> None:
    driver.run("xxxx", "cem")
    driver.cache.retire(driver.run("aaaabbbb", "ann"))
    assert driver.restored("aaaabbbb", "bob") == 8
    driver.cache.evict(1)
    assert (driver.matched("xxxx"), driver.cached("aaaabbbb")) == (0, 8)


def test_a_running_path_keeps_a_gone_agents_pages_from_retiring(driver: Driver) -> None:
    kept = driver.run("aaaabbbb", "ann")
    user = driver.open("aaaabbbbcc", "ann").path
    driver.cache.retire(kept)
    driver.cache.close(user)
    driver.run("xxxx", "cem")
    driver.cache.evict(1)
    assert driver.cache.stats().num_evicted_retired == 0


def test_dropped_agents_leave_nothing_at_once(driver: Driver) -> None:
    driver.run("xxxx", "cem")
    driver.run("aaaabbbbcc", "ann")
    driver.run("aaaabbbbdddd", "ann")
    driver.run("aaaaeeee", "ann/bob")
    driver.cache.drop(["ann", "ann/bob"])
    driver.cache.check_integrity()
    stats = driver.cache.stats()
    assert (stats.num_tree, stats.num_checkpoints, driver.cached("xxxx")) == (1, 1, 4)
    assert stats.num_evicted == 0


def test_what_others_went_on_from_stays_when_an_agent_is_dropped(driver: Driver) -> None:
    driver.run("aaaabbbbcccc", "ann")
    driver.run("aaaabbbbdddd", "bob")
    driver.cache.drop(["ann"])
    driver.cache.check_integrity()
    assert (driver.matched("aaaabbbbcccc"), driver.cached("aaaabbbbdddd")) == (8, 12)
    driver.cache.drop(["bob"])
    assert driver.matched("aaaabbbbdddd") == 8, "ann's pages leave by age: bob did not write them"


def test_a_checkpoint_that_another_used_stays_with_its_pages(driver: Driver) -> None:
    path = driver.open("aaaabbbbcccc", "ann").path
    driver.keep(path, "aaaab")
    driver.step(path, "aaaabbbbcccc")
    driver.cache.close(path)
    assert driver.restored("aaaabXX", "bob") == 5
    driver.cache.drop(["ann"])
    driver.cache.check_integrity()
    assert driver.cached("aaaabXX") == 5


def test_a_held_path_of_a_dropped_agent_goes_on(driver: Driver) -> None:
    driver.run("aaaabbbb", "ann")
    user = driver.open("aaaabbbbcc", "bob").path
    driver.cache.drop(["ann"])
    driver.cache.check_integrity()
    driver.step(user, "aaaabbbbcc")
    driver.cache.close(user)
    driver.cache.check_integrity()


def test_a_pin_on_what_was_found_faulty_since_holds_nothing() -> None:
    cache = Cache(8, page_tokens=4, num_states=2)
    path = cache.open(b"", array("I", [1, 2, 3, 4]), max_match=0).path
    assert cache.reserve(path, 4)
    cache.commit(path, [1, 2, 3, 4])
    cache.publish(path)
    kept = cache.kept(path)
    assert cache.pin(kept) and cache.pin(kept)
    cache.poison(path)
    assert not cache.pin(kept)
    cache.unpin(kept)
    cache.check_integrity()
    assert cache.stats().num_free == 8
