"""States that get a second chance in 8 bits: in plans, in the runner, and in what the model then says."""

from __future__ import annotations

import copy
import functools
from array import array
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from kvcache.cache import StateMove
from tests.models import make_model
from tests.workers.engine_bench import Bench
from tests.workers.hybrid_engine import Call, Family
from tests.workers.hybrid_steps import EXACT, SMALL_STATE, HandDriven, Stream, difference, rows_of
from tests.workers.test_hybrid_parity import HYBRIDS
from tests.workers.test_parity import prompt_of
from workers.messages import Failed
from workers.plan import StateRestore, StateSave

Folders = Callable[[str], Path]
AT_ONCE = 0.06
"""Largest difference of logits in the first rows after a small state, as a part of the largest logit."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return functools.cache(lambda name: make_model(tmp_path_factory.mktemp(name) / "model", name))


def hybrid(num_states: int, num_small_states: int) -> Bench:
    return Bench(num_states=num_states, num_small_states=num_small_states)


def prompt(first: int, num_tokens: int = 20) -> list[int]:
    return [first, *range(num_tokens - 1)]


# In plans


def test_agents_in_turn_go_on_from_states_that_made_room_for_each_other() -> None:
    bench = hybrid(num_states=2, num_small_states=12)
    talks = {agent: prompt(first) for first, agent in enumerate(("a", "b", "c", "d"), 100)}
    for number in range(3):
        for agent, talk in talks.items():
            run_id = f"{agent}{number}"
            submit = bench.ask(run_id, talk, agent=agent, session="s")
            assert bench.token_ids(run_id) == bench.model.generate(submit, 8)
            assert bench.started(run_id).cached_tokens == (len(talk) - 5 if number else 0)
            talk += [*bench.token_ids(run_id), 7, 8, 9, 10]
    assert bench.runner.num_restored_small > 4
    stats = bench.cache.stats()
    assert stats.num_states_demoted > stats.num_states_evicted


def test_a_state_leaves_its_row_in_the_very_step_that_saves_another_there() -> None:
    bench = hybrid(num_states=1, num_small_states=2)
    bench.ask("one", prompt(100), agent="a", session="s")
    bench.ask("two", prompt(101), agent="b", session="s")
    both = [plan for plan in bench.runner.plans if plan.demotions]
    saved = [{*(s.row for s in p.saves_before), *(s.save for s in p.segments)} for p in both]
    assert all({move.source for move in p.demotions} <= rows for p, rows in zip(both, saved, strict=True))
    assert any(plan.saves_before for plan in both)


def test_a_turn_that_is_cancelled_before_its_step_leaves_the_move_to_the_next_one() -> None:
    bench = hybrid(num_states=1, num_small_states=4)
    bench.ask("one", prompt(100), agent="a", session="s")
    bench.runner.plans.clear()
    path = bench.cache.open(b"", array("I", prompt(101)), max_match=20).path
    assert bench.cache.reserve_state(path) == 0
    bench.cache.close(path, keep=False)
    bench.step()
    assert not bench.runner.plans, "nothing is there to run"
    bench.ask("longer", [*prompt(100), *bench.token_ids("one"), 7], agent="a", session="s")
    assert [move.source for move in bench.runner.plans[0].demotions] == [0]
    assert bench.runner.num_restored_small == 1
    assert bench.started("longer").cached_tokens == 27


def test_after_a_step_that_failed_no_row_is_served() -> None:
    bench = hybrid(num_states=1, num_small_states=4)
    bench.ask("one", prompt(100), agent="a", session="s")
    bench.ask("two", prompt(101), agent="b", session="s")
    assert bench.cache.stats().num_checkpoints > 1
    bench.runner.fail_next = RuntimeError("gone")
    bench.ask("three", prompt(102), agent="c", session="s")
    assert isinstance(bench.events["three"][-1], Failed)
    stats = bench.cache.stats()
    assert (stats.num_checkpoints, stats.num_free_states, stats.num_free_small_states) == (0, 1, 4)
    bench.ask("again", prompt(100), agent="a", session="s")
    assert bench.started("again").cached_tokens == 0


# In the runner


def test_a_row_is_moved_before_it_is_saved_into_and_read_after(folders: Folders) -> None:
    driven = HandDriven(folders("qwen3_5"), num_states=1, num_small_states=1)
    states = driven.runner.states
    assert states is not None
    first, second = driven.stream(0), driven.stream(1)
    driven.feed(first, prompt_of(30, seed=1), save=0)
    driven.feed(second, prompt_of(30, seed=2))
    kept, live = mx.array(states._rows[0][0]), mx.array(states._live[0][1])
    driven.run(demotions=[StateMove(0, 1)], saves_before=[StateSave(1, 0)], restores=[StateRestore(2, 1)])
    assert mx.array_equal(states._rows[0][0], live)
    restored = states._live[0][2]
    assert float(mx.abs(restored - kept).max()) < float(mx.abs(kept).max()) / 250
    assert not mx.array_equal(restored, kept)
    assert mx.array_equal(states.hidden(1)[0], states._live[-1][2])


def test_a_step_that_moves_states_copies_no_pool_of_them(folders: Folders) -> None:
    driven = HandDriven(folders("qwen3_next"), num_states=600, num_small_states=2400)
    states = driven.runner.states
    assert states is not None
    smallest_copy = min(states._rows[0].nbytes, states._small[0].nbytes)
    stream = driven.stream(0)
    for number in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        driven.run(
            rows_of(stream, [1], save=5),
            demotions=[StateMove(number, 700 + number), StateMove(5, 800)],
            saves_before=[StateSave(1, number)],
            restores=[StateRestore(2, 700)],
        )
        assert mx.get_peak_memory() - before < smallest_copy / 2


def test_what_small_rows_hold_is_measured(folders: Folders) -> None:
    loaded = HandDriven(folders("qwen3_next"), num_states=2, num_small_states=5).loaded
    # 3 layers x (4 heads x 32 x 32 codes, 4 x 32 scales, 3 inputs of 256 channels), and a hidden row of 128
    small = 3 * (4 * 32 * 32 + 4 * (4 * 32 + 3 * 256)) + 4 * 128
    facts = loaded.states
    assert facts is not None
    assert (facts.num_states, facts.num_small_states, facts.bytes_per_small_state) == (2, 5, small)
    assert facts.total_bytes == (4 + 2) * facts.bytes_per_state + 5 * small
    assert facts.total_bytes == next(i.num_bytes for i in loaded.ledger.items if i.name == "states")


# In what the model then says


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_after_a_small_state_differ_by_a_bounded_part_and_clear_tokens_are_the_same(
    folders: Folders, name: str
) -> None:
    driven = HandDriven(folders(name), num_states=1, num_small_states=1)
    stream = driven.stream(0)
    driven.feed(stream, prompt_of(150, seed=1), save=0)
    exact = rows_after(driven, stream, 0)
    driven.run(demotions=[StateMove(0, 1)])
    small = rows_after(driven, stream, 1)
    differences = [difference(found, expected) for found, expected in zip(small, exact, strict=True)]
    assert EXACT < max(differences) < AT_ONCE
    num_clear = 0
    for found, expected in zip(small, exact, strict=True):
        best = mx.sort(expected)[-2:]
        if float(best[1] - best[0]) > 2 * AT_ONCE * float(mx.abs(expected).max()):
            num_clear += 1
            assert int(found.argmax()) == int(expected.argmax())
    assert num_clear


def rows_after(driven: HandDriven, stream: Stream, row: int) -> list[mx.array]:
    """Logits behind each of a few tokens, from a checkpoint row on."""
    found = []
    again = copy.deepcopy(stream)
    for number, token in enumerate(prompt_of(8, seed=2)):
        driven.run(rows_of(again, [token]), restores=[] if number else [StateRestore(0, row)])
        found.append(driven.logits[0])
    return found


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_call_goes_on_from_eight_bits_in_the_whole_engine(folders: Folders, name: str) -> None:
    family = Family(folders(name))
    engine = family.engine(num_states=2, num_small_states=8)
    first = Call(prompt_of(200, seed=1))
    engine.run(first)
    for seed in (2, 3):
        engine.run(Call(prompt_of(90, seed=seed)))
    assert engine.worst < EXACT
    longer = Call(first.whole + prompt_of(9, seed=4))
    engine.run(longer, exact=False)
    assert longer.cached == len(first.whole) - 1
    assert engine.watched.num_restored_small == engine.watched.num_restored == 1
    assert EXACT < engine.worst < SMALL_STATE[name]
