"""Lines: order, classes and their places, limits, and no ticket lost under random use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.flow.admission import Admission, Charge, Ticket
from gateway.flow.classes import CLASSES, Classes, FlowClass, FlowHints

CHARGE = Charge(seconds=1.0, pages=2)


@dataclass
class Clock:
    """Seconds that pass when told."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def lines(max_waiting: int = 10_000, clock: Clock | None = None) -> Admission:
    return Admission(Classes(), max_waiting, clock or Clock())


def ticket(
    run_id: str, tree: str = "", flow_class: FlowClass = "default", *, line: str = "m", tenant: str = ""
) -> Ticket:
    flow = FlowHints(flow_class=flow_class)
    return Ticket(
        run_id=run_id, line=line, tenant=tenant, tree=tree, flow=flow, prompt_tokens=100, output_tokens=50
    )


def release(admission: Admission, flow_class: FlowClass = "default", line: str = "m") -> str | None:
    first = admission.first(line, flow_class)
    if first is None:
        return None
    admission.release(first.run_id, "e1", CHARGE)
    return first.run_id


def release_all(admission: Admission, line: str = "m") -> list[str]:
    order = []
    while (run_id := release(admission, line=line)) is not None:
        order.append(run_id)
    return order


def test_one_tree_is_served_in_order() -> None:
    admission = lines()
    for name in "abc":
        admission.enter(ticket(name))
    assert release_all(admission) == ["a", "b", "c"]
    assert admission.lines() == []


def test_trees_take_turns() -> None:
    admission = lines()
    for name in ("x1", "x2", "x3", "y1", "z1", "y2"):
        admission.enter(ticket(name, tree=name[0]))
    assert release_all(admission) == ["x1", "y1", "z1", "x2", "y2", "x3"]


def test_lines_do_not_wait_for_each_other() -> None:
    admission = lines()
    admission.enter(ticket("a", line="m"))
    admission.enter(ticket("b", line="n"))
    assert release_all(admission, "n") == ["b"]
    assert admission.lines() == ["m"]


def test_room_is_two_turns_a_worker_and_one_released_turn_moves_with_its_engine() -> None:
    admission = lines()
    for name in "abc":
        admission.enter(ticket(name))
    assert admission.room("e1", 1, "m", "default") == 2
    release_all(admission)
    assert admission.room("e1", 1, "m", "default") == 0
    assert admission.pages("e1") == 6
    admission.move("a", "e2")
    assert admission.room("e1", 2, "m", "interactive") == 2
    assert admission.room("e2", 1, "m", "default") == 1
    assert (admission.pages("e1"), admission.pages("e2")) == (4, 2)


def test_bulk_alone_has_a_turn_for_every_worker_but_not_the_places_of_those_above() -> None:
    admission = lines()
    assert [admission.room("e", 4, "m", name) for name in CLASSES] == [8, 7, 6, 4]
    for number in range(8):
        admission.enter(ticket(str(number), flow_class="bulk"))
    while admission.room("e1", 4, "m", "bulk"):
        assert release(admission, "bulk")
    assert len(admission.released("e1")) == 4
    assert [admission.room("e1", 4, "m", name) for name in CLASSES] == [4, 3, 2, 0]


@pytest.mark.parametrize("workers", range(1, 17))
@pytest.mark.parametrize("flow_class", CLASSES)
def test_no_class_alone_leaves_a_worker_without_a_turn(flow_class: FlowClass, workers: int) -> None:
    admission = lines()
    for number in range(2 * workers):
        admission.enter(ticket(str(number), flow_class=flow_class))
    while admission.room("e1", workers, "m", flow_class):
        assert release(admission, flow_class)
    assert len(admission.released("e1")) >= workers


def test_a_lower_class_that_waits_gets_its_floor_of_a_flood_from_above() -> None:
    admission = lines()
    admission.enter(ticket("b", flow_class="bulk"))
    for number in range(20):
        admission.enter(ticket(f"i{number}", flow_class="interactive"))
    while admission.room("e1", 4, "m", "interactive"):
        release(admission, "interactive")
    # one is kept for system, one for the bulk call that waits; nobody waits for the default class
    assert len(admission.released("e1")) == 6
    assert admission.room("e1", 4, "m", "bulk") == 1
    release(admission, "bulk")
    assert admission.room("e1", 4, "m", "interactive") == 0
    assert admission.room("e1", 4, "m", "system") == 1


def test_a_full_class_is_refused_until_one_leaves_and_others_are_not() -> None:
    admission = lines(max_waiting=4)
    for number in range(2):
        assert admission.refusal("default", room=0) is None
        admission.reserve("default")
        admission.unreserve("default")
        admission.enter(ticket(str(number)))
    admission.reserve("default")
    admission.reserve("bulk")
    assert admission.refusal("bulk", room=0) == "all_full"
    assert admission.refusal("bulk", room=1) is None
    assert admission.leave("0")
    assert admission.refusal("bulk", room=0) is None
    small = lines()
    for number in range(512):
        small.enter(ticket(str(number)))
    assert small.refusal("default", room=0) == "queue_full"
    assert small.refusal("default", room=1) is None
    assert small.refusal("interactive", room=0) is None


def test_leaving_tells_whether_it_waited() -> None:
    admission = lines()
    admission.enter(ticket("a"))
    admission.enter(ticket("b"))
    admission.release("a", "e1", CHARGE)
    assert not admission.leave("a")
    assert admission.leave("b")
    assert not admission.leave("b")
    assert admission.released("e1") == []


def test_a_run_that_comes_in_again_has_one_ticket() -> None:
    admission = lines()
    admission.enter(ticket("a"))
    admission.enter(ticket("a"))
    assert release_all(admission) == ["a"]
    admission.enter(ticket("a"))
    assert admission.released("e1") == []
    assert admission.num_waiting == 1


def test_a_class_that_is_passed_over_for_long_sends_one_call_up_and_never_into_system() -> None:
    clock = Clock()
    admission = lines(clock=clock)
    for name in ("b1", "b2"):
        admission.enter(ticket(name, flow_class="bulk"))
    clock.now += 119
    assert admission.promote() == []
    clock.now += 1
    assert [one.run_id for one in admission.promote()] == ["b1"]
    assert admission.promote() == []
    first = admission.first("m", "bulk")
    assert first is not None and first.run_id == "b2"
    clock.now += 60
    assert [one.run_id for one in admission.promote()] == ["b1"]
    for _ in range(9):
        clock.now += 1000
        admission.promote()
    assert admission.first("m", "system") is None
    assert admission.num_waiting_of("bulk") == 2
    assert release(admission, "interactive") == "b1"
    assert admission.released("e1")[0].flow_class == "interactive"


def test_a_class_that_is_served_sends_nobody_up_however_long_its_line() -> None:
    clock = Clock()
    admission = lines(clock=clock)
    for number in range(100):
        admission.enter(ticket(str(number)))
    for _ in range(90):
        clock.now += 59
        assert admission.promote() == []
        assert release(admission)


def test_promoted_calls_have_one_share_of_the_class_that_they_reach() -> None:
    clock = Clock()
    admission = lines(clock=clock)
    for number in range(40):
        admission.enter(ticket(f"d{number}", tree=f"tree {number}"))
    for _ in range(20):
        clock.now += 60
        assert len(admission.promote()) == 1
    for number in range(10):
        admission.enter(ticket(f"i{number}", flow_class="interactive"))
    order = [release(admission, "interactive") for _ in range(20)]
    assert sum(str(run_id).startswith("i") for run_id in order) == 10


def test_who_waits_longer_than_its_class_lets_it_is_told_once_and_stays() -> None:
    clock = Clock()
    admission = lines(clock=clock)
    for name in ("a", "b"):
        admission.enter(ticket(name, flow_class="interactive"))
        clock.now += 10
    clock.now += 580
    assert [one.run_id for one in admission.expired()] == ["a"]
    assert admission.expired() == []
    assert admission.is_waiting("a")
    clock.now += 10
    assert [one.run_id for one in admission.expired()] == ["b"]


def test_the_wait_is_told_at_the_release() -> None:
    clock = Clock()
    admission = lines(clock=clock)
    admission.enter(ticket("a"))
    clock.now += 7
    assert admission.release("a", "e1", CHARGE) == 7


class Lines(RuleBasedStateMachine):
    """Random entering, releasing, leaving, moving, promotion and time: each ticket is in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.admission = lines(clock=self.clock)
        self.waiting: dict[str, FlowClass] = {}
        self.released: dict[str, str] = {}
        self.expired: set[str] = set()

    @rule(
        name=st.integers(0, 40),
        tree=st.sampled_from("abc"),
        flow_class=st.sampled_from(CLASSES),
        line=st.sampled_from("mn"),
    )
    def enter(self, name: int, tree: str, flow_class: FlowClass, line: str) -> None:
        run_id = f"r{name}"
        self.admission.enter(ticket(run_id, tree, flow_class, line=line, tenant=tree[:1]))
        self.released.pop(run_id, None)
        self.expired.discard(run_id)
        self.waiting[run_id] = flow_class

    @rule(line=st.sampled_from("mn"), flow_class=st.sampled_from(CLASSES), engine=st.sampled_from("ef"))
    def release(self, line: str, flow_class: FlowClass, engine: str) -> None:
        first = self.admission.first(line, flow_class)
        if first is None:
            return
        assert first.line == line
        self.admission.release(first.run_id, engine, CHARGE)
        del self.waiting[first.run_id]
        self.released[first.run_id] = engine

    @rule(name=st.integers(0, 40))
    def leave(self, name: int) -> None:
        run_id = f"r{name}"
        assert self.admission.leave(run_id) == (run_id in self.waiting)
        self.waiting.pop(run_id, None)
        self.released.pop(run_id, None)

    @rule(name=st.integers(0, 40), engine=st.sampled_from("ef"), seconds=st.floats(0, 100))
    def settle(self, name: int, engine: str, seconds: float) -> None:
        run_id = f"r{name}"
        self.admission.move(run_id, engine)
        self.admission.settle(run_id, seconds)
        if run_id in self.released:
            self.released[run_id] = engine

    @rule(seconds=st.floats(0, 500))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.admission.promote()
        expired = [one.run_id for one in self.admission.expired()]
        assert not self.expired & set(expired) and set(expired) <= set(self.waiting)
        self.expired |= set(expired)

    @invariant()
    def each_is_in_one_place(self) -> None:
        admission = self.admission
        assert admission.num_waiting == len(self.waiting)
        for name in CLASSES:
            assert admission.num_waiting_of(name) == sum(own == name for own in self.waiting.values())
        for engine in "ef":
            held = {one.ticket.run_id for one in admission.released(engine)}
            assert held == {run_id for run_id, at in self.released.items() if at == engine}
            assert admission.pages(engine) == 2 * len(held)

    def teardown(self) -> None:
        found = [run_id for line in "mn" for name in CLASSES for run_id in self._drain(line, name)]
        assert sorted(found) == sorted(self.waiting)
        assert self.admission.lines() == []

    def _drain(self, line: str, flow_class: FlowClass) -> list[str]:
        found = []
        while (first := self.admission.first(line, flow_class)) is not None:
            self.admission.release(first.run_id, "e", CHARGE)
            found.append(first.run_id)
        return found


Lines.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestNoTicketIsLostOrDoubledUnderRandomUse = Lines.TestCase


def test_who_has_waited_before_it_came_in_waits_no_longer_than_others_may() -> None:
    clock = Clock()
    admission = lines(clock=clock)
    for name, waited in (("a", 0.0), ("b", 400.0), ("c", 100.0)):
        admission.enter(replace(ticket(name, flow_class="interactive"), waited=waited))
    clock.now += 200
    assert [one.run_id for one in admission.expired()] == ["b"]
    clock.now += 300
    assert [one.run_id for one in admission.expired()] == ["c"]
    assert admission.release("c", "e1", CHARGE) == 600
