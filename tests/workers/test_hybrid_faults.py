"""What a broken state costs in the whole engine: its own turn, and nobody and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.models import make_model
from tests.workers.hybrid_engine import Call, Family
from tests.workers.hybrid_steps import EXACT
from tests.workers.test_parity import prompt_of
from workers.messages import Failed

NAN_TOKEN = 300


@pytest.fixture
def family(tmp_path: Path) -> Family:
    """The head is a matrix of its own: only prompts that hold the token are hit."""
    folder = make_model(tmp_path / "model", "qwen3_next")
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    mx.eval(weights)
    weights["model.embed_tokens.weight"][NAN_TOKEN] = mx.nan
    mx.save_safetensors(str(file), weights)
    return Family(folder)


def test_a_turn_whose_state_breaks_fails_alone_and_leaves_no_checkpoint(family: Family) -> None:
    engine = family.engine()
    shared = prompt_of(130)
    engine.run(Call(shared))
    broken = Call([*shared, *prompt_of(20, seed=1), NAN_TOKEN, *prompt_of(20, seed=2)], is_broken=True)
    others = [Call(shared + prompt_of(30, seed=seed)) for seed in (3, 4)]
    engine.run(broken, *others)
    again = Call([*broken.prompt], is_broken=True)
    engine.run(again)
    for call in (broken, again):
        assert isinstance(call.end, Failed) and call.end.error == "row_fault"
        assert call.cached <= len(shared) + 20
    after = Call(broken.prompt[:150] + prompt_of(9, seed=5))
    engine.run(after, Call([*others[0].whole, 1]))
    assert engine.worst < EXACT


def test_a_checkpoint_that_broke_fails_one_turn_and_is_never_served_again(family: Family) -> None:
    engine = family.engine()
    first = Call(prompt_of(130))
    engine.run(first)
    states = engine.tested.loaded.runner.states
    assert states is not None
    for rows in states._rows:
        rows[:] = mx.nan
    longer = first.whole + prompt_of(9, seed=1)
    for position in (132, 130):  # the end of the answer, that of the prompt
        broken = Call(longer, is_broken=True)
        engine.run(broken)
        assert isinstance(broken.end, Failed) and broken.end.error == "row_fault"
        assert broken.cached == position
    again = Call(longer)
    engine.run(again)
    assert again.cached == 0
    assert engine.worst < EXACT


def test_a_step_that_raises_costs_its_turns_and_the_kept_states(family: Family) -> None:
    engine = family.engine()
    prompt = prompt_of(130)
    engine.run(Call(prompt))
    runner = engine.tested.loaded.runner
    body = runner._body

    def broken(ids: mx.array, cache: Any) -> mx.array:
        body(ids, cache=cache)
        raise KeyError("a name that the model lacks")

    runner._body = broken
    failed = Call([*prompt, 1, 2], is_broken=True)
    engine.run(failed)
    assert isinstance(failed.end, Failed) and failed.end.error == "step_failed"
    runner._body = body
    again = Call([*prompt, 1, 2])
    engine.run(again)
    assert again.cached == 0
    assert engine.worst < EXACT
