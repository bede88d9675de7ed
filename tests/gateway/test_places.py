"""Places: what a turn is taken to cost, which engine has room for its pages, what is told when none has."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from gateway.callers.hints import Hints, Names
from gateway.errors import Overloaded
from gateway.flow.admission import Held
from gateway.flow.classes import CLASSES, NORMAL, Classes, DefaultRules, FlowClass, FlowHints
from gateway.flow.directory import EngineView
from gateway.flow.places import Order, Places
from workers.messages import Cancelled, Finished, Sampling, Timings, Usage

from .fake_runs import FakeDirectory, engine_view
from .samples import chatml_bundle

AGENT = Names("s", "a")
PAGES = 128  # of 64 tokens, as engine_view has them


@dataclass
class Counts:
    """What the lines told."""

    lines: dict[str, int] = field(default_factory=dict)
    waits: list[tuple[str, float]] = field(default_factory=list)
    ups: list[str] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)

    def waiting(self, flow_class: FlowClass, number: int) -> None:
        self.lines[flow_class] = number

    def released(self, flow_class: FlowClass, seconds: float) -> None:
        self.waits.append((flow_class, seconds))

    def promoted(self, flow_class: FlowClass) -> None:
        self.ups.append(flow_class)

    def refused(self, flow_class: FlowClass, reason: str) -> None:
        self.refusals.append((flow_class, reason))


class Gate:
    """Places before these engines, with a clock and a count."""

    def __init__(self, *engines: EngineView, max_waiting: int = 1000, classes: Classes | None = None) -> None:
        self.engines = engines or (an_engine(),)
        self.now = 0.0
        self.counts = Counts()
        self.orders: dict[str, Order] = {}
        self.places = Places(
            FakeDirectory(*self.engines),
            max_waiting,
            classes=classes,
            watch=self.counts,
            clock=lambda: self.now,
        )

    def enter(
        self,
        run_id: str,
        tokens: int | bytes = 64,
        *,
        names: Names = AGENT,
        max_tokens: int = 64,
        flow: FlowHints = NORMAL,
        tenant: str = "",
    ) -> None:
        self.orders[run_id] = Order(
            engine=self.engines[0],
            token_ids=os.urandom(4 * tokens) if isinstance(tokens, int) else tokens,
            max_tokens=max_tokens,
            sampling=Sampling(),
            hints=Hints(names),
            tenant=tenant,
            flow=flow,
        )
        self.places.enter(run_id, self.orders[run_id])

    def released(self) -> list[str]:
        releases = list(self.places.releases())
        for release in releases:
            self.places.move(release.run_id, release.engine)
        return [release.run_id for release in releases]

    def held(self, engine_id: str = "e") -> dict[str, Held]:
        return {one.ticket.run_id: one for one in self.places._admission.released(engine_id)}

    def end(self, run_id: str, usage: Usage, *, worker: int | None = 0) -> None:
        self.places.settle(run_id, Finished(reason="stop", usage=usage, timings=Timings(worker=worker)))
        self.places.leave(run_id)


def an_engine(engine_id: str = "e", *, prefill: float = 100.0, decode: float = 10.0) -> EngineView:
    view = engine_view(chatml_bundle(), prefill_tokens_per_second=prefill, decode_tokens_per_second=decode)
    return EngineView(
        msgspec.structs.replace(view.info, engine_id=engine_id), view.stats, view.alive, view.tokenizer
    )


def flow(flow_class: FlowClass) -> FlowHints:
    return FlowHints(flow_class=flow_class)


def enter_many(gate: Gate, names: Sequence[str], **order: object) -> None:
    for name in names:
        gate.enter(name, **order)  # type: ignore[arg-type]


def test_a_turn_is_charged_what_it_computes_and_what_its_answer_is_expected_to_be() -> None:
    gate = Gate()
    gate.enter("told", 200, flow=FlowHints(expected_output_tokens=30))
    gate.enter("usual", 200, max_tokens=4096, names=Names("s", "b"))
    assert gate.released() == ["told", "usual"]
    assert gate.held()["told"].charge.seconds == pytest.approx(200 / 100 + 30 / 10)
    assert gate.held()["usual"].charge.seconds == pytest.approx(200 / 100 + 256 / 10)
    assert gate.held()["told"].charge.pages == 4  # 230 tokens


def test_what_the_cache_holds_costs_nothing() -> None:
    gate = Gate()
    prefix = os.urandom(4 * 640)
    gate.enter("first", prefix + os.urandom(400), max_tokens=10)
    assert gate.released() == ["first"]
    gate.enter("fork", prefix + os.urandom(400), max_tokens=10)
    assert gate.released() == ["fork"]
    assert gate.held()["fork"].charge.seconds == pytest.approx(100 / 100 + 10 / 10)
    assert gate.held()["fork"].charge.pages == 2


def test_an_agents_next_answer_is_expected_to_be_as_long_as_its_last_ones() -> None:
    gate = Gate()
    for number in range(30):
        gate.enter(str(number), max_tokens=4096)
        assert gate.released() == [str(number)]
        gate.end(str(number), Usage(prompt_tokens=64, completion_tokens=20))
    gate.enter("next", max_tokens=4096)
    gate.released()
    assert gate.held()["next"].ticket.output_tokens == 20


def test_what_a_turn_really_took_is_charged_when_it_ends() -> None:
    gate = Gate()
    gate.enter("a", 100, max_tokens=4096)
    gate.released()
    gate.places.settle(
        "a",
        Finished(
            reason="stop",
            usage=Usage(prompt_tokens=100, cached_tokens=50, completion_tokens=10),
            timings=Timings(worker=1),
        ),
    )
    assert gate.held()["a"].charge.seconds == pytest.approx(50 / 100 + 10 / 10)


def test_a_turn_that_no_worker_had_costs_nothing() -> None:
    gate = Gate()
    gate.enter("a", 100)
    gate.released()
    gate.places.settle("a", Cancelled(usage=Usage(prompt_tokens=100), timings=Timings()))
    assert gate.held()["a"].charge.seconds == 0


def test_turns_that_are_taken_back_again_and_again_put_nobody_behind() -> None:
    gate = Gate()
    for _ in range(5):
        gate.enter("a", 1000, tenant="one")
        assert gate.released() == ["a"]
        gate.places.take_back("a")
    assert not gate.held()
    gate.enter("a", tenant="one")
    gate.enter("b", tenant="other")
    assert gate.released() == ["a", "b"]


def test_a_turn_that_is_taken_back_was_not_sent_and_left_no_prompt_at_the_engine() -> None:
    gate = Gate()
    prompt = os.urandom(4 * 200)
    gate.enter("before", prompt[: 4 * 100])
    gate.released()
    for _ in range(3):
        gate.enter("a", prompt)
        assert [release.cached_tokens for release in gate.places.releases()] == [100]
        gate.places.take_back("a")
        assert len(gate.counts.waits) == 1
    gate.enter("a", prompt)
    (release,) = gate.places.releases()
    for _ in range(2):  # once more where its first engine was lost
        gate.places.move("a", release.engine)
    assert len(gate.counts.waits) == 2


def test_turns_that_do_not_fit_the_pool_together_are_not_released_together() -> None:
    gate = Gate()
    big = 64 * (PAGES * 2 // 3)
    gate.enter("a", big, names=Names("s1", "a"))
    gate.enter("b", big, names=Names("s2", "b"))
    gate.enter("small", 64, names=Names("s3", "c"))
    assert gate.released() == ["a"]
    assert gate.places.is_waiting("small")  # or small ones would pass a big one for ever
    assert gate.released() == []
    gate.end("a", Usage())
    assert gate.released() == ["b", "small"]


def test_a_call_from_above_passes_one_that_does_not_fit() -> None:
    gate = Gate()
    big = 64 * (PAGES * 2 // 3)
    gate.enter("a", big, names=Names("s1", "a"))
    gate.enter("b", big, names=Names("s2", "b"))
    assert gate.released() == ["a"]
    gate.enter("quick", 64, names=Names("s3", "c"), flow=flow("interactive"))
    assert gate.released() == ["quick"]


def test_a_turn_alone_always_goes() -> None:
    gate = Gate()
    gate.enter("a", 64 * PAGES, max_tokens=256)
    assert gate.released() == ["a"]


def test_a_turn_goes_to_the_engine_that_has_its_pages() -> None:
    gate = Gate(an_engine("e"), an_engine("f"))
    big = 64 * (PAGES * 2 // 3)
    enter_many(gate, "abc", tokens=big)
    assert gate.released() == ["a", "b"]
    assert sorted(len(gate.held(engine)) for engine in "ef") == [1, 1]
    gate.end("a", Usage())
    assert gate.released() == ["c"]


def test_a_turn_prefers_the_engine_that_is_told_to_hold_its_prompt_while_that_costs_little() -> None:
    gate = Gate(an_engine("e"), an_engine("f"))
    order = Order(
        engine=gate.engines[0], token_ids=os.urandom(400), max_tokens=9, sampling=Sampling(), prefers="f"
    )
    gate.places.enter("near", order)
    gate.enter("cold", 100)
    assert gate.released() == ["near", "cold"]
    assert list(gate.held("f")) == ["near"]
    for number in range(3):
        gate.places.enter(str(number), order)
        gate.released()
    assert len(gate.held("e")) > 1  # three seconds dearer, and it goes elsewhere


def test_a_full_class_is_told_when_it_will_have_room_from_measured_rates() -> None:
    """Half of 4 x (100 tokens / 100 per second + 20 / 10) = 6 s, at two engines."""
    classes = Classes(default=DefaultRules(max_waiting=4))
    gate = Gate(an_engine("e"), an_engine("f"), classes=classes)
    enter_many(gate, [f"r{n}" for n in range(12)], tokens=100, max_tokens=20)
    assert len(gate.released()) == 12  # six at each: two are kept for those above
    enter_many(gate, "abcd", tokens=100, max_tokens=20)
    assert gate.released() == []
    with pytest.raises(Overloaded) as refusal:
        gate.places.reserve(gate.engines[0])
    assert refusal.value.retry_after == 3
    assert gate.counts.refusals == [("default", "queue_full")]
    for name in ("system", "interactive", "bulk"):
        gate.places.reserve(gate.engines[0], FlowHints(flow_class=name)).close()


def test_retry_after_learns_that_most_of_each_prompt_is_cached() -> None:
    classes = Classes(default=DefaultRules(max_waiting=4))
    gate = Gate(classes=classes)
    for number in range(40):
        gate.enter(str(number), 100)
        gate.released()
        gate.end(str(number), Usage(prompt_tokens=100, cached_tokens=90, completion_tokens=1))
    enter_many(gate, [f"r{n}" for n in range(6)], tokens=64)
    gate.released()
    enter_many(gate, "abcd", tokens=2000, max_tokens=10, flow=FlowHints(expected_output_tokens=1))
    with pytest.raises(Overloaded) as refusal:
        gate.places.reserve(gate.engines[0])
    assert refusal.value.retry_after == 5  # half of 4 x (2000 x 10 % / 100 + 1 / 10), not of 4 x 20


def test_all_classes_together_have_a_limit() -> None:
    gate = Gate(max_waiting=3)
    enter_many(gate, [f"r{n}" for n in range(11)])
    assert len(gate.released()) == 6
    with pytest.raises(Overloaded):
        gate.places.reserve(gate.engines[0], flow("bulk"))
    assert gate.counts.refusals == [("bulk", "all_full")]


def test_a_reserved_place_is_given_back_once() -> None:
    gate = Gate(max_waiting=1)
    places = [gate.places.reserve(gate.engines[0]) for _ in range(7)]
    with pytest.raises(Overloaded):
        gate.places.reserve(gate.engines[0])
    places[0].close()
    places[0].close()
    gate.places.reserve(gate.engines[0])
    with pytest.raises(Overloaded):
        gate.places.reserve(gate.engines[0])


def test_who_waits_too_long_is_told_once_and_counted() -> None:
    gate = Gate()
    enter_many(gate, [f"r{n}" for n in range(7)], flow=flow("interactive"))
    assert len(gate.released()) == 7
    enter_many(gate, ["late"], flow=flow("interactive"))
    assert gate.released() == []
    gate.now = 599.0
    assert gate.places.expired() == []
    gate.now = 600.0
    assert gate.places.expired() == ["late"]
    assert gate.places.expired() == []
    assert gate.counts.refusals == [("interactive", "queue_timeout")]
    assert gate.places.leave("late")
    assert gate.counts.lines["interactive"] == 0


def test_lines_and_waits_are_told_by_class() -> None:
    gate = Gate()
    enter_many(gate, [f"b{n}" for n in range(5)], flow=flow("bulk"))
    assert gate.counts.lines == {"bulk": 5}
    gate.now = 2.0
    assert len(gate.released()) == 4
    assert gate.counts.lines == {"bulk": 1}
    assert gate.counts.waits == [("bulk", 2.0)] * 4
    gate.now = 122.0
    gate.released()
    assert gate.counts.ups == ["bulk"]
    assert gate.counts.waits[4:] == [("bulk", 122.0)]


def test_each_nameless_call_had_a_share_of_its_own() -> None:
    """Fifty calls of one session, each with an inferred agent of its own, have one share together."""
    gate = Gate()
    for number in range(50):
        gate.enter(f"auto{number}", names=Names("auto-session", f"auto-{number}"))
    gate.enter("named", names=Names("session", "agent"))
    assert gate.released()[:2] == ["auto0", "named"]


def test_a_session_of_another_tenant_is_another_tree() -> None:
    gate = Gate()
    for number in range(4):
        gate.enter(f"a{number}", tenant="a")
    gate.enter("b0", tenant="b")
    assert gate.released()[:2] == ["a0", "b0"]


def test_a_turn_that_comes_in_again_is_charged_for_what_it_still_does() -> None:
    gate = Gate()
    order = Order(
        engine=gate.engines[0],
        token_ids=os.urandom(4 * 130),
        max_tokens=100,
        sampling=Sampling(),
        generated_tokens=30,
    )
    gate.places.enter("a", order)
    gate.released()
    assert gate.held()["a"].ticket.output_tokens == 70
    gate.places.settle(
        "a",
        Finished(
            reason="stop",
            usage=Usage(prompt_tokens=100, cached_tokens=100, completion_tokens=50),
            timings=Timings(worker=0),
        ),
    )
    assert gate.held()["a"].charge.seconds == pytest.approx(20 / 10)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_gets_through_an_idle_engine_at_once(name: FlowClass) -> None:
    gate = Gate()
    gate.enter("a", flow=flow(name))
    assert gate.released() == ["a"]


def test_a_turn_that_waited_too_long_may_come_again_when_half_of_its_line_has_gone() -> None:
    gate = Gate(an_engine(), an_engine("f"), classes=Classes(default=DefaultRules(timeout_seconds=30)))
    for number in range(60):
        gate.enter(str(number), 200, max_tokens=20)
    num_waiting = 60 - len(gate.released())
    gate.now = 31.0
    assert len(gate.places.expired()) == num_waiting
    assert gate.places.retry_after(gate.orders["59"]) == math.ceil(num_waiting * (200 / 200 + 20 / 20) / 2)
