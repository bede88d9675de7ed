"""Whose checkpoint leaves first."""

from __future__ import annotations

import pytest

from kvcache.cache import Kind

from .hybrid import Driver


def test_the_third_newest_turn_of_an_agent_leaves_before_older_ones_of_others() -> None:
    driver = Driver(num_states=4)
    driver.run("xxxx", "bob")
    for text in ("aaaa", "aaaabbbb", "aaaabbbbcccc"):
        driver.run(text, "ann")
    driver.run("yyyy", "cem")
    assert driver.cached("xxxx") == 4
    assert driver.cached("aaaa") == 0
    assert driver.cached("aaaabbbb") == 8
    assert driver.cache.stats().num_states_superseded == 1


@pytest.mark.parametrize("kind", [Kind.GENERATED, Kind.BORDER])
def test_a_newer_turn_supersedes_what_lies_between_turns(kind: Kind) -> None:
    driver = Driver(num_states=3)
    driver.run("xxxx", "bob")
    driver.run("aaaa", "ann", kind)
    driver.run("aaaabbbb", "ann")
    driver.run("yyyy", "cem")
    assert (driver.cached("xxxx"), driver.cached("aaaa"), driver.cached("aaaabbbb")) == (4, 0, 8)


def test_an_answer_is_not_superseded_before_the_next_turn() -> None:
    driver = Driver(num_states=3)
    driver.run("xxxx", "bob")
    driver.run("aaaa", "ann")
    driver.run("aaaabbbb", "ann", Kind.GENERATED)
    driver.run("yyyy", "cem")
    stats = driver.cache.stats()
    assert (stats.num_states_superseded, stats.num_states_aged) == (0, 1)


def test_of_two_checkpoints_close_together_the_deeper_one_leaves_before_any_that_stands_alone() -> None:
    driver = Driver(num_states=3)
    driver.run("xxxx", "bob")
    driver.run("aaaa", "ann")
    driver.run("aaaabbbb", "ann")
    driver.run("yyyy", "cem")
    assert (driver.cached("xxxx"), driver.cached("aaaabbbb"), driver.cached("yyyy")) == (4, 4, 4)


def test_checkpoints_far_apart_leave_by_age() -> None:
    driver = Driver(num_pages=1200, num_states=3)
    far = "aaaa" + "b" * 2052
    driver.run("xxxx", "bob")
    driver.run("aaaa", "ann")
    driver.run(far, "ann")
    driver.run("yyyy", "cem")
    assert (driver.cached("xxxx"), driver.cached(far), driver.cached("yyyy")) == (0, 2056, 4)


def test_the_end_of_the_system_prompt_is_never_superseded() -> None:
    driver = Driver(num_states=4)
    driver.run("aaaa", "ann", Kind.SYSTEM)
    for text in ("aaaabbbb", "aaaabbbbcccc", "aaaabbbbccccdddd"):
        driver.run(text, "ann")
    driver.run("yyyy", "bob")
    assert (driver.cached("aaaa"), driver.cached("aaaabbbb")) == (4, 4)


def test_what_another_agent_used_last_is_not_superseded() -> None:
    driver = Driver(num_states=4)
    driver.run("aaaa", "ann")
    driver.run("aaaabbbb", "ann")
    assert driver.restored("aaaaXX", "bob") == 4
    driver.run("aaaabbbbcccc", "ann")
    driver.run("aaaabbbbccccdddd", "ann")
    driver.run("yyyy", "cem")
    assert (driver.cached("aaaaQ"), driver.cached("aaaabbbbQ")) == (4, 4)


@pytest.mark.parametrize(("other", "is_superseded"), [("aaaabbXX", False), ("aaaaXX", True)])
def test_a_fork_is_superseded_when_one_continuation_is_left(other: str, is_superseded: bool) -> None:
    driver = Driver()
    path = driver.open("aaaabbcc").path
    driver.keep(path, "aaaabb", Kind.BRANCH)
    driver.step(path, "aaaabbcc")
    driver.cache.close(path)
    driver.run_bare(other, "ann")
    for text in ("aaaabbccdddd", "aaaabbccddddeeee"):
        driver.run(text, "ann")
    (fork,) = (found for found in driver.cache._states if found.kind == Kind.BRANCH)
    assert fork.is_superseded == is_superseded


def test_a_fork_at_a_page_border_counts_the_runs_below_it() -> None:
    driver = Driver()
    path = driver.open("aaaabbbb").path
    driver.keep(path, "aaaa", Kind.BRANCH)
    driver.step(path, "aaaabbbb")
    driver.cache.close(path)
    (fork,) = driver.cache._states
    assert not driver.cache._tree.is_fork(fork)
    driver.run_bare("aaaacccc")
    assert driver.cache._tree.is_fork(fork)


def test_using_a_superseded_checkpoint_gives_it_back_its_place() -> None:
    driver = Driver(num_states=4)
    driver.run("xxxx", "bob")
    for text in ("aaaa", "aaaabbbb", "aaaabbbbcccc"):
        driver.run(text, "ann")
    assert driver.restored("aaaaQ", "ann") == 4
    driver.run("yyyy", "cem")
    assert (driver.cached("aaaa"), driver.cache.stats().num_states_superseded) == (4, 0)


def test_then_checkpoints_of_agents_that_are_gone_leave_then_the_one_used_longest_ago() -> None:
    driver = Driver(num_states=3)
    driver.run("xxxx", "bob")
    gone = driver.run("aaaa", "ann")
    driver.run("zzzz", "cem")
    driver.cache.retire(gone)
    driver.run("yyyy", "dan")
    assert (driver.cached("aaaa"), driver.cached("xxxx")) == (0, 4)
    assert driver.restored("xxxx", "bob") == 4
    driver.run("vvvv", "dan")
    assert (driver.cached("xxxx"), driver.cached("zzzz")) == (4, 0)
    stats = driver.cache.stats()
    assert (stats.num_states_retired, stats.num_states_aged) == (1, 1)


def test_taking_a_checkpoint_again_makes_it_the_agents_newest() -> None:
    driver = Driver(num_states=8)
    driver.run("aaaa", "ann")
    driver.run("aaaabbbb", "ann")
    path = driver.open("aaaa", "ann", max_match=3).path
    driver.keep(path, "aaaa")
    driver.cache.close(path)
    driver.run("aaaacccc", "ann")
    superseded = [found.position for found in driver.cache._states if found.is_superseded]
    assert superseded == [8]
