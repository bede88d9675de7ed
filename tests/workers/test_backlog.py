from __future__ import annotations

from workers.backlog import RESEND_SECONDS, Backlog, Entry, TurnKey
from workers.messages import Event, Finished, Progress, Started, Timings, Tokens, Usage, decode_event

ONE = TurnKey("run-1", 1)
TWO = TurnKey("run-2", 3)
END = Finished(reason="stop", usage=Usage(), timings=Timings())


def tokens(text: str) -> Tokens:
    return Tokens(token_ids=text.encode(), text=text)


def events(entries: list[Entry]) -> list[Event]:
    return [decode_event(entry.payload) for entry in entries]


def test_sequences_start_after_the_gateways_event_and_rise_by_one() -> None:
    backlog = Backlog()
    backlog.open(TWO, b"1-0")
    backlog.add(TWO, Started(worker=0, cached_tokens=0), now=0.0)
    backlog.add(TWO, Progress(processed_tokens=1, prompt_tokens=2), now=0.0)
    assert [entry.id for entry in backlog.take(0.0)] == ["3-2", "3-3"]


def test_the_first_tokens_go_at_once_and_later_ones_are_joined() -> None:
    backlog = Backlog()
    backlog.open(ONE, b"1-0")
    backlog.add(ONE, tokens("a"), now=0.0)
    first = backlog.take(0.0)
    assert events(first) == [tokens("a")]
    backlog.settle(first, 0.0)
    for step, text in enumerate("bcd"):
        backlog.add(ONE, tokens(text), now=0.01 * (step + 1))
    assert backlog.take(0.04) == []
    assert 0.0 < (backlog.due_in(0.04) or 0.0) <= 0.01 + 1e-9
    assert events(backlog.take(0.06)) == [tokens("bcd")]


def test_slow_tokens_are_not_held() -> None:
    backlog = Backlog()
    backlog.open(ONE, b"1-0")
    for second in range(3):
        backlog.add(ONE, tokens("x"), now=float(second))
        assert backlog.due_in(float(second)) == 0.0
        backlog.settle(backlog.take(float(second)), float(second))


def test_at_most_twenty_token_events_a_second() -> None:
    backlog = Backlog()
    backlog.open(ONE, b"1-0")
    for millisecond in range(1000):
        backlog.add(ONE, tokens("x"), now=millisecond / 1000)
        backlog.take(millisecond / 1000)
    written = backlog.take(1.0)
    assert len(written) <= 21
    assert sum(len(entry.text) for entry in events(written) if isinstance(entry, Tokens)) >= 950


def test_an_end_flushes_what_is_held_and_carries_the_inbox_entries() -> None:
    backlog = Backlog()
    backlog.open(ONE, b"1-0")
    backlog.attach(ONE, b"2-0")
    backlog.add(ONE, tokens("a"), now=0.0)
    backlog.add(ONE, tokens("b"), now=0.0)
    backlog.add(ONE, END, now=0.0)
    entries = backlog.take(0.0)
    assert events(entries) == [tokens("a"), tokens("b"), END]
    assert entries[-1].inbox_ids == (b"1-0", b"2-0")
    assert backlog.open_turns() == []


def test_a_turn_is_open_once_and_events_of_strangers_vanish() -> None:
    backlog = Backlog()
    assert backlog.open(ONE, b"1-0")
    assert not backlog.open(ONE, b"2-0")
    assert not backlog.attach(TWO, b"3-0")
    backlog.add(TWO, END, now=0.0)
    assert backlog.take(0.0) == []


def test_what_was_sent_lately_is_sent_again_in_order() -> None:
    backlog = Backlog()
    backlog.open(ONE, b"1-0")
    for step in range(4):
        backlog.add(ONE, Progress(processed_tokens=step, prompt_tokens=9), now=float(step))
        backlog.settle(backlog.take(float(step)), float(step))
    backlog.add(ONE, END, now=4.0)
    backlog.replay()
    ids = [entry.id for entry in backlog.take(4.0)]
    assert ids == ["1-3", "1-4", "1-5", "1-6"], f"the first is older than {RESEND_SECONDS} s"
    backlog.replay()
    assert [entry.id for entry in backlog.take(4.0)] == ids
    backlog.settle(backlog.take(4.0), 4.0)
    assert backlog.num_bytes == 0


def test_a_cut_turn_sends_nothing_more_and_the_others_go_on() -> None:
    backlog = Backlog()
    backlog.open(ONE, b"1-0")
    backlog.open(TWO, b"2-0")
    for key in (ONE, TWO):
        backlog.add(key, Started(worker=0, cached_tokens=0), now=0.0)
        backlog.add(key, tokens("a"), now=0.0)
        backlog.add(key, tokens("b"), now=0.0)
    sent = backlog.take(0.0)
    assert backlog.cut(ONE) == (b"1-0",)
    backlog.settle(sent, 0.0)
    assert backlog.is_open(ONE)
    backlog.add(ONE, tokens("c"), now=0.1)
    backlog.add(ONE, END, now=0.1)
    assert not backlog.is_open(ONE)
    assert {entry.key for entry in backlog.take(1.0)} == {TWO}
    backlog.replay()
    assert {entry.key for entry in backlog.take(1.0)} == {TWO}
    backlog.settle(backlog.take(1.0), 1.0)
    assert backlog.num_bytes == 0


def test_cutting_after_the_end_was_queued_returns_its_inbox_entries() -> None:
    backlog = Backlog()
    backlog.open(ONE, b"1-0")
    backlog.add(ONE, END, now=0.0)
    assert backlog.cut(ONE) == (b"1-0",)
    assert backlog.take(0.0) == []
