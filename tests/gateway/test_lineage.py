"""Whom a nameless call continues: its own agent, never a twin's, whatever the order of arrival."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.callers.hints import Names
from gateway.callers.lineage import KEEP_SECONDS, MAX_TURNS, Lineage, PromptShape, Turn

REALM = ("tenant", "model")
SYSTEM = list(range(1000, 1500))
GENERATION = [7, 8]


def shape(*parts: Sequence[int], system: int = len(SYSTEM)) -> PromptShape:
    """A prompt of these parts and a generation prompt."""
    body = [token for part in parts for token in part]
    return PromptShape.of(array("I", [*body, *GENERATION]).tobytes(), min(system, len(body)), len(body))


def packed(*token_ids: int) -> bytes:
    return array("I", token_ids).tobytes()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lineage(clock: Clock) -> Lineage:
    numbers = itertools.count()
    return Lineage(clock, lambda: f"auto-{next(numbers)}")


def join(lineage: Lineage, *parts: Sequence[int], session: str = "", realm: tuple[str, ...] = REALM) -> Turn:
    return lineage.join(realm, Names(session), shape(*parts))


def finish(lineage: Lineage, turn: Turn, answer: Sequence[int]) -> None:
    lineage.answered(turn, packed(*answer))
    lineage.leave(turn, is_final=False)


TASK = [1] * 90
ANSWER = [50, 51, 52]
RESULT = [9] * 40


def test_a_follow_up_continues_its_agent(lineage: Lineage) -> None:
    first = join(lineage, SYSTEM, TASK)
    finish(lineage, first, ANSWER)
    second = join(lineage, SYSTEM, TASK, GENERATION, ANSWER, RESULT)
    assert second.names == first.names == Names("auto-0", "auto-0")
    finish(lineage, second, ANSWER)
    third = join(lineage, SYSTEM, TASK, GENERATION, ANSWER, RESULT, GENERATION, ANSWER, RESULT)
    assert third.names == first.names
    assert len(lineage) == 1


@pytest.mark.parametrize("num_task_tokens", [1, 3, 63, 64, 65, 300])
@pytest.mark.parametrize("num_system_tokens", [0, 1, 63, 64, 65, 500])
def test_a_sibling_with_the_same_system_prompt_is_new(
    lineage: Lineage, num_task_tokens: int, num_system_tokens: int
) -> None:
    system = SYSTEM[:num_system_tokens]
    first = join(lineage, system, [1] * num_task_tokens)
    finish(lineage, first, ANSWER)
    sibling = join(lineage, system, [2] * num_task_tokens, GENERATION, ANSWER, RESULT)
    assert sibling.names.agent != first.names.agent
    assert sibling.names.session != first.names.session
    follow_up = join(lineage, system, [1] * num_task_tokens, GENERATION, ANSWER, RESULT)
    assert follow_up.names == first.names


def test_equal_children_in_flight_at_once_stay_two(lineage: Lineage) -> None:
    twins = [join(lineage, SYSTEM, TASK) for _ in range(5)]
    assert len({turn.names.agent for turn in twins}) == 5
    for turn in twins:
        finish(lineage, turn, ANSWER)
    follow_ups = [join(lineage, SYSTEM, TASK, GENERATION, ANSWER, RESULT) for _ in twins]
    assert {turn.names.agent for turn in follow_ups} == {turn.names.agent for turn in twins}


def test_a_child_that_starts_after_its_twin_was_answered_is_new(lineage: Lineage) -> None:
    first = join(lineage, SYSTEM, TASK)
    finish(lineage, first, ANSWER)
    assert join(lineage, SYSTEM, TASK).names.agent != first.names.agent


def test_of_twins_the_one_whose_answer_comes_back_is_continued(lineage: Lineage) -> None:
    twins = [join(lineage, SYSTEM, TASK) for _ in range(4)]
    for number, turn in enumerate(twins):
        finish(lineage, turn, [60 + number] * 100)
    for number in (2, 0, 3, 1):
        follow_up = join(lineage, SYSTEM, TASK, GENERATION, [60 + number] * 100, RESULT)
        assert follow_up.names == twins[number].names


def test_a_retry_after_a_failure_is_the_same_agent(lineage: Lineage) -> None:
    first = join(lineage, SYSTEM, TASK)
    lineage.leave(first, is_final=False)
    assert join(lineage, SYSTEM, TASK).names == first.names


def test_history_that_parts_near_its_end_is_still_the_agents(lineage: Lineage) -> None:
    history = [random.Random(1).randrange(100) for _ in range(3000)]
    first = join(lineage, SYSTEM, history)
    finish(lineage, first, ANSWER)
    rewritten = join(lineage, SYSTEM, history[:-100], [5] * 300)
    assert rewritten.names == first.names
    finish(lineage, rewritten, ANSWER)
    far = join(lineage, SYSTEM, history[:-700], [6] * 1500)
    assert far.names.agent != first.names.agent


def test_tenants_models_and_sessions_never_meet(lineage: Lineage) -> None:
    first = join(lineage, SYSTEM, TASK, session="s")
    assert first.names.session == "s"
    finish(lineage, first, ANSWER)
    follow_up = (SYSTEM, TASK, GENERATION, ANSWER, RESULT)
    for realm, session in ((("other", "model"), "s"), (("tenant", "other"), "s"), (REALM, ""), (REALM, "t")):
        assert join(lineage, *follow_up, session=session, realm=realm).names.agent != first.names.agent
    assert join(lineage, *follow_up, session="s").names == first.names


def test_children_of_different_parents_never_meet(lineage: Lineage) -> None:
    follow_up = shape(SYSTEM, TASK, GENERATION, ANSWER, RESULT)
    first = lineage.join(REALM, Names("s", "", "p"), shape(SYSTEM, TASK))
    finish(lineage, first, ANSWER)
    for parent in ("q", ""):
        other = lineage.join(REALM, Names("s", "", parent), follow_up)
        assert other.names.agent != first.names.agent
        assert other.names.parent == parent
    assert lineage.join(REALM, Names("s", "", "p"), follow_up).names == first.names


def test_a_final_turn_is_not_continued(lineage: Lineage) -> None:
    turn = join(lineage, SYSTEM, TASK)
    lineage.answered(turn, packed(*ANSWER))
    lineage.leave(turn, is_final=True)
    assert len(lineage) == 0
    assert join(lineage, SYSTEM, TASK, GENERATION, ANSWER, RESULT).names.agent != turn.names.agent


def test_an_agent_that_stays_away_is_forgotten_but_not_one_that_runs(lineage: Lineage, clock: Clock) -> None:
    left, running = join(lineage, SYSTEM, TASK), join(lineage, SYSTEM, RESULT)
    finish(lineage, left, ANSWER)
    clock.now += KEEP_SECONDS + 1
    assert join(lineage, SYSTEM, TASK, GENERATION, ANSWER).names.agent != left.names.agent
    finish(lineage, running, ANSWER)
    assert join(lineage, SYSTEM, RESULT, GENERATION, ANSWER).names == running.names


def test_memory_is_bounded_whatever_comes(lineage: Lineage) -> None:
    for number in range(MAX_TURNS + 500):
        finish(lineage, join(lineage, SYSTEM[:70], [number]), ANSWER)
    assert len(lineage) <= MAX_TURNS
    assert sum(map(len, lineage._marks.values())) <= 3 * MAX_TURNS
    for turn in list(lineage._turns):
        lineage.leave(turn, is_final=True)
    assert not lineage._marks


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_arrivals_in_any_order_never_put_two_live_turns_on_one_agent(data: st.DataObject) -> None:
    lineage = Lineage(lambda: 0.0)
    live: list[tuple[Turn, list[int]]] = []
    histories = [[1] * 70, [1] * 70, [1] * 70 + [2] * 64, []]
    for _ in range(data.draw(st.integers(1, 40))):
        does_end = bool(live) and data.draw(st.booleans())
        if does_end:
            turn, body = live.pop(data.draw(st.integers(0, len(live) - 1)))
            is_answered: bool = data.draw(st.booleans())
            if is_answered:
                lineage.answered(turn, packed(*ANSWER))
                histories.append([*body, *GENERATION, *ANSWER, data.draw(st.integers(1, 2))])
            lineage.leave(turn, is_final=data.draw(st.integers(0, 9)) == 0)
        else:
            body = data.draw(st.sampled_from(histories))
            live.append((lineage.join(REALM, Names(), shape(body, system=10)), body))
        names = [turn.names.agent for turn, _ in live]
        assert len(set(names)) == len(names)


def test_a_long_prompt_takes_milliseconds() -> None:
    lineage = Lineage(time.monotonic)
    prompt = PromptShape.of(random.Random(2).randbytes(4 * 131_072), 500, 131_000)
    started = time.process_time()
    lineage.join(REALM, Names(), prompt)
    assert time.process_time() - started < 0.1
