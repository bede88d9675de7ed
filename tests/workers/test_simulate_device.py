"""What steps cost on a described device, and how far a decode jump goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from workers.errors import IntegrityError
from workers.messages import Sampling
from workers.plan import RowSampling, Segment, StateRestore, StateSave, StepPlan
from workers.simulate_device import Device, FreshTokens, SimulatedClock, SimulatedRunner

PAGE_TOKENS = 64
DEVICE = Device(
    flops=1000.0,
    bytes_per_second=100.0,
    row_flops=10.0,
    depth_flops=2.0,
    weight_bytes=50.0,
    kv_token_bytes=1.0,
)


def chunk(worker: int, start: int, num_rows: int) -> Segment:
    return Segment(worker, start, range(num_rows), range(64), None)


def decode(worker: int, prompt: Sequence[int], num_proposed: int = 0) -> Segment:
    row = RowSampling(Sampling(), 0, 0, prompt, ())
    rows = range(1000, 1001 + num_proposed)
    return Segment(worker, len(prompt), rows, range(64), row, num_proposed=num_proposed)


def plan(*segments: Segment) -> StepPlan:
    return StepPlan((), segments)


class Bench:
    def __init__(self, device: Device = DEVICE) -> None:
        self.clock = SimulatedClock()
        self.runner = SimulatedRunner(device, self.clock, FreshTokens(), PAGE_TOKENS)

    def accepted(self, *segments: Segment) -> list[int]:
        """How many tokens each segment of a step gives."""
        return [len(result.token_ids) for result in self.runner.run(plan(*segments)).segments]


def test_a_prefill_row_costs_by_its_depth() -> None:
    assert DEVICE.prefill_seconds(0, 10) == pytest.approx(10 * (10 + 2 * 5) / 1000)
    assert DEVICE.prefill_seconds(100, 110) == pytest.approx(10 * (10 + 2 * 105) / 1000)


def test_cutting_a_prefill_changes_nothing_about_its_cost() -> None:
    whole = DEVICE.prefill_seconds(0, 1000)
    assert DEVICE.prefill_seconds(0, 300) + DEVICE.prefill_seconds(300, 1000) == pytest.approx(whole)


def test_a_decode_row_costs_weights_and_what_lies_before_it() -> None:
    assert DEVICE.decode_seconds(2, 70, 1) == pytest.approx((2 * 50 + 70) / 100)


def test_a_jump_costs_what_its_passes_cost_one_by_one() -> None:
    one_by_one = sum(DEVICE.decode_seconds(3, 90 + 3 * index, 1) for index in range(20))
    assert DEVICE.decode_seconds(3, 90, 20) == pytest.approx(one_by_one)


def test_the_default_device_is_the_one_of_the_capacity_plan() -> None:
    per_token = Device().prefill_seconds(30_000, 30_001)
    assert per_token == pytest.approx(2 * 6e9 / 30e12, rel=0.02)  # attention equals weights at 30k


def test_decoding_alone_jumps_to_the_first_end() -> None:
    bench = Bench()
    assert bench.accepted(decode(0, range(10), 7), decode(1, range(20), 4)) == [5, 5]
    assert bench.clock.now == pytest.approx(DEVICE.decode_seconds(2, 30, 5))


def test_a_jump_ends_with_the_first_token_after_an_arrival() -> None:
    bench = Bench()
    bench.clock.next_arrival = 2.5 * DEVICE.decode_seconds(1, 10, 1)
    assert bench.accepted(decode(0, range(10), 50)) == [3]
    assert bench.clock.now >= bench.clock.next_arrival


def test_an_arrival_that_is_due_costs_no_more_than_one_token() -> None:
    bench = Bench()
    bench.clock.next_arrival = 0.0
    assert bench.accepted(decode(0, range(10), 50)) == [1]


def test_a_stream_beside_a_prefill_chunk_gets_one_token() -> None:
    bench = Bench()
    assert bench.accepted(decode(0, range(10), 7), chunk(1, 0, 32)) == [1, 0]
    expected = DEVICE.prefill_seconds(0, 32) + DEVICE.decode_seconds(1, 10, 1)
    assert bench.clock.now == pytest.approx(expected)


def test_the_pace_learns_the_seconds_of_one_pass() -> None:
    result = Bench().runner.run(plan(decode(0, range(10), 9)))
    assert result.seconds == pytest.approx(DEVICE.decode_seconds(1, 10, 10) / 10)


def test_accepted_tokens_are_the_proposed_ones_and_a_new_one() -> None:
    bench = Bench()
    segment = decode(0, range(10), 3)
    (result,) = bench.runner.run(plan(segment)).segments
    assert result.token_ids[:3] == tuple(segment.token_ids[1:])
    (other,) = bench.runner.run(plan(decode(0, range(10)))).segments
    assert other.token_ids != result.token_ids[3:]


def test_saves_and_restores_are_counted_and_a_zero_state_is_no_restore() -> None:
    runner = Bench().runner
    segment = Segment(0, 0, range(8), range(1), None, save=3)
    restores = (StateRestore(0, None), StateRestore(1, 2))
    runner.run(StepPlan((), (segment,), restores, (StateSave(2, 1),)))
    assert (runner.num_saved, runner.num_restored) == (2, 1)


def test_rows_beyond_the_page_table_are_a_fault_of_ours() -> None:
    with pytest.raises(IntegrityError, match="beyond its pages"):
        Bench().runner.run(plan(Segment(0, 60, range(8), range(1), None)))


def test_two_segments_on_one_worker_are_a_fault_of_ours() -> None:
    with pytest.raises(IntegrityError, match="two segments"):
        Bench().runner.run(plan(decode(0, range(10)), decode(0, range(10))))


def test_fresh_tokens_never_repeat_until_the_vocabulary_does() -> None:
    tokens = FreshTokens()
    taken = [*tokens.take(5), *tokens.take(3)]
    assert len(set(taken)) == 8
