"""A small hybrid at depth: real prefills of 16k tokens, and decoding at 131,072 over rows written there."""

from __future__ import annotations

from array import array
from pathlib import Path

import mlx.core as mx
import pytest

from bench.depth import CHUNK_ROWS, NUM_STREAMS, fill, load_hybrid, tables
from kvcache.settings import KVCacheSettings
from tests.models import EngineUnderTest, make_model
from workers.messages import Finished, Sampling, Submit
from workers.plan import RowSampling, Segment, StepPlan
from workers.settings import EngineSettings

PREFILL_TOKENS = 16_384
DEPTH = 131_072
HELD = ("weights", "pages", "states")
USED = (*HELD, "scratch", "sampling")
MEASURING_SLACK = 1.05


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_prefills_of_16k_stay_within_the_ledger(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "hybrid", "qwen3_next", max_position_embeddings=2 * PREFILL_TOKENS)
    pool_tokens = NUM_STREAMS * (PREFILL_TOKENS + 1024)
    settings = EngineSettings(
        model=str(folder), weights="fp32", kvcache=KVCacheSettings(pool_tokens=pool_tokens, states=16)
    )
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tested = EngineUnderTest(settings, max_rows=2048)
    loaded = tested.loaded
    for stream in range(NUM_STREAMS):
        prompt = array("I", ((stream + 1) * position * 7919 % 251 for position in range(PREFILL_TOKENS)))
        tested.engine.submit(
            Submit(
                run_id=str(stream),
                attempt=1,
                incarnation=1,
                digest=loaded.digest,
                token_ids=prompt.tobytes(),
                max_tokens=2,
                sampling=Sampling(temperature=0),
                ignore_eos=True,
            )
        )
    ends = []
    while tested.engine.has_work:
        ends += [told.event for told in tested.engine.step() if isinstance(told.event, Finished)]
    peak = mx.get_peak_memory() - before
    tested.engine.check_integrity()

    assert [end.usage.cached_tokens for end in ends] == [0] * NUM_STREAMS
    sizes = {item.name: item.num_bytes for item in loaded.ledger.items}
    predicted = sum(sizes[name] for name in USED)
    assert sum(sizes[name] for name in HELD) <= peak <= MEASURING_SLACK * predicted
    # One attention layer, K and V of two heads, 64 codes and one fp16 scale and bias each.
    assert loaded.kv.bytes_per_token == 2 * 2 * (64 + 4) == loaded.ledger.kv_bytes_per_token
    assert loaded.states is not None and loaded.states.total_bytes == pytest.approx(sizes["states"], rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_streams_decode_and_prefill_at_131k(tmp_path: Path) -> None:
    loaded = load_hybrid(tmp_path / "hybrid", NUM_STREAMS * (DEPTH + CHUNK_ROWS))
    runner = loaded.runner
    assert runner.states is not None
    fill(runner.pools, runner.states, DEPTH)
    pages = tables(DEPTH)
    last = [stream + 1 for stream in range(NUM_STREAMS)]
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for step in range(32):
        segments = tuple(
            Segment(
                stream,
                DEPTH + step,
                [last[stream]],
                pages[stream],
                RowSampling(Sampling(temperature=0), 1, step, (), ()),
            )
            for stream in range(NUM_STREAMS)
        )
        results = runner.run(StepPlan((), segments)).segments
        assert all(result.fault is None for result in results)
        last = [result.token_ids[0] for result in results]
    chunk = Segment(0, DEPTH + 32, [7] * 64, pages[0], None)
    assert runner.run(StepPlan((), (chunk,))).segments[0].fault is None
    scratch = next(item.num_bytes for item in loaded.ledger.items if item.name == "scratch")
    assert mx.get_peak_memory() - before <= scratch
