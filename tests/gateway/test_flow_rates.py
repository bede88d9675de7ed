"""Engine seconds, learned answer lengths, and when a full line has room."""

from __future__ import annotations

import pytest

from gateway.flow.rates import AnswerLengths, MovingMean, Rates, retry_after_seconds, together


def test_an_output_token_costs_nineteen_input_tokens_where_one_rate_is_unknown() -> None:
    assert Rates.measured(190, 0) == Rates(190, 10)
    assert Rates.measured(0, 10) == Rates(190, 10)
    assert Rates.measured(0, 0).seconds(19, 0) == pytest.approx(Rates.measured(0, 0).seconds(0, 1))
    assert Rates.measured(100, 7).seconds(50, 14) == pytest.approx(2.5)


def test_engines_work_together() -> None:
    assert together([Rates(100, 5), Rates(200, 7)]) == Rates(300, 12)
    assert together([]) == Rates.measured(0, 0)


def test_an_answer_is_expected_as_told_else_as_learned_else_usual_and_never_over_its_limit() -> None:
    answers = AnswerLengths()
    assert answers.expected("a", 4096, None) == 256
    assert answers.expected("a", 100, None) == 100
    assert answers.expected("a", 100, 4000) == 100
    for _ in range(30):
        answers.note("a", 40)
        answers.note("", 40)
    assert answers.expected("a", 4096, None) == 40
    assert answers.expected("a", 4096, 7) == 7
    assert answers.expected("", 4096, None) == 256
    assert answers.expected("a", 0, None) == 1


def test_older_answers_fade() -> None:
    mean = MovingMean(100.0)
    for _ in range(20):
        mean.note(10.0)
    assert mean.value == pytest.approx(10, abs=0.1)


def test_the_agents_that_are_not_seen_any_more_are_forgotten() -> None:
    answers = AnswerLengths(max_agents=3)
    for name in "abcd":
        answers.note(name, 9)
    assert answers.expected("a", 999, None) == 256
    assert answers.expected("d", 999, None) == 9


@pytest.mark.parametrize(
    ("ahead", "own", "floor", "seconds"),
    [
        (0, 40, 0.25, 20),  # nobody above: half of the line at full speed
        (10, 40, 0.25, 30),  # those above first
        (1000, 40, 0.25, 80),  # its floor comes to it all the same
        (1000, 40, 0, 300),  # it has none
        (0, 0, 0.25, 1),
        (0, 1e9, 0.25, 300),
        (0, 40.5, 0.25, 21),
    ],
)
def test_retry_after_is_when_half_of_the_class_will_have_gone(
    ahead: float, own: float, floor: float, seconds: float
) -> None:
    assert retry_after_seconds(ahead, own, floor) == seconds
