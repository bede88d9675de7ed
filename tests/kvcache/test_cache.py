"""Paths through the cache as the scheduler drives them. Pages of 4 tokens; letters are tokens."""

from __future__ import annotations

from array import array

import pytest

from kvcache.cache import Cache, Opening, PageCopy, Path
from kvcache.errors import IntegrityError, PathClosed, PathsOpen, PathTooShort


def ids(text: str) -> array[int]:
    return array("I", [ord(letter) for letter in text])


def opened(cache: Cache, text: str, *, max_match: int | None = None, namespace: bytes = b"") -> Opening:
    return cache.open(namespace, ids(text), max_match=len(text) - 1 if max_match is None else max_match)


def compute(cache: Cache, path: Path, text: str) -> None:
    """Commits what `text` has beyond the path, as one evaluated step would."""
    assert cache.reserve(path, len(text))
    cache.commit(path, ids(text)[path.num_tokens :])


def running(cache: Cache, text: str) -> Path:
    """An open path that has computed and published `text`."""
    path = opened(cache, text).path
    compute(cache, path, text)
    cache.publish(path)
    cache.check_integrity()
    return path


def run(cache: Cache, text: str) -> None:
    """A whole turn that ends well."""
    cache.close(running(cache, text))
    cache.check_integrity()


@pytest.fixture
def cache() -> Cache:
    return Cache(12, page_tokens=4)


def test_a_cold_prompt_has_nothing_from_the_cache(cache: Cache) -> None:
    opening = opened(cache, "aaaabbbb")
    assert (opening.path.num_tokens, opening.path.num_cached, opening.path.pages) == (0, 0, [])
    assert opening.copy is None


def test_a_repeat_reuses_whole_pages_and_copies_the_partial_one(cache: Cache) -> None:
    run(cache, "aaaabbbbcc")
    opening = opened(cache, "aaaabbbbcc")
    assert opening.path.pages == [0, 1, 3]
    assert opening.path.num_tokens == opening.path.num_cached == 9
    assert opening.copy == PageCopy(source=2, target=3, num_tokens=1)


@pytest.mark.parametrize(
    ("max_match", "num_cached"), [(-1, 0), (0, 0), (1, 1), (4, 4), (7, 7), (8, 8), (99, 8)]
)
def test_a_match_is_as_long_as_it_may_be(cache: Cache, max_match: int, num_cached: int) -> None:
    run(cache, "aaaabbbb")
    path = opened(cache, "aaaabbbbcccc", max_match=max_match).path
    assert path.num_cached == num_cached
    cache.check_integrity()


def test_a_fork_inside_a_page_copies_what_both_share(cache: Cache) -> None:
    run(cache, "aaaabbbbcccc")
    opening = opened(cache, "aaaabbXXX")
    assert opening.copy == PageCopy(source=1, target=3, num_tokens=2)
    compute(cache, opening.path, "aaaabbXXX")
    cache.close(opening.path)
    assert opened(cache, "aaaabbXXX!").path.num_cached == 9
    assert opened(cache, "aaaabbbbcccc!").path.num_cached == 12


def test_namespaces_never_share(cache: Cache) -> None:
    run(cache, "aaaabbbb")
    assert opened(cache, "aaaabbbb", namespace=b"other").path.num_cached == 0


def test_reserve_covers_the_length_and_no_more(cache: Cache) -> None:
    path = opened(cache, "a").path
    assert cache.reserve(path, 5)
    assert len(path.pages) == 2
    assert cache.reserve(path, 8)
    assert len(path.pages) == 2
    assert cache.stats().num_live == 2


def test_a_reservation_that_cannot_be_met_changes_nothing(cache: Cache) -> None:
    run(cache, "aaaabbbb")
    path = opened(cache, "aaaabbbbX").path
    before = cache.stats()
    assert not cache.reserve(path, 13 * 4)
    assert cache.stats() == before
    assert cache.reserve(path, 12 * 4)


def test_reserve_evicts_only_what_is_missing(cache: Cache) -> None:
    run(cache, "aaaabbbbccccdddd")
    run(cache, "eeeeffffgggg")
    path = opened(cache, "X").path
    assert cache.reserve(path, 7 * 4)
    assert cache.stats().num_evicted == 2
    assert opened(cache, "aaaabbbbccccdddd", max_match=99).path.num_cached == 8
    assert opened(cache, "eeeeffffgggg", max_match=99).path.num_cached == 12


def test_a_running_path_is_never_evicted(cache: Cache) -> None:
    path = running(cache, "aaaabbbb")
    assert cache.evict(99) == 0
    cache.close(path)
    assert cache.evict(99) == 2


def test_a_prefix_counts_as_used_until_its_turn_ends(cache: Cache) -> None:
    long_running = running(cache, "aaaabbbb")
    run(cache, "ccccdddd")
    cache.close(long_running)
    cache.evict(2)
    assert opened(cache, "aaaabbbb", max_match=8).path.num_cached == 8


def test_rows_beyond_the_reserved_pages_are_refused(cache: Cache) -> None:
    path = opened(cache, "aaaa").path
    cache.reserve(path, 4)
    with pytest.raises(PathTooShort, match="5 tokens do not fit 1 pages of 4"):
        cache.commit(path, ids("aaaab"))
    assert path.num_tokens == 0


def test_another_turn_finds_what_is_published_while_the_first_runs_on(cache: Cache) -> None:
    first = running(cache, "aaaabbbbcc")
    second = opened(cache, "aaaabbbbccdd").path
    assert (second.num_cached, second.pages) == (8, [0, 1])
    compute(cache, first, "aaaabbbbcccc")
    cache.publish(first)
    assert opened(cache, "aaaabbbbccccd").path.num_cached == 12


def test_what_is_not_published_is_not_found(cache: Cache) -> None:
    path = opened(cache, "aaaabbbb").path
    compute(cache, path, "aaaabbbb")
    assert opened(cache, "aaaabbbb").path.num_cached == 0


def test_equal_work_side_by_side_stays_private_until_close(cache: Cache) -> None:
    first, second = opened(cache, "aaaabbbbcccc").path, opened(cache, "aaaabbbbcccc").path
    for path in (first, second):
        compute(cache, path, "aaaabbbbcccc")
    table = list(second.pages)
    cache.publish(first)
    cache.publish(second)
    cache.check_integrity()
    assert second.pages == table
    assert (cache.stats().num_tree, cache.stats().num_live) == (3, 3)
    cache.close(second)
    assert (cache.stats().num_tree, cache.stats().num_live) == (3, 0)


def test_deeper_pages_hang_under_the_pages_of_whoever_was_first(cache: Cache) -> None:
    first, second = opened(cache, "aaaabbbb").path, opened(cache, "aaaabbbb").path
    compute(cache, first, "aaaa")
    compute(cache, second, "aaaabbbb")
    cache.publish(first)
    cache.publish(second)
    compute(cache, first, "aaaabbbbcccc")
    cache.publish(first)
    cache.check_integrity()
    assert first.pages[0] in opened(cache, "aaaabbbbcccc", max_match=12).path.pages
    for path in (first, second):
        cache.close(path)
    assert cache.stats().num_tree == 3


def test_a_close_keeps_the_partial_page(cache: Cache) -> None:
    path = opened(cache, "aaaabb").path
    compute(cache, path, "aaaabb")
    cache.reserve(path, 20)
    cache.close(path)
    assert (cache.stats().num_tree, cache.stats().num_live) == (2, 0)
    assert opened(cache, "aaaabb!").path.num_cached == 6


def test_a_close_without_keeping_leaves_what_was_published(cache: Cache) -> None:
    path = running(cache, "aaaabb")
    compute(cache, path, "aaaabbbbcc")
    cache.close(path, keep=False)
    assert (cache.stats().num_tree, cache.stats().num_live) == (1, 0)


def test_a_turn_that_ends_before_its_first_step_keeps_no_page_that_was_not_copied(cache: Cache) -> None:
    run(cache, "aaaabbbb")
    opening = opened(cache, "aaaabbX")
    assert opening.copy is not None
    cache.close(opening.path)
    assert cache.stats().num_tree == 2
    cache.check_integrity()


def test_the_source_of_a_copy_stays_until_the_first_commit(cache: Cache) -> None:
    run(cache, "aaaabb")
    path = opened(cache, "aaaabb!").path
    assert cache.evict(99) == 0
    compute(cache, path, "aaaabb!")
    assert cache.evict(99) == 1
    cache.check_integrity()


def test_without_a_page_for_the_copy_whole_pages_are_matched() -> None:
    cache = Cache(2, page_tokens=4)
    run(cache, "aaaabb")
    opening = opened(cache, "aaaabb!")
    assert opening.copy is None
    assert (opening.path.num_cached, opening.path.pages) == (4, [0])
    cache.check_integrity()


def test_the_copy_may_take_the_place_of_another_leaf_but_not_of_its_source() -> None:
    cache = Cache(4, page_tokens=4)
    run(cache, "aaaabb")
    run(cache, "cccc")
    cache.close(opened(cache, "cccc").path)
    held = opened(cache, "X").path
    assert cache.reserve(held, 4)
    opening = opened(cache, "aaaabb!")
    assert opening.copy == PageCopy(source=1, target=2, num_tokens=2)


def test_poison_removes_what_the_path_published_and_nothing_else(cache: Cache) -> None:
    run(cache, "aaaa")
    path = running(cache, "aaaabbbbcccc")
    cache.poison(path)
    cache.check_integrity()
    assert opened(cache, "aaaabbbbcccc").path.num_cached == 4
    assert (cache.stats().num_tree, cache.stats().num_live) == (1, 0)


def test_poisoned_pages_in_use_are_hidden_and_leave_with_their_last_user(cache: Cache) -> None:
    path = running(cache, "aaaabbbb")
    user = opened(cache, "aaaabbbbX").path
    cache.poison(path)
    cache.check_integrity()
    assert opened(cache, "aaaabbbb").path.num_cached == 0
    assert cache.stats().num_tree == 2
    compute(cache, user, "aaaabbbbXXXX")
    cache.publish(user)
    cache.close(user)
    cache.check_integrity()
    assert (cache.stats().num_tree, cache.stats().num_live) == (0, 0)


def test_poison_takes_along_what_others_built_on_it(cache: Cache) -> None:
    path = running(cache, "aaaa")
    run(cache, "aaaabbbbcc")
    cache.poison(path)
    cache.check_integrity()
    assert cache.stats().num_free == 12


def test_poison_spares_equal_pages_that_another_path_wrote(cache: Cache) -> None:
    first, second = opened(cache, "aaaabbbb").path, opened(cache, "aaaabbbb").path
    compute(cache, first, "aaaa")
    compute(cache, second, "aaaabbbb")
    cache.publish(first)
    cache.publish(second)
    cache.poison(second)
    cache.check_integrity()
    assert opened(cache, "aaaabbbb").path.num_cached == 4


def test_poison_takes_along_pages_that_began_as_copies_of_its_own(cache: Cache) -> None:
    path = running(cache, "aaaabbbb")
    run(cache, "aaaabbcc")
    running_on = opened(cache, "aaaabbbX").path
    cache.poison(path)
    assert opened(cache, "aaaabbcc").path.num_cached == 0
    compute(cache, running_on, "aaaabbbX")
    cache.close(running_on)
    cache.check_integrity()
    assert cache.stats().num_free == 12


def test_without_prefixes_nothing_is_matched_or_kept() -> None:
    cache = Cache(4, page_tokens=4, keep_prefixes=False)
    run(cache, "aaaabb")
    assert cache.stats().num_free == 4
    assert opened(cache, "aaaabb").path.num_cached == 0


def test_a_closed_path_cannot_be_used(cache: Cache) -> None:
    path = running(cache, "aaaa")
    cache.close(path)
    with pytest.raises(PathClosed):
        cache.close(path)
    with pytest.raises(PathClosed):
        cache.reserve(path, 4)
    with pytest.raises(PathClosed):
        cache.poison(path)


def test_the_cache_is_cleared_only_when_nobody_runs(cache: Cache) -> None:
    path = running(cache, "aaaabb")
    with pytest.raises(PathsOpen, match="1 paths are open"):
        cache.clear()
    cache.close(path)
    cache.clear()
    cache.check_integrity()
    assert cache.stats().num_free == 12
    assert opened(cache, "aaaabb").path.num_cached == 0


def test_integrity_finds_a_page_that_was_lost(cache: Cache) -> None:
    path = running(cache, "aaaabbbb")
    cache.reserve(path, 12)
    path.pages.pop()
    with pytest.raises(IntegrityError, match="page 2 is marked live but nobody holds it"):
        cache.check_integrity()


def test_integrity_finds_a_page_table_that_shows_a_stranger(cache: Cache) -> None:
    path = running(cache, "aaaabbbb")
    path.pages[0] = 9
    with pytest.raises(IntegrityError, match="page 9 at 0 of a page table"):
        cache.check_integrity()


def test_publishing_costs_by_new_pages_not_by_depth() -> None:
    """A long path is one node that grows, so a match walks few nodes."""
    cache = Cache(600, page_tokens=4)
    path = opened(cache, "X").path
    for length in range(4, 2001, 4):
        compute(cache, path, "a" * length)
        cache.publish(path)
        assert not path.pending
    assert cache.stats().num_nodes == 1
