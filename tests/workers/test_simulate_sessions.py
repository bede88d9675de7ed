"""The closed loop of callers: how many at once, in which order, how far apart."""

from __future__ import annotations

from workers.simulate_sessions import ClosedLoop
from workers.simulate_trace import Call, Trace


def call(session: str, think_seconds: float = 0.0) -> Call:
    return Call(
        session=session,
        agent="main",
        parent="",
        think_seconds=think_seconds,
        prompt_tokens=10,
        output_tokens=1,
        waits_for_tool=False,
        is_final=False,
        blocks=(),
        block_tokens=64,
    )


def trace(*sessions: list[Call], has_sessions: bool = True) -> Trace:
    return Trace(tuple(map(tuple, sessions)), has_sessions)


def order_of(loop: ClosedLoop) -> list[str]:
    names = []
    while (now := loop.next_seconds) is not None:
        for arrival in loop.take_due(now):
            names.append(arrival.call.session)
            loop.ended(arrival.call, now)
    return names


def test_so_many_sessions_start_a_few_seconds_apart_and_no_more() -> None:
    loop = ClosedLoop(trace([call("a")], [call("b")], [call("c")]), 2, seed=0)
    due = list(loop.take_due(100.0))
    assert [arrival.seconds for arrival in due] == [0.0, 7.0]
    assert all(arrival.is_first for arrival in due)
    assert loop.num_in_flight == 2
    assert loop.next_seconds is None


def test_the_next_session_begins_when_one_ends() -> None:
    loop = ClosedLoop(trace([call("a")], [call("b")]), 1, seed=0)
    (first,) = loop.take_due(0.0)
    loop.ended(first.call, 30.0)
    (second,) = loop.take_due(35.0)
    assert (second.seconds, second.is_first) == (35.0, True)
    assert second.call.session != first.call.session


def test_the_next_call_comes_after_the_think_time_of_the_trace_but_at_most_two_minutes() -> None:
    loop = ClosedLoop(trace([call("a"), call("a", 8.0), call("a", 3000.0)]), 1, seed=0)
    (first,) = loop.take_due(0.0)
    loop.ended(first.call, 10.0)
    assert loop.next_seconds == 18.0
    (second,) = loop.take_due(18.0)
    assert not second.is_first
    loop.ended(second.call, 20.0)
    assert loop.next_seconds == 140.0


def test_a_session_has_one_call_at_a_time() -> None:
    loop = ClosedLoop(trace([call("a"), call("a")]), 4, seed=0)
    assert len(list(loop.take_due(1e6))) == 1
    assert loop.next_seconds is None


def test_a_seed_fixes_the_order_and_another_changes_it() -> None:
    sessions = trace(*([call(f"session {index}")] for index in range(20)))
    orders = [order_of(ClosedLoop(sessions, 1, seed)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_calls_without_sessions_keep_their_order() -> None:
    calls = trace(*([call(f"call {index}")] for index in range(20)), has_sessions=False)
    assert order_of(ClosedLoop(calls, 1, seed=5)) == [f"call {index}" for index in range(20)]
