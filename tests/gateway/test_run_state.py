"""The fold over a run's events, and the ends that a gateway writes from it."""

from __future__ import annotations

import pytest

from gateway.runs.events import decode
from gateway.runs.state import Phase, RunState, cancelled, end_of, failed, fold
from workers.messages import (
    RUN_END_ID,
    VERSION,
    Accepted,
    Cancelled,
    Dispatched,
    Event,
    Failed,
    Finished,
    Progress,
    RunEnded,
    Started,
    Timings,
    Tokens,
    TurnEnd,
    Usage,
    encode,
)

ACCEPTED = Accepted(model="m", engine_id="e1", created=0, prompt_tokens=3, gateway="g1")
DONE = Finished(reason="stop", usage=Usage(), timings=Timings())


def state_of(*events: tuple[str, Event]) -> RunState:
    return fold((entry_id, encode(event)) for entry_id, event in events)


def test_a_whole_life() -> None:
    life: list[tuple[str, Event, Phase]] = [
        ("0-1", ACCEPTED, Phase.WAITING),
        ("1-1", Dispatched(engine_id="e2", incarnation=7), Phase.DISPATCHED),
        ("1-2", Started(worker=1, cached_tokens=2), Phase.PREFILLING),
        ("1-3", Progress(processed_tokens=3, prompt_tokens=3), Phase.PREFILLING),
        ("1-4", Tokens(token_ids=bytes(8), text="ab"), Phase.GENERATING),
        ("1-5", Tokens(token_ids=bytes(4), text=""), Phase.GENERATING),
        ("1-6", DONE, Phase.TURN_ENDED),
        (RUN_END_ID, RunEnded(state="completed"), Phase.ENDED),
    ]
    for number in range(1, len(life) + 1):
        state = state_of(*((entry_id, event) for entry_id, event, _ in life[:number]))
        assert state.phase is life[number - 1][2]
        assert state.last_id == life[number - 1][0]
    assert (state.engine_id, state.incarnation, state.attempt, state.num_tokens) == ("e2", 7, 1, 3)
    assert state.turn_end == DONE
    assert state.ended == RunEnded(state="completed")


def test_a_second_attempt_starts_over_elsewhere() -> None:
    state = state_of(
        ("0-1", ACCEPTED),
        ("1-1", Dispatched(engine_id="e1", incarnation=1)),
        ("1-2", Started(worker=0, cached_tokens=0)),
        ("2-1", Dispatched(engine_id="e2", incarnation=4)),
    )
    assert (state.phase, state.engine_id, state.attempt) == (Phase.DISPATCHED, "e2", 2)
    assert state.next_id == "3-1"


@pytest.mark.parametrize("number", range(3))
def test_an_engine_owes_an_end_from_dispatch_on(number: int) -> None:
    events: list[tuple[str, Event]] = [
        ("0-1", ACCEPTED),
        ("1-1", Dispatched(engine_id="e1", incarnation=1)),
        ("1-2", DONE),
    ]
    assert state_of(*events[: number + 1]).is_on_engine == (number == 1)


def test_a_verdict_before_any_dispatch_goes_under_the_first_attempt() -> None:
    assert state_of(("0-1", ACCEPTED)).next_id == "1-1"


def test_what_a_newer_version_wrote_is_skipped() -> None:
    newer = encode(Progress(v=VERSION + 1, processed_tokens=1, prompt_tokens=2))
    assert decode(newer) is None
    assert decode(b"\xff rubbish") is None
    assert fold([("0-1", encode(ACCEPTED)), ("1-1", newer)]).last_id == "0-1"


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (DONE, "completed"),
        (Cancelled(usage=Usage(), timings=Timings()), "cancelled"),
        (Failed(error="x", message="y"), "failed"),
    ],
)
def test_a_run_ends_as_its_turn_did(end: TurnEnd, state: str) -> None:
    assert end_of(end) == RunEnded(state=state)


def test_verdicts_count_what_was_told() -> None:
    state = state_of(("0-1", ACCEPTED), ("1-2", Tokens(token_ids=bytes(8), text="ab")))
    assert cancelled(state).usage == Usage(prompt_tokens=3, completion_tokens=2)
    verdict = failed(state, "engine_lost", "Send the call again.")
    assert verdict.retryable
    assert verdict.usage == Usage(prompt_tokens=3, completion_tokens=2)
