"""Shares of the engine's seconds over long runs, bounded waits, and nobody starved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.flow.classes import FlowClass
from gateway.flow.fairness import MAX_DEBTS, FairQueue, Rotation, Seat

from .flow_simulation import Engine, Tree

LONG = 16_000.0


def tree(name: str, flow_class: FlowClass = "default", calls: int = 16, seconds: float = 10.0) -> Tree:
    return Tree(name, flow_class, calls, lambda _number: seconds)


def take(rotation: Rotation, key: str, seconds: float) -> None:
    """A call that takes what was expected and has ended."""
    rotation.charge(key, seconds)
    rotation.settle(key, seconds, seconds)


def assert_equal_shares(trees: list[Tree]) -> None:
    mean = sum(one.served for one in trees) / len(trees)
    assert [one.served for one in trees] == pytest.approx([mean] * len(trees), rel=0.15)


def test_a_short_request_does_not_wait_for_sixty_four_long_ones() -> None:
    """Bug 16 of servers.md, seen from the line: a new short request waited 50 s behind a long one."""
    bulk = Tree("bulk", "bulk", 64, lambda _number: 20.0)
    talks = [Tree(f"talk {n}", "interactive", 1, lambda _number: 2.0, pause=5.0 + n) for n in range(3)]
    Engine([bulk, *talks]).run(LONG)
    for talk in talks:
        assert len(talk.waits) > 100
        # Four bulk turns share the engine, so that one lasts 80 s: nobody waits longer for a worker.
        assert max(talk.waits) <= 4 * 20
    assert bulk.served > 0.5 * LONG


def test_bulk_is_never_starved_by_a_flood_of_others() -> None:
    flood = [tree(f"talk {n}", "interactive", 64) for n in range(3)]
    bulk = tree("bulk", "bulk", 64)
    Engine([bulk, *flood]).run(LONG)
    assert bulk.served > 0.1 * LONG
    assert bulk.served < 0.4 * LONG
    assert_equal_shares(flood)


@pytest.mark.parametrize("workers", [1, 2])
def test_with_few_workers_waiting_long_is_what_saves_bulk(workers: int) -> None:
    flood, bulk = tree("talk", "interactive", 64), tree("bulk", "bulk", 4)
    Engine([bulk, flood], workers=workers).run(LONG)
    assert bulk.served > 0.05 * LONG
    assert flood.served > 0.8 * LONG


def test_trees_have_the_same_seconds_whatever_their_calls_take() -> None:
    trees = [tree(f"t{seconds}", seconds=seconds) for seconds in (0.5, 3.0, 11.0, 60.0)]
    trees.append(Tree("mixed", "default", 40, lambda number: (0.2, 45.0, 1.0)[number % 3]))
    Engine(trees).run(LONG)
    assert_equal_shares(trees)


def test_wrong_guesses_are_paid_back_when_the_turn_has_ended() -> None:
    trees = [tree(f"t{guess}") for guess in (0.01, 0.5, 1.0, 10.0)]
    for one, guess in zip(trees, (0.01, 0.5, 1.0, 10.0), strict=True):
        one.guess = guess
    Engine(trees).run(LONG)
    assert_equal_shares(trees)


def test_a_tenant_with_fifty_trees_does_not_starve_one_with_one() -> None:
    many = [Tree(f"t{n}", "default", 4, lambda _number: 5.0, tenant="many") for n in range(50)]
    single = Tree("t", "default", 16, lambda _number: 5.0, tenant="single")
    Engine([*many, single]).run(LONG)
    assert single.served == pytest.approx(LONG / 2, rel=0.15)
    assert_equal_shares(many)


def test_fifty_calls_without_a_name_have_one_share() -> None:
    """They were fifty agents in line before."""
    nameless = Tree("", "default", 50, lambda _number: 5.0)
    named = Tree("session", "default", 8, lambda _number: 5.0)
    Engine([nameless, named]).run(LONG)
    assert_equal_shares([nameless, named])


def test_inside_a_tree_priority_goes_first_then_the_deadline_then_who_came_first() -> None:
    queue = FairQueue()
    ranks = {"late": (0.0, 9.0, 1), "soon": (0.0, 5.0, 2), "later": (0.0, 9.0, 3), "first": (-1.0, 99.0, 4)}
    seats = {name: Seat("tenant", "tree", rank) for name, rank in ranks.items()}
    for name, seat in seats.items():
        queue.enter(name, seat)
    order = []
    while (run_id := queue.first()) is not None:
        queue.remove(run_id, seats[run_id])
        order.append(run_id)
    assert order == ["first", "soon", "late", "later"]
    assert len(queue) == 0


def test_priority_never_takes_from_another_tree() -> None:
    queue = FairQueue()
    seats = {f"a{n}": Seat("tenant", "a", (-1000.0, 0.0, n)) for n in range(4)}
    seats |= {f"b{n}": Seat("tenant", "b", (0.0, 0.0, 10 + n)) for n in range(4)}
    for name, seat in seats.items():
        queue.enter(name, seat)
    order = []
    while (run_id := queue.first()) is not None:
        queue.charge(seats[run_id], 1.0)
        queue.remove(run_id, seats[run_id])
        order.append(run_id[0])
    assert order == list("abababab")


def test_what_was_not_used_is_not_saved_up() -> None:
    rotation = Rotation()
    rotation.enter("busy")
    for _ in range(100):
        assert rotation.first() == "busy"
        take(rotation, "busy", 1.0)
    rotation.enter("new")
    order = []
    for _ in range(10):
        key = rotation.first()
        assert key is not None
        take(rotation, key, 1.0)
        order.append(key)
    assert order.count("new") == 5


def test_who_comes_goes_before_those_who_have_much_under_way() -> None:
    rotation = Rotation()
    rotation.enter("busy")
    for _ in range(6):
        rotation.charge("busy", 10.0)
    rotation.enter("new")
    order = []
    for _ in range(8):
        key = rotation.first()
        assert key is not None
        rotation.charge(key, 10.0)
        order.append(key)
    assert order == ["new"] * 6 + ["busy", "new"]


def test_a_wrong_guess_about_others_is_not_held_against_who_comes() -> None:
    """Six calls under way were taken for ten times what they took: the newcomer is not behind for that."""
    rotation = Rotation()
    rotation.enter("busy")
    for _ in range(6):
        rotation.charge("busy", 10.0)
    rotation.enter("new")
    for _ in range(6):
        rotation.settle("busy", 10.0, 1.0)
    assert rotation.first() == "new"


def test_one_that_owes_is_not_passed_for_ever_by_new_ones() -> None:
    rotation = Rotation()
    rotation.enter("owes")
    take(rotation, "owes", 20.0)
    for number in range(100):
        rotation.enter(f"new {number}")
        rotation.enter(f"other {number}")
        key = rotation.first()
        assert key is not None
        if key == "owes":
            break
        take(rotation, key, 10.0)
        rotation.leave(key)
    assert number < 10


def test_leaving_and_coming_again_pays_no_debt() -> None:
    rotation = Rotation()
    for key in ("a", "b"):
        rotation.enter(key)
    take(rotation, "a", 10.0)
    for _ in range(1000):
        rotation.leave("a")
        rotation.enter("a")
    for _ in range(9):
        assert rotation.first() == "b"
        take(rotation, "b", 0.5)


def test_memory_stays_bounded_over_many_trees_and_tenants() -> None:
    queue = FairQueue()
    for number in range(20_000):
        seat = Seat(f"tenant {number % 700}", f"tree {number}", (0.0, 0.0, number))
        queue.enter(f"r{number}", seat)
        queue.charge(seat, 1.0)
        queue.remove(f"r{number}", seat)
        queue.settle(seat, 1.0, 1.0)
    assert len(queue._shares._flows) <= 2 * MAX_DEBTS + 128
    assert sum(len(share.trees._flows) for share in queue._by_share.values()) < 5 * MAX_DEBTS
    assert sum(len(share.trees._order) for share in queue._by_share.values()) < 5 * MAX_DEBTS


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=60))
def test_flows_that_wait_never_drift_apart_by_more_than_a_call(charges: list[float]) -> None:
    rotation, served = Rotation(), dict.fromkeys("abcde", 0.0)
    for name in served:
        rotation.enter(name)
    for seconds in charges:
        key = rotation.first()
        assert key is not None
        rotation.charge(key, seconds)
        served[key] += seconds
        assert max(served.values()) - min(served.values()) <= 50 + 1e-6
