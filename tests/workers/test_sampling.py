"""Each row is sampled by its own settings, seed and history."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from workers.messages import Sampling
from workers.plan import RowSampling, SegmentResult
from workers.sampling import draw

LOGITS = [2.0, 1.5, 1.0, 0.0, -1.0]


def sampled(logits: list[float], sampling: Sampling, **row: Any) -> SegmentResult:
    known: dict[str, Any] = {"seed": 1, "step": 0, "prompt": (), "generated": (), **row}
    return draw(mx.array(logits), RowSampling(sampling=sampling, **known)).result()


def tokens_of(sampling: Sampling, *, num: int = 300, seed: int = 1) -> Counter[int | None]:
    return Counter(sampled(LOGITS, sampling, seed=seed, step=step).token_ids[0] for step in range(num))


def test_temperature_zero_takes_the_largest() -> None:
    assert sampled(LOGITS, Sampling(temperature=0)).token_ids == (0,)


def test_frequencies_follow_the_softmax() -> None:
    counts = tokens_of(Sampling(), num=2000)
    total = sum(math.exp(x) for x in LOGITS)
    for token_id, logit in enumerate(LOGITS):
        assert counts[token_id] / 2000 == pytest.approx(math.exp(logit) / total, abs=0.04)


def test_a_seed_repeats_its_tokens_and_others_differ() -> None:
    runs = [
        [sampled(LOGITS, Sampling(temperature=2.0), seed=seed, step=step).token_ids[0] for step in range(40)]
        for seed in (5, 5, 6)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=1), {0}),
        (Sampling(top_p=0.4), {0}),
        (Sampling(top_p=0.7), {0, 1}),
        (Sampling(min_p=0.5), {0, 1}),
        (Sampling(temperature=0.01), {0}),
    ],
)
def test_filters_keep_only_what_they_should(sampling: Sampling, allowed: set[int]) -> None:
    assert set(tokens_of(sampling)) == allowed


def test_logit_bias_moves_and_bans() -> None:
    greedy = Sampling(temperature=0, logit_bias={3: 100.0})
    assert sampled(LOGITS, greedy).token_ids == (3,)
    assert sampled(LOGITS, Sampling(temperature=0, logit_bias={0: -100.0})).token_ids == (1,)


def test_repetition_penalty_sees_prompt_and_answer_and_lowers_either_sign() -> None:
    greedy = Sampling(temperature=0, repetition_penalty=4.0)
    assert sampled(LOGITS, greedy, prompt=(0,)).token_ids == (1,)
    assert sampled(LOGITS, greedy, prompt=(0, 0), generated=(1,)).token_ids == (2,)
    assert sampled([-1.0, -2.0], greedy, generated=(0,)).token_ids == (1,)


def test_presence_and_frequency_penalties_see_the_answer_only() -> None:
    assert sampled(LOGITS, Sampling(temperature=0, presence_penalty=1.0), prompt=(0,)).token_ids == (0,)
    assert sampled(LOGITS, Sampling(temperature=0, presence_penalty=1.0), generated=(0,)).token_ids == (1,)
    often = Sampling(temperature=0, frequency_penalty=0.3)
    assert sampled(LOGITS, often, generated=(0,)).token_ids == (0,)
    assert sampled(LOGITS, often, generated=(0, 0)).token_ids == (1,)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampling = Sampling(temperature=0, top_logprobs=2, logit_bias={4: 50.0})
    (logprob,) = sampled(LOGITS, sampling).logprobs
    total = math.log(sum(math.exp(x) for x in LOGITS))
    assert logprob.chosen[0] == 4
    assert logprob.chosen[1] == pytest.approx(-1.0 - total, abs=1e-5)
    assert [token_id for token_id, _ in logprob.top] == [0, 1]
    assert logprob.top[0][1] == pytest.approx(2.0 - total, abs=1e-5)


TINY = [1e-6, 1e-38, 5e-324]


@pytest.mark.parametrize("temperature", TINY)
@pytest.mark.parametrize("filters", [{}, {"top_p": 5e-324}, {"min_p": 1.0}, {"top_k": 3, "min_p": 1e-38}])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(
    temperature: float, filters: dict[str, Any]
) -> None:
    rising = sorted(LOGITS)
    assert {
        sampled(rising, Sampling(temperature=temperature, **filters), step=n).token_ids[0] for n in range(9)
    } == {4}


@pytest.mark.parametrize("penalty", TINY)
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-5, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "min_p": 0.1, "top_k": 3}])
def test_a_tiny_repetition_penalty_repeats_the_likeliest_that_was_seen(
    penalty: float, temperature: float, filters: dict[str, Any]
) -> None:
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty, **filters)
    assert sampled(LOGITS, sampling, generated=(2, 1)).token_ids == (1,)


def test_the_other_ends_of_the_settings_are_sampled_as_well() -> None:
    most = {"temperature": 2.0, "repetition_penalty": 10.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    sampling = Sampling(**most, top_k=2**62, logit_bias={0: 100.0}, seed=2**63 - 1, top_logprobs=20)
    result = sampled(LOGITS, sampling, generated=(1,) * 5000)
    assert result.token_ids == (0,)
    assert len(result.logprobs[0].top) == len(LOGITS)


def test_what_settings_make_infinite_is_a_fault_and_no_token() -> None:
    assert sampled([1.0, 1e35, 0.0], Sampling(temperature=1e-5)).fault


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_a_fault_and_no_token(bad: float) -> None:
    result = sampled([1.0, bad, 0.0], Sampling(temperature=0))
    assert result.token_ids == ()
    assert result.fault


def test_a_row_with_nothing_to_sample_is_a_fault() -> None:
    assert sampled([-math.inf] * 3, Sampling(temperature=0)).fault
