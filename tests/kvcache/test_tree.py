"""The prefix tree: matches, splits, tails, locks, eviction. Pages of 4 tokens; letters are tokens."""

from __future__ import annotations

from array import array

import pytest

from kvcache.errors import IntegrityError
from kvcache.integrity import check_locks, check_tree
from kvcache.matching import Match
from kvcache.nodes import Node, Writer, common_tokens
from kvcache.tree import PrefixTree

PAGE = 4
WRITER = Writer(1, "")


def data(text: str) -> bytes:
    return array("I", [ord(letter) for letter in text]).tobytes()


class Planter:
    """Puts texts into a tree and hands out page numbers in order."""

    def __init__(self) -> None:
        self.tree = PrefixTree(PAGE)
        self.now = 0
        self.num_pages = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def match(self, text: str, namespace: bytes = b"") -> Match:
        return self.tree.match(namespace, data(text), self.tick())

    def lock(self, text: str) -> Node:
        return self.tree.lock_match(self.match(text), self.tick())

    def new_pages(self, count: int) -> list[int]:
        first, self.num_pages = self.num_pages, self.num_pages + count
        return list(range(first, self.num_pages))

    def plant(self, text: str, namespace: bytes = b"") -> list[int]:
        """Inserts a text as a turn would; returns the pages that are not needed any more."""
        match = self.match(text, namespace)
        node = self.tree.lock_match(match, self.tick())
        writer = Writer(self.now, "")
        start = len(match.pages) * PAGE
        whole = len(text) // PAGE * PAGE
        insertion = self.tree.insert(
            node,
            bytearray(data(text[start:whole])),
            self.new_pages((whole - start) // PAGE),
            writer,
            self.now,
        )
        unneeded = insertion.freed
        if text[whole:]:
            page = self.new_pages(1)[0]
            rest = data(text[whole:])
            if self.tree.holder_of(insertion.node, rest) is not None:
                unneeded.append(page)
            else:
                unneeded += self.tree.insert_tail(insertion.node, rest, page, writer, self.now).freed
        unneeded += self.tree.unlock(insertion.node, self.tick())
        check_tree(self.tree)
        check_locks(self.tree, [])
        return unneeded

    def found(self, text: str) -> tuple[list[int], tuple[int, int] | None]:
        match = self.match(text)
        return match.pages, (match.partial.page, match.partial.num_tokens) if match.partial else None


@pytest.fixture
def planter() -> Planter:
    return Planter()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("", "", 0), ("a", "", 0), ("abc", "abc", 3), ("abcd", "abXd", 2), ("Xbc", "abc", 0), ("ab", "abcd", 2)],
)
def test_common_tokens_are_counted_whole(one: str, other: str, expected: int) -> None:
    assert common_tokens(data(one), data(other)) == expected


def test_tokens_that_differ_in_their_high_bytes_only_are_different() -> None:
    assert common_tokens(array("I", [1, 7]).tobytes(), array("I", [1, 7 + (1 << 24)]).tobytes()) == 1


def test_an_empty_tree_matches_nothing(planter: Planter) -> None:
    assert planter.found("abcd") == ([], None)


def test_whole_pages_match_across_nodes(planter: Planter) -> None:
    planter.plant("aaaabbbb")
    planter.plant("aaaabbbbccccdddd")
    assert planter.tree.num_nodes == 2
    assert planter.found("aaaabbbbccccdddd") == ([0, 1, 2, 3], None)


def test_a_match_may_end_inside_a_run_and_inside_its_page(planter: Planter) -> None:
    planter.plant("aaaabbbbcccc")
    assert planter.found("aaaabbXb") == ([0], (1, 2))
    assert planter.found("aaaabbbb") == ([0, 1], None)
    assert planter.found("aaaabbbbc") == ([0, 1], (2, 1))
    assert planter.found("aaX") == ([], (0, 2))
    assert planter.tree.num_nodes == 1, "matching splits nothing"


def test_the_longest_partial_match_wins(planter: Planter) -> None:
    planter.plant("aaaab")
    planter.plant("aaaabbcX")
    planter.plant("aaaabbbbcccc")
    pages, partial = planter.found("aaaabbbXcccc")
    assert pages == [0]
    assert partial == (planter.match("aaaabbbb").pages[1], 3)


def test_a_tail_matches_in_part_and_in_whole(planter: Planter) -> None:
    planter.plant("aaaabbb")
    assert planter.found("aaaabbb") == ([0], (1, 3))
    assert planter.found("aaaabbX") == ([0], (1, 2))
    assert planter.found("aaaabbbbb") == ([0], (1, 3))


def test_namespaces_share_nothing(planter: Planter) -> None:
    planter.plant("aaaabb", namespace=b"one")
    match = planter.match("aaaabb", b"two")
    assert (match.pages, match.partial) == ([], None)


def test_locking_a_match_splits_the_run_at_its_end(planter: Planter) -> None:
    planter.plant("aaaabbbbcccc")
    node = planter.lock("aaaabbbbX")
    assert (node.pages, node.locks) == ([0, 1], 1)
    (lower,) = node.children.values()
    assert (lower.pages, lower.locks, lower.key) == ([2], 0, data("cccc"))
    check_tree(planter.tree)
    check_locks(planter.tree, [node])


def test_a_split_under_a_lock_keeps_both_parts(planter: Planter) -> None:
    planter.plant("aaaabbbbcccc")
    whole = planter.lock("aaaabbbbcccc")
    part = planter.lock("aaaaX")
    check_locks(planter.tree, [whole, part])
    assert (part.pages, part.locks, whole.pages, whole.locks) == ([0], 2, [1, 2], 1)
    assert planter.tree.evict(9) == []
    planter.tree.unlock(whole, planter.tick())
    assert planter.tree.evict(9) == [2, 1]


def test_a_partial_lock_keeps_its_page_and_not_the_rest_of_the_run(planter: Planter) -> None:
    planter.plant("aaaabbbbccccdddd")
    match = planter.match("aaaabbX")
    planter.tree.lock_match(match, planter.tick())
    assert match.partial is not None
    source = planter.tree.lock_first_page(match.partial.node, planter.tick())
    assert source.pages == [1]
    assert planter.tree.evict(9) == [3, 2]


def test_a_longer_tail_replaces_a_shorter_one(planter: Planter) -> None:
    planter.plant("aaaab")
    assert planter.plant("aaaabb") == [1]
    assert planter.found("aaaabbX") == ([0], (2, 2))


def test_a_tail_that_the_tree_holds_already_is_not_kept(planter: Planter) -> None:
    planter.plant("aaaabbb")
    assert planter.plant("aaaabb") == [2]
    planter.plant("aaaacccc")
    assert planter.plant("aaaaccc") == [4]
    assert planter.tree.num_pages == 3


def test_a_whole_page_supersedes_its_tail_and_no_other(planter: Planter) -> None:
    planter.plant("aaaabb")
    planter.plant("aaaabX")
    assert planter.plant("aaaabbbb") == [1]
    assert planter.found("aaaabX") == ([0], (2, 2))


def test_a_locked_tail_is_not_superseded(planter: Planter) -> None:
    planter.plant("aaaab")
    partial = planter.match("aaaab").partial
    assert partial is not None
    planter.tree.lock(partial.node, planter.tick())
    tree = planter.tree
    node = planter.lock("aaaa")
    assert tree.insert_tail(node, data("bb"), 7, WRITER, planter.tick()).freed == []
    assert tree.insert(node, bytearray(data("bbbb")), [8], WRITER, planter.tick()).freed == [7]
    assert partial.node.pages == [1]


def test_pages_that_the_tree_holds_are_counted_as_duplicates(planter: Planter) -> None:
    planter.plant("aaaabbbbcccc")
    root = planter.lock("X")
    insertion = planter.tree.insert(root, bytearray(data("aaaabbbbdddd")), [7, 8, 9], WRITER, planter.tick())
    assert insertion.num_duplicates == 2
    assert planter.found("aaaabbbbdddd") == ([0, 1, 9], None)
    check_locks(planter.tree, [insertion.node])


def test_a_path_that_grows_alone_grows_one_node(planter: Planter) -> None:
    tree = planter.tree
    node = planter.lock("X")
    for text, page in (("aaaa", 0), ("bbbb", 1), ("cccc", 2)):
        node = tree.insert(node, bytearray(data(text)), [page], WRITER, planter.tick()).node
    assert (tree.num_nodes, node.pages) == (1, [0, 1, 2])
    other = planter.lock("aaaabbbbcccc")
    node = tree.insert(node, bytearray(data("dddd")), [3], WRITER, planter.tick()).node
    assert (tree.num_nodes, other.pages, node.pages) == (2, [0, 1, 2], [3])
    check_locks(tree, [node, other])


def test_eviction_takes_the_oldest_leaf_from_its_end(planter: Planter) -> None:
    planter.plant("aaaabbbbcccc")
    planter.plant("ddddeeee")
    planter.match("aaaabbbbcccc")  # looking is not using
    assert planter.tree.evict(1) == [2]
    assert planter.found("aaaabbbbcccc") == ([0, 1], None)
    assert planter.tree.evict(3) == [1, 0, 4]
    check_tree(planter.tree)


def test_a_used_prefix_outlives_an_unused_one(planter: Planter) -> None:
    planter.plant("aaaabbbb")
    planter.plant("ddddeeee")
    planter.tree.unlock(planter.lock("aaaabbbb"), planter.tick())
    assert planter.tree.evict(2) == [3, 2]


def test_a_parent_is_evicted_after_its_children(planter: Planter) -> None:
    planter.plant("aaaabbbb")
    planter.plant("aaaacccc")
    planter.plant("aaaad")
    assert planter.tree.evict(9) == [1, 2, 3, 0]
    assert (planter.tree.num_nodes, planter.tree.num_pages, planter.tree.roots) == (0, 0, {})


def test_a_hidden_subtree_is_not_matched_and_leaves_with_its_locks(planter: Planter) -> None:
    planter.plant("aaaa")
    planter.plant("aaaabbbb")
    planter.plant("aaaabbbbcccc")
    planter.plant("aaaabbbbdddd")
    held = planter.lock("aaaabbbbcccc")
    assert held.parent is not None
    assert planter.tree.hide(held.parent) == [3], "nobody holds it"
    assert planter.found("aaaabbbbcccc") == ([0], None)
    assert planter.tree.evict(9) == [], "the node above carries the same lock"
    check_tree(planter.tree)
    check_locks(planter.tree, [held])
    assert planter.tree.unlock(held, planter.tick()) == [2, 1]
    check_tree(planter.tree)
    assert planter.tree.evict(9) == [0]


def test_damage_is_named(planter: Planter) -> None:
    planter.plant("aaaabbbb")
    (node,) = planter.tree.nodes()
    node.locks += 1
    with pytest.raises(IntegrityError, match="node at page 0 has 1 locks, paths hold 0"):
        check_locks(planter.tree, [])
    node.locks -= 1
    node.tokens[0] ^= 1
    with pytest.raises(IntegrityError, match="node at page 0 has the key of another page"):
        check_tree(planter.tree)
    node.tokens[0] ^= 1
    node.pages.append(9)
    with pytest.raises(IntegrityError, match="node at page 0"):
        check_tree(planter.tree)
    node.pages.pop()
    planter.tree.num_pages += 1
    with pytest.raises(IntegrityError, match="tree counts"):
        check_tree(planter.tree)
