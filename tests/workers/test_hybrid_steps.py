"""Steps of hybrid and mixture models, planned by hand: logits equal mlx-lm's own forward pass."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from kvcache.cache import PageCopy
from tests.models import Reference, make_model
from tests.tiny_models import MIXED_FAMILIES
from tests.workers.hybrid_steps import EXACT, GREEDY, Dense, HandDriven, Stream, bound_of, difference, rows_of
from workers.plan import Segment, StateRestore, StateSave

HYBRIDS = ("qwen3_next", "qwen3_5")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def folder_of(family: str) -> Path:
        return make_model(tmp_path_factory.mktemp(family) / "model", family)

    return folder_of


@pytest.fixture(scope="module")
def dense_of(folders: Callable[[str], Path]) -> Callable[[str], Dense]:
    return functools.cache(lambda family: Dense(Reference(folders(family), fp32=True).model))


@pytest.mark.parametrize("family", MIXED_FAMILIES)
@pytest.mark.parametrize("bits", ["native", "8"])
def test_prefill_and_decode_give_mlx_lms_logits(
    folders: Callable[[str], Path],
    dense_of: Callable[[str], Dense],
    family: str,
    bits: str,
) -> None:
    bound = bound_of(family, bits)
    driven, dense = HandDriven(folders(family), bits=bits), dense_of(family)  # type: ignore[arg-type]
    stream, prompt = driven.stream(0), prompt_of(100)
    assert difference(driven.feed(stream, prompt), dense.after(prompt)) < bound
    for token in prompt_of(3, seed=1):
        assert difference(driven.feed(stream, [token]), dense.after(stream.tokens)) < bound


CUTS = {
    "first row alone": [1],
    "short of a page": [63],
    "at a page": [64, 128],
    "behind a page": [65],
    "shorter than the convolution's window": [1, 2, 3, 5],
    "just before the end": [129],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_a_prompt_may_be_cut_anywhere(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense], cuts: list[int]
) -> None:
    driven, prompt = HandDriven(folders("qwen3_next")), prompt_of(130)
    found = driven.feed(driven.stream(2), prompt, cuts)
    assert difference(found, dense_of("qwen3_next").after(prompt)) < EXACT


def kept_prefix(driven: HandDriven, length: int, row: int) -> Stream:
    """A stream on worker 0 whose state after so many tokens is in a checkpoint row."""
    stream = driven.stream(0)
    driven.feed(stream, prompt_of(length), save=row)
    return stream


def branch_of(driven: HandDriven, kept: Stream, worker: int) -> tuple[Stream, tuple[PageCopy, ...]]:
    """Another worker's path behind the same tokens: whole pages shared, the partial one copied."""
    num_whole, rest = divmod(len(kept.tokens), 64)
    stream = driven.stream(worker, behind=kept.pages[:num_whole])
    stream.tokens = list(kept.tokens)
    copies = (PageCopy(kept.pages[num_whole], stream.pages[num_whole], rest),) if rest else ()
    return stream, copies


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("length", [63, 64, 70])
def test_a_restored_checkpoint_goes_on_as_if_it_had_been_read(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense], family: str, length: int
) -> None:
    driven, dense = HandDriven(folders(family)), dense_of(family)
    kept = kept_prefix(driven, length, row=3)
    driven.feed(kept, prompt_of(5, seed=1))  # the live state moves on; the checkpoint stays
    stream, copies = branch_of(driven, kept, worker=2)
    stream.tokens = prompt_of(length)
    driven.run(rows_of(stream, prompt_of(40, seed=2)), copies=copies, restores=[StateRestore(2, 3)])
    assert difference(driven.logits[0], dense.after(stream.tokens)) < EXACT
    assert difference(driven.feed(stream, [7]), dense.after(stream.tokens)) < EXACT


def test_three_branches_of_one_checkpoint_run_beside_a_decoding_stream(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense]
) -> None:
    driven, dense = HandDriven(folders("qwen3_5")), dense_of("qwen3_5")
    kept = kept_prefix(driven, 70, row=0)
    branches = [branch_of(driven, kept, worker) for worker in (1, 2, 3)]
    segments = [rows_of(kept, [9])]
    segments += [
        rows_of(stream, prompt_of(number, seed=number))
        for (stream, _), number in zip(branches, (1, 1, 50), strict=True)
    ]
    copies = [copy for _, own in branches for copy in own]
    driven.run(*segments, copies=copies, restores=[StateRestore(worker, 0) for worker in (1, 2, 3)])
    streams = [kept, *(stream for stream, _ in branches)]
    for stream, logits in zip(streams, driven.logits, strict=True):
        assert difference(logits, dense.after(stream.tokens)) < EXACT
    driven.run(*(rows_of(stream, [11]) for stream in streams))
    for stream, logits in zip(streams, driven.logits, strict=True):
        assert difference(logits, dense.after(stream.tokens)) < EXACT


def test_a_worker_that_starts_anew_starts_from_nothing(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense]
) -> None:
    driven = HandDriven(folders("qwen3_next"))
    driven.feed(driven.stream(1), prompt_of(30))
    stream, prompt = driven.stream(1), prompt_of(20, seed=3)
    driven.run(rows_of(stream, prompt), restores=[StateRestore(1, None)])
    assert difference(driven.logits[0], dense_of("qwen3_next").after(prompt)) < EXACT


@pytest.mark.parametrize("bits", ["native", "8"])
def test_rows_behind_a_checkpoint_run_again_without_a_write_to_sealed_pages(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense], bits: str
) -> None:
    """With a neighbour that reads the same pages at once: rows must not see what comes after them."""
    driven = HandDriven(folders("qwen3_next"), bits=bits)  # type: ignore[arg-type]
    bound = bound_of("qwen3_next", bits)
    dense, prompt = dense_of("qwen3_next"), prompt_of(400)
    whole = driven.stream(0)
    driven.feed(whole, prompt[:70], save=1)
    driven.feed(whole, prompt[70:384])
    sealed = [mx.array(pool) for pool in driven.runner.pools.arrays()]
    mx.eval(sealed)
    again = driven.stream(1, behind=whole.pages[:6])
    again.tokens = prompt[:70]
    driven.run(
        rows_of(whole, [5]),
        rows_of(again, prompt[70:200], num_sealed=384),
        restores=[StateRestore(1, 1)],
    )
    for stream, logits in zip((whole, again), driven.logits, strict=True):
        assert difference(logits, dense.after(stream.tokens)) < bound
    driven.run(rows_of(whole, [6]), rows_of(again, prompt[200:], num_sealed=384))
    assert difference(driven.logits[1], dense.after(prompt)) < bound
    by_page = (driven.runner.pools.num_pages, -1)
    for pool, before in zip(driven.runner.pools.arrays(), sealed, strict=True):
        pages = mx.array(whole.pages[:6])
        assert mx.array_equal(pool.reshape(by_page)[pages], before.reshape(by_page)[pages])


def test_a_kept_hidden_row_answers_without_the_body(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense]
) -> None:
    driven, dense = HandDriven(folders("qwen3_5")), dense_of("qwen3_5")
    kept = kept_prefix(driven, 70, row=5)
    stream, copies = branch_of(driven, kept, worker=3)
    body, driven.runner._body = driven.runner._body, lambda *_, **__: pytest.fail("the body ran")
    replay = Segment(3, 70, (), tuple(stream.pages), GREEDY, hidden_from=5)
    result = driven.run(replay, copies=copies, restores=[StateRestore(3, 5)])
    assert result.segments[0].token_ids == (int(dense.after(kept.tokens).argmax()),)
    assert difference(driven.logits[0], dense.after(kept.tokens)) < EXACT
    driven.runner._body = body
    assert difference(driven.feed(stream, [4]), dense.after(stream.tokens)) < EXACT
    driven.run(rows_of(stream, [8]), Segment(0, 70, (), tuple(kept.pages), GREEDY, hidden_from=5))
    assert difference(driven.logits[0], dense.after(stream.tokens)) < EXACT
    assert difference(driven.logits[1], dense.after(kept.tokens)) < EXACT


def test_a_state_left_on_its_worker_is_saved_before_the_next_turn_takes_the_worker(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense]
) -> None:
    driven, dense = HandDriven(folders("qwen3_next")), dense_of("qwen3_next")
    left = driven.stream(0)
    driven.feed(left, prompt_of(70))
    other, prompt = driven.stream(0), prompt_of(20, seed=3)
    driven.run(rows_of(other, prompt), restores=[StateRestore(0, None)], saves_before=[StateSave(0, 2)])
    assert difference(driven.logits[0], dense.after(prompt)) < EXACT
    branch, copies = branch_of(driven, left, worker=1)
    driven.run(rows_of(branch, [3, 4]), copies=copies, restores=[StateRestore(1, 2)])
    assert difference(driven.logits[0], dense.after(branch.tokens)) < EXACT
    driven.run(Segment(2, 70, (), tuple(left.pages), GREEDY, hidden_from=2))
    assert difference(driven.logits[0], dense.after(left.tokens)) < EXACT


def test_a_step_may_only_save(folders: Callable[[str], Path], dense_of: Callable[[str], Dense]) -> None:
    driven = HandDriven(folders("qwen3_5"))
    left = driven.stream(0)
    driven.feed(left, prompt_of(10))
    assert driven.run(saves_before=[StateSave(0, 7)]).segments == ()
    driven.run(Segment(2, 10, (), tuple(left.pages), GREEDY, hidden_from=7))
    assert difference(driven.logits[0], dense_of("qwen3_5").after(left.tokens)) < EXACT


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_broken_live_state_fails_its_turn_alone_and_leaves_nothing_behind(
    folders: Callable[[str], Path], dense_of: Callable[[str], Dense], bad: float, num_rows: int
) -> None:
    driven, dense = HandDriven(folders("qwen3_next")), dense_of("qwen3_next")
    states = driven.runner.states
    assert states is not None
    streams = [driven.stream(worker) for worker in (0, 1)]
    for stream in streams:
        driven.feed(stream, prompt_of(30, seed=stream.worker))
    states._live[1][1, 2, 3, 4] = bad
    result = driven.run(rows_of(streams[0], [1], save=0), rows_of(streams[1], prompt_of(num_rows), save=1))
    assert [segment.fault is None for segment in result.segments] == [True, False]
    assert result.segments[1].are_rows_spoiled
    assert difference(driven.logits[0], dense.after(streams[0].tokens)) < EXACT
    assert all(bool(mx.isfinite(array).all()) for array in states.arrays())
    assert not any(bool(rows[1].any()) for rows in states._rows), "nothing was kept"
    assert not any(bool(live[1].any()) for live in states._live), "the live state is zero"
    fresh = driven.stream(1)
    assert difference(driven.feed(fresh, prompt_of(9)), dense.after(prompt_of(9))) < EXACT


def test_a_fault_spares_the_sealed_pages(folders: Callable[[str], Path]) -> None:
    driven = HandDriven(folders("qwen3_next"))
    kept = kept_prefix(driven, 128, row=0)
    pool = mx.array(driven.runner.pools.arrays()[0])
    again = driven.stream(1, behind=kept.pages[:2])
    again.tokens = prompt_of(70)
    states = driven.runner.states
    assert states is not None
    states._live[0][1, 0, 0, 0] = float("nan")
    result = driven.run(rows_of(again, prompt_of(20), num_sealed=128))
    assert result.segments[0].fault
    assert mx.array_equal(driven.runner.pools.arrays()[0], pool)


def test_a_step_with_restores_and_saves_copies_no_states(folders: Callable[[str], Path]) -> None:
    driven = HandDriven(folders("qwen3_next"), num_states=600)
    states = driven.runner.states
    assert states is not None
    smallest_copy = states._rows[0].nbytes
    streams = [driven.stream(worker) for worker in range(4)]
    for round_number in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        driven.run(
            *(rows_of(stream, [1], save=stream.worker) for stream in streams[:3]),
            rows_of(streams[3], prompt_of(20), save=599),
            restores=[StateRestore(0, 500), StateRestore(3, None)],
            saves_before=[StateSave(0, 501), StateSave(3, 502)] if round_number else [],
        )
        assert mx.get_peak_memory() - before < smallest_copy / 2


def test_rebuilt_states_are_empty(folders: Callable[[str], Path]) -> None:
    driven = HandDriven(folders("qwen3_5"))
    driven.feed(driven.stream(0), prompt_of(10), save=0)
    driven.runner.rebuild()
    states = driven.runner.states
    assert states is not None
    assert not any(bool(array.any()) for array in states.arrays())


def test_what_states_hold_is_measured(folders: Callable[[str], Path]) -> None:
    facts = HandDriven(folders("qwen3_next"), num_states=8).loaded.states
    # 3 layers x (4 heads x 32 x 32 + 3 inputs of 256 channels), and a hidden row of 128; all float32
    one = 4 * (3 * (4 * 32 * 32 + 3 * 256) + 128)
    assert facts is not None
    assert (facts.dtype, facts.bytes_per_state, facts.num_states) == ("float32", one, 8)
    assert facts.total_bytes == (4 + 8) * one
    assert HandDriven(folders("qwen3_moe")).loaded.states is None


def test_drafted_tokens_are_refused_by_name(folders: Callable[[str], Path]) -> None:
    driven = HandDriven(folders("qwen3_next"))
    with pytest.raises(ValueError, match="drafted tokens"):
        driven.run(rows_of(driven.stream(0), [1, 2], num_proposed=1))
