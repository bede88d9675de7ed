"""Lines: order, fairness between agents, limits, and no ticket lost under random use."""

from __future__ import annotations

import random

import pytest

from gateway.errors import Overloaded
from gateway.flow.admission import Admission, Ticket, retry_after_seconds


def ticket(run_id: str, agent: str = "", line: str = "m") -> Ticket:
    return Ticket(run_id, line, agent, prompt_tokens=100, max_tokens=50)


def release_all(admission: Admission, line: str = "m") -> list[str]:
    order = []
    while (first := admission.first(line)) is not None:
        admission.release(first, "e1")
        order.append(first.run_id)
    return order


def test_one_agent_is_served_in_order() -> None:
    admission = Admission(10)
    for name in "abc":
        admission.enter(ticket(name))
    assert release_all(admission) == ["a", "b", "c"]
    assert admission.lines() == []


def test_agents_take_turns() -> None:
    admission = Admission(10)
    for name in ("x1", "x2", "x3", "y1", "z1", "y2"):
        admission.enter(ticket(name, agent=name[0]))
    assert release_all(admission) == ["x1", "y1", "z1", "x2", "y2", "x3"]


def test_lines_do_not_wait_for_each_other() -> None:
    admission = Admission(10)
    admission.enter(ticket("a", line="m"))
    admission.enter(ticket("b", line="n"))
    assert release_all(admission, "n") == ["b"]
    assert admission.lines() == ["m"]


def test_room_is_two_turns_a_worker() -> None:
    admission = Admission(10)
    for name in "abc":
        admission.enter(ticket(name))
    assert admission.room("e1", 2) == 4
    release_all(admission)
    assert admission.room("e1", 2) == 1
    admission.move("a", "e2")
    assert admission.room("e1", 2) == 2
    assert admission.room("e2", 1) == 1


def test_more_than_may_wait_are_refused_until_one_leaves() -> None:
    admission = Admission(2)
    for name in "ab":
        admission.reserve(room=0, retry_after_seconds=3)
        admission.unreserve()
        admission.enter(ticket(name))
    with pytest.raises(Overloaded) as refusal:
        admission.reserve(room=0, retry_after_seconds=3)
    assert refusal.value.retry_after == 3
    assert admission.leave("a")
    admission.reserve(room=0, retry_after_seconds=3)


def test_places_under_way_count_and_free_engines_add() -> None:
    admission = Admission(1)
    admission.reserve(room=1, retry_after_seconds=3)
    admission.reserve(room=1, retry_after_seconds=3)
    with pytest.raises(Overloaded):
        admission.reserve(room=1, retry_after_seconds=3)


def test_leaving_tells_whether_it_waited() -> None:
    admission = Admission(5)
    admission.enter(ticket("a"))
    admission.enter(ticket("b"))
    admission.release(ticket("a"), "e1")
    assert not admission.leave("a")
    assert admission.leave("b")
    assert not admission.leave("b")
    assert admission.released("e1") == []


def test_retry_after_follows_the_measured_rates() -> None:
    waiting = [Ticket(str(n), "m", "", prompt_tokens=1000, max_tokens=100) for n in range(4)]
    assert retry_after_seconds(waiting, 400, 40) == 10  # half of 4000/400 + 400/40
    assert retry_after_seconds(waiting, 4000, 400) == 1
    assert retry_after_seconds([], 0, 0) == 1
    assert retry_after_seconds(waiting * 1000, 1, 1) == 120


def test_no_ticket_is_lost_or_doubled_under_random_use() -> None:
    chance = random.Random(3)
    admission = Admission(1000)
    waiting: set[str] = set()
    released: set[str] = set()
    for number in range(3000):
        action = chance.random()
        if action < 0.5:
            name = f"r{number}"
            admission.enter(ticket(name, agent=chance.choice("abc"), line=chance.choice("mn")))
            waiting.add(name)
        elif action < 0.8 and admission.lines():
            first = admission.first(chance.choice(admission.lines()))
            assert first is not None
            admission.release(first, "e1")
            waiting.remove(first.run_id)
            released.add(first.run_id)
        elif waiting | released:
            name = chance.choice(sorted(waiting | released))
            assert admission.leave(name) == (name in waiting)
            waiting.discard(name)
            released.discard(name)
        assert admission.num_waiting == len(waiting)
        assert {held.run_id for held in admission.released("e1")} == released
