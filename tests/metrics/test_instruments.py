"""Each number is measured as its help says, labels stay few, and the histograms agree with the ring."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from metrics.engine_figures import EngineSample
from metrics.instruments import (
    MAX_ENGINES,
    MAX_FAILURES,
    MAX_PLACES,
    QUANTITIES,
    Instruments,
    TurnSample,
)

PLACE = {"engine": "e0", "worker": "2"}


def a_turn(**changes: object) -> TurnSample:
    values: dict[str, object] = {
        "reason": "stop",
        "worker": 2,
        "prompt_tokens": 1000,
        "cached_tokens": 900,
        "generated_tokens": 21,
        "queue_seconds": 0.25,
        "first_token_seconds": 0.75,
        "prefill_seconds": 0.5,
        "decode_seconds": 2.0,
    }
    return TurnSample(**(values | changes))  # type: ignore[arg-type]


def an_engine(**changes: object) -> EngineSample:
    values: dict[str, object] = {
        **dict.fromkeys(EngineSample.__dataclass_fields__, 1),
        "missed_tokens": {},
        "num_derailed": {},
    }
    return EngineSample(**(values | changes))  # type: ignore[arg-type]


def value(instruments: Instruments, name: str, **labels: str) -> float | None:
    return instruments.registry.get_sample_value(f"tetrarch_{name}", labels)


def test_a_turn_is_measured_once_in_each_form() -> None:
    instruments = Instruments()
    instruments.observe_turn("e0", a_turn())
    assert value(instruments, "turns_total", **PLACE, reason="stop") == 1
    assert value(instruments, "turn_prompt_tokens_computed_total", **PLACE) == 100
    assert value(instruments, "turn_prompt_tokens_cached_total", **PLACE) == 900
    assert value(instruments, "turn_tokens_generated_total", **PLACE) == 21
    for name, expected in (
        ("prefill_tokens_per_second", 200.0),
        ("decode_tokens_per_second", 10.0),
        ("time_to_first_token_seconds", 0.75),
        ("queue_wait_seconds", 0.25),
    ):
        for quantile in ("0.1", "0.5", "0.9", "0.99"):
            assert value(instruments, f"worker_{name}", **PLACE, quantile=quantile) == expected
        for form in ("worker", "turn"):
            assert value(instruments, f"{form}_{name}_sum", **PLACE) == expected
            assert value(instruments, f"{form}_{name}_count", **PLACE) == 1


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"generated_tokens": 0}, "time_to_first_token_seconds"),
        ({"generated_tokens": 0}, "prefill_tokens_per_second"),
        ({"generated_tokens": 1}, "decode_tokens_per_second"),
        ({"decode_seconds": 0.0}, "decode_tokens_per_second"),
        ({"prefill_seconds": 0.0}, "prefill_tokens_per_second"),
        ({"cached_tokens": 1000}, "prefill_tokens_per_second"),
    ],
)
def test_a_number_that_a_turn_lacks_is_left_out(changes: dict[str, object], absent: str) -> None:
    instruments = Instruments()
    instruments.observe_turn("e0", a_turn(**changes))
    assert value(instruments, f"worker_{absent}_count", **PLACE) is None
    assert value(instruments, "worker_queue_wait_seconds_count", **PLACE) == 1


def test_a_turn_without_a_worker_counts_only_as_ended() -> None:
    instruments = Instruments()
    instruments.observe_turn("e0", a_turn(reason="cancelled", worker=None))
    assert value(instruments, "turns_total", engine="e0", worker="none", reason="cancelled") == 1
    assert value(instruments, "worker_queue_wait_seconds_count", engine="e0", worker="none") is None


def test_quantiles_of_an_idle_worker_are_nan_and_its_totals_stay() -> None:
    now = [0.0]
    instruments = Instruments(clock=lambda: now[0])
    instruments.observe_turn("e0", a_turn())
    now[0] = 901.0
    quantile = value(instruments, "worker_queue_wait_seconds", **PLACE, quantile="0.5")
    assert quantile is not None and math.isnan(quantile)
    assert value(instruments, "worker_queue_wait_seconds_count", **PLACE) == 1


def test_an_engine_that_is_gone_has_no_series() -> None:
    instruments = Instruments()
    instruments.observe_engines({"e0": an_engine(num_free_pages=7), "e1": an_engine(is_up=False)})
    assert value(instruments, "engine_pages_free", engine="e0") == 7
    assert value(instruments, "engine_up", engine="e1") == 0
    instruments.observe_engines({"e1": an_engine(is_up=True)})
    assert value(instruments, "engine_pages_free", engine="e0") is None
    assert value(instruments, "engine_up", engine="e1") == 1


def test_counters_go_on_over_incarnations_and_through_an_engines_start() -> None:
    instruments = Instruments()
    seen: list[float | None] = []
    for incarnation, steps in ((1, 5), (1, 9), (2, 0), (2, 4), (3, 20)):
        instruments.observe_engines({"e0": an_engine(incarnation=incarnation, num_steps=steps)})
        seen.append(value(instruments, "engine_steps_total", engine="e0"))
    assert seen == [5, 9, 9, 13, 33]


def test_misses_are_counted_by_cause_over_incarnations_and_unknown_causes_together() -> None:
    instruments = Instruments()
    for incarnation, missed in (
        (1, {"evicted": 3, "moon": 1}),
        (1, {"evicted": 5, "moon": 2, "sun": 4}),
        (2, {}),
    ):
        instruments.observe_engines({"e0": an_engine(incarnation=incarnation, missed_tokens=missed)})
    assert value(instruments, "missed_tokens_total", engine="e0", cause="evicted") == 5
    assert value(instruments, "missed_tokens_total", engine="e0", cause="other") == 6
    assert value(instruments, "missed_tokens_total", engine="e0", cause="diverged") == 0


def test_living_engines_are_shown_before_dead_ones() -> None:
    instruments = Instruments()
    dead = {f"a{number}": an_engine(is_up=False) for number in range(MAX_ENGINES)}
    instruments.observe_engines({**dead, "z": an_engine(is_up=True)})
    assert value(instruments, "engine_up", engine="z") == 1
    assert value(instruments, "engine_up", engine="a0") == 0
    assert value(instruments, "engine_up", engine=f"a{MAX_ENGINES - 1}") is None


def test_the_series_of_an_engine_that_the_bus_has_forgotten_go() -> None:
    instruments = Instruments()
    for engine in ("old", "new"):
        instruments.observe_turn(engine, a_turn())
    instruments.observe_engines({"new": an_engine()})
    old, new = ({"engine": engine, "worker": "2"} for engine in ("old", "new"))
    for name in ("turn_tokens_generated_total", "worker_queue_wait_seconds_count"):
        assert value(instruments, name, **old) is None
        assert value(instruments, name, **new) is not None
    assert value(instruments, "turns_total", **old, reason="stop") is None
    assert value(instruments, "turn_queue_wait_seconds_count", **old) is None


def test_a_new_engine_takes_the_place_of_a_dead_one_when_places_run_out() -> None:
    instruments = Instruments()
    engines = {f"e{number}": an_engine(is_up=number != 3) for number in range(MAX_PLACES)}
    for engine in engines:
        instruments.observe_turn(engine, a_turn())
    instruments.observe_turn("new", a_turn())
    assert value(instruments, "turns_total", engine="new", worker="2", reason="stop") is None
    instruments.observe_engines(engines)
    instruments.observe_turn("new", a_turn())
    assert value(instruments, "turns_total", engine="new", worker="2", reason="stop") == 1
    assert value(instruments, "turns_total", engine="e3", worker="2", reason="stop") is None
    assert value(instruments, "turns_total", engine="e4", worker="2", reason="stop") == 1


def test_the_gateways_own_line_is_shown() -> None:
    instruments = Instruments()
    instruments.observe_runs(num_live=7, num_waiting=4)
    assert value(instruments, "gateway_runs_live") == 7
    assert value(instruments, "gateway_runs_waiting") == 4


def test_responses_are_counted_by_class_and_refusals_apart() -> None:
    instruments = Instruments()
    for status in (200, 204, 404, 429, 503, 9999):
        instruments.observe_response(status)
    counts = {s: value(instruments, "http_responses_total", status=s) for s in ("2xx", "4xx", "5xx", "other")}
    assert counts == {"2xx": 2, "4xx": 2, "5xx": 1, "other": 1}
    assert value(instruments, "http_too_many_requests_total") == 1


def test_series_stay_under_a_hard_cap_whatever_is_reported() -> None:
    instruments = Instruments()
    for engine in range(60):
        for worker in range(10):
            reason = f"failed_kind_{engine}_{worker}" if worker else "stop"
            instruments.observe_turn(f"e{engine}", a_turn(worker=worker, reason=reason))
    instruments.observe_engines({f"e{n}": an_engine() for n in range(500)})
    for status in range(1000):
        instruments.observe_response(status)
    samples = [sample for metric in instruments.registry.collect() for sample in metric.samples]
    values: dict[str, set[str]] = {}
    for sample in samples:
        for label, text in sample.labels.items():
            values.setdefault(label, set()).add(text)
    assert set(values) == {"engine", "worker", "reason", "status", "quantile", "le", "cause", "kind"}
    assert len(values["engine"]) <= MAX_ENGINES + MAX_PLACES + 1
    assert len(values["reason"]) <= MAX_FAILURES + 5
    assert len(samples) < 13_000


def test_a_reason_that_is_not_a_plain_word_never_becomes_a_label() -> None:
    instruments = Instruments()
    instruments.observe_turn("e0", a_turn(reason="failed_Tell me a secret"))
    instruments.observe_turn("e0", a_turn(reason="Tell me a secret"))
    assert value(instruments, "turns_total", **PLACE, reason="failed_other") == 1
    assert value(instruments, "turns_total", **PLACE, reason="other") == 1


def histogram_quantile(buckets: list[tuple[float, float]], fraction: float) -> float:
    """PromQL's: linear inside the bucket that holds the rank."""
    rank = fraction * buckets[-1][1]
    for (below, count_below), (border, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= rank:
            return below + (border - below) * (rank - count_below) / (count - count_below)
    raise AssertionError("no bucket holds the rank")


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda q: q.name)
def test_histograms_and_exact_quantiles_agree_within_three_percent(
    quantity: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(11)
    instruments = Instruments()
    for _ in range(4096):
        queue = source.lognormvariate(-1.5, 0.7)
        prefill = source.lognormvariate(0.5, 0.6)
        decode = source.lognormvariate(1.0, 0.5)
        turn = a_turn(
            queue_seconds=queue,
            first_token_seconds=queue + prefill,
            prefill_seconds=prefill,
            decode_seconds=decode,
        )
        instruments.observe_turn("e0", turn)
    name = quantity.name  # type: ignore[attr-defined]
    buckets = sorted(
        (float(sample.labels["le"]), sample.value)
        for metric in instruments.registry.collect()
        for sample in metric.samples
        if sample.name == f"tetrarch_turn_{name}_bucket"
    )
    # Only 41 samples lie above p99, so it is good to a bucket (ratio 1.2) and no better.
    for fraction, tolerance in ((0.1, 0.03), (0.5, 0.03), (0.9, 0.03), (0.99, 0.1)):
        exact = value(instruments, f"worker_{name}", **PLACE, quantile=str(fraction))
        assert histogram_quantile(buckets, fraction) == pytest.approx(exact, rel=tolerance)


def test_buckets_reach_from_a_cached_hit_to_an_hour() -> None:
    (first_token,) = (q for q in QUANTITIES if q.name == "time_to_first_token_seconds")
    buckets = first_token.buckets()
    assert buckets[0] == 0.02 and buckets[-1] >= 3600
    assert all(1.19 < above / below < 1.3 for below, above in pairwise(buckets))
