"""What an engine does with a turn that goes astray."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest

from tests.fakes import FakeModel, fake_submit
from tests.workers.engine_bench import Bench, prompt_of, resumed
from workers.messages import Derail, Derailed, Finished, Note, Pause, Paused, Tokens
from workers.plan import RowSampling


@dataclass(frozen=True)
class Script(FakeModel):
    """Says the same bytes whatever came before."""

    text: bytes = b""

    def sample(self, state: int, row: RowSampling) -> int:
        return self.text[row.step]


LOOP = b"So. " + b"again " * 50
FLOOD = b"So. " + b"".join(b"<tool_call>%d" % (n * 7919) for n in range(20))
BOTH = b"So. " + b"again " * 20 + b"<tool_call>" * 5 + bytes(range(0x21, 0x7F)) * 1 + b"x <function=" * 12


def bench_of(text: bytes, *, num_states: int | None = None) -> Bench:
    return Bench(num_states=num_states, model=Script(text=text), num_pages=128, context_length=1024)


@pytest.mark.parametrize("num_states", [None, 8])
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LOOP, Derail(derail="token_cycle", first_token=3, excerpt=" again", action="stop")),
        (
            FLOOD,
            Derail(derail="tool_flood", first_token=14, excerpt=FLOOD[4:160].decode(), action="stop"),
        ),
    ],
    ids=["cycle", "flood"],
)
def test_a_derailed_turn_ends_and_says_why(text: bytes, what: Derail, num_states: int | None) -> None:
    bench = bench_of(text, num_states=num_states)
    bench.ask("one", prompt_of(20), max_tokens=200)
    told, end = bench.events["one"][-2:]
    assert told == Derailed(what=what)
    assert isinstance(end, Finished) and end.reason == "derailed"
    num_tokens = len(bench.token_ids("one"))
    assert end.usage.completion_tokens == num_tokens and num_tokens % 16 == 0 and num_tokens <= 176
    assert bench.text("one").encode() == text[:num_tokens]
    assert bench.engine.stats().num_derailed == {what.derail: 1}


def test_held_text_goes_out_before_the_turn_derails() -> None:
    bench = bench_of(LOOP)
    bench.ask("one", prompt_of(20), max_tokens=200, stop=("again again again so",))
    *_, rest, told, end = bench.events["one"]
    assert isinstance(rest, Tokens) and rest.text and not rest.token_ids
    assert isinstance(told, Derailed) and isinstance(end, Finished)
    assert bench.text("one").encode() == LOOP[: len(bench.token_ids("one"))]


def test_a_turn_that_may_go_on_is_told_once_of_each_kind() -> None:
    bench = bench_of(BOTH)
    submit = fake_submit("one", prompt_of(20), max_tokens=len(BOTH), stops_derailed=False)
    bench.engine.submit(submit)
    bench.run()
    kinds = [event.what.derail for event in bench.events["one"] if isinstance(event, Derailed)]
    assert kinds == ["token_cycle", "tool_flood"]
    end = bench.end("one")
    assert isinstance(end, Finished) and (end.reason, bench.text("one").encode()) == ("length", BOTH)
    assert bench.engine.stats().num_derailed == {"token_cycle": 1, "tool_flood": 1}


@pytest.mark.parametrize("stops_derailed", [False, True])
def test_a_pause_hides_no_derailment_and_tells_none_twice(stops_derailed: bool) -> None:
    for num_before in range(5, 120, 23):
        bench = bench_of(BOTH)
        submit = fake_submit("one", prompt_of(20), max_tokens=len(BOTH), stops_derailed=stops_derailed)
        bench.engine.submit(submit)
        while len(bench.token_ids("one")) < num_before and bench.engine.has_work:
            bench.step()
        bench.engine.pause(Pause(run_id="one", attempt=1))
        bench.run()
        if isinstance(bench.events["one"][-1], Paused):
            bench.engine.submit(resumed(submit, bench.token_ids("one")))
            bench.run()
        kinds = [event.what.derail for event in bench.events["one"] if isinstance(event, Derailed)]
        assert kinds == (["token_cycle"] if stops_derailed else ["token_cycle", "tool_flood"])
        assert len(bench.token_ids("one")) == (80 if stops_derailed else len(BOTH))


def test_a_turn_that_ends_by_itself_is_not_derailed() -> None:
    bench = bench_of(b"-" * 200)
    bench.ask("one", prompt_of(20), max_tokens=64)
    bench.ask("two", prompt_of(20), max_tokens=63)
    assert [type(event) for event in bench.events["one"]].count(Derailed) == 0
    for run_id in ("one", "two"):
        end = bench.end(run_id)
        assert isinstance(end, Finished) and end.reason == "length"


def test_a_prompt_that_repeats_itself_derails_nobody() -> None:
    bench = Bench()
    bench.ask("one", [7] * 200, max_tokens=40)
    end = bench.end("one")
    assert isinstance(end, Finished) and end.reason == "length"


def test_a_next_turn_goes_on_from_what_a_derailed_one_left() -> None:
    bench = bench_of(LOOP, num_states=8)
    first = bench.ask("one", prompt_of(20), max_tokens=200)
    generated = bench.token_ids("one")
    prompt = list(array("I", first.token_ids)) + generated[:-1]
    bench.ask("two", [*prompt, 1, 2], max_tokens=4)
    assert bench.started("two").cached_tokens == len(prompt)


def test_what_a_gateway_has_found_is_told_in_the_turns_own_order_and_of_no_ended_turn() -> None:
    bench = bench_of(b"words that go on and on")
    what = Derail(derail="stall", severity="warning", first_token=2)
    bench.engine.submit(fake_submit("one", prompt_of(20), max_tokens=9))
    while len(bench.token_ids("one")) < 3:
        bench.step()
    bench.engine.note(Note(run_id="one", attempt=1, what=what))
    bench.run()
    for attempt in (1, 2):
        bench.engine.note(Note(run_id="one", attempt=attempt, what=what))
    bench.engine.note(Note(run_id="another", attempt=1, what=what))
    bench.run()
    events = bench.events["one"]
    assert [event for event in events if isinstance(event, Derailed)] == [Derailed(what=what)]
    end = bench.end("one")
    assert isinstance(end, Finished) and end.reason == "length" and events[-1] is end
    assert bench.engine.stats().num_derailed == {}  # the engine counts what it sees itself
