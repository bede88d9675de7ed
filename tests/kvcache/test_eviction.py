"""Eviction order: the unused leaf that was used longest ago first, in little time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.eviction import VictimLine


@dataclass(eq=False)
class Leaf:
    last_use: int
    is_evictable: bool = True
    rank: int = 1


def drain(line: VictimLine[Leaf]) -> list[Leaf]:
    order = []
    while (leaf := line.victim()) is not None:
        leaf.is_evictable = False
        order.append(leaf)
    return order


def offered(*leaves: Leaf) -> VictimLine[Leaf]:
    line: VictimLine[Leaf] = VictimLine()
    for leaf in leaves:
        line.offer(leaf)
    return line


def test_the_oldest_leaf_goes_first_and_ties_go_in_order() -> None:
    new, old, twin = Leaf(9), Leaf(2), Leaf(2)
    assert drain(offered(new, old, twin)) == [old, twin, new]


def test_a_victim_stays_in_line_until_it_is_gone() -> None:
    leaf = Leaf(1)
    line = offered(leaf)
    assert line.victim() is leaf is line.victim()


def test_a_leaf_used_again_moves_back() -> None:
    first, second = Leaf(1), Leaf(2)
    line = offered(first, second)
    first.last_use = 3
    line.offer(first)
    assert drain(line) == [second, first]


def test_a_leaf_that_may_not_leave_is_passed_over_until_it_is_offered_again() -> None:
    locked, other = Leaf(1), Leaf(2)
    line = offered(locked, other)
    locked.is_evictable = False
    assert drain(line) == [other]
    locked.is_evictable = True
    line.offer(locked)
    assert drain(line) == [locked]


def test_a_leaf_used_a_hundred_thousand_times_takes_no_memory() -> None:
    busy, idle = Leaf(1), Leaf(1)
    line = offered(busy, idle)
    for now in range(100_000):
        busy.last_use = now + 2
        line.offer(busy)
    assert len(line._heap) < 200
    assert drain(line) == [idle, busy]


def test_a_cleared_line_is_empty() -> None:
    line = offered(Leaf(1))
    line.clear()
    assert line.victim() is None
