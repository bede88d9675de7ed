"""Hybrids in the whole engine: every sampled row's logits and every greedy token are mlx-lm's own.

Cold, from each kind of checkpoint, forked, cancelled at chunk borders, alone and in company.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import pytest

from tests.models import make_model
from tests.tiny_models import MIXED_FAMILIES
from tests.workers.hybrid_engine import Call, Family, TestedEngine
from tests.workers.hybrid_steps import EXACT, bound_of
from tests.workers.test_parity import prompt_of

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
Families = Callable[[str], Family]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return functools.cache(lambda name: Family(make_model(tmp_path_factory.mktemp(name) / "model", name)))


def told_again_and_longer(engine: TestedEngine, prompts: list[list[int]], *, exact: bool = True) -> None:
    """Prompts in company: cold, told again word for word, and with their answers and more behind them."""
    cold = [Call(prompt) for prompt in prompts]
    engine.run(*cold, exact=exact)
    again = [Call(prompt) for prompt in prompts]
    engine.run(*again, exact=exact)
    longer = [Call(call.whole + prompt_of(9, seed=1)) for call in cold]
    engine.run(*longer, exact=exact)
    if engine.tested.loaded.states is None:
        assert [call.cached for call in again] == [len(prompt) - 1 for prompt in prompts]
    else:
        assert [call.cached for call in again] == [len(prompt) for prompt in prompts], "nothing was run"
        assert engine.watched.num_replayed == len(prompts)
        assert engine.watched.num_restored == engine.tested.engine.stats().num_restored == 2 * len(prompts)
    # The last token was sampled and never fed.
    assert [call.cached for call in longer] == [len(call.whole) - 1 for call in cold]


@pytest.mark.parametrize("group", range(8))
def test_every_length_modulo_a_page_in_company(families: Families, group: int) -> None:
    family = families("qwen3_next")
    engine = family.engine()
    told_again_and_longer(engine, [prompt_of(64 + residue, seed=residue) for residue in range(group, 64, 8)])
    assert engine.worst < EXACT


@pytest.mark.parametrize("name", MIXED_FAMILIES)
@pytest.mark.parametrize("bits", ["native", "8"])
def test_page_borders_of_every_family_alone_and_in_company(
    families: Families, name: str, bits: Literal["native", "8"]
) -> None:
    family = families(name)
    exact = bits == "native"
    prompts = [prompt_of(128 + residue, seed=residue) for residue in (0, 1, 63)]
    company = family.engine(bits)
    told_again_and_longer(company, prompts, exact=exact)
    alone = family.engine(bits)
    told_again_and_longer(alone, prompts[:1], exact=exact)
    assert max(company.worst, alone.worst) < bound_of(name, bits)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("bits", ["native", "8"])
def test_restored_at_the_end_of_the_system_text_of_the_last_message_and_of_the_answer(
    families: Families, name: str, bits: Literal["native", "8"]
) -> None:
    family, exact = families(name), bits == "native"
    engine = family.engine(bits)
    system = prompt_of(90, seed=5)
    first = Call(system + prompt_of(300, seed=6), hints=hints("a", system=90, turn=380))
    engine.run(first, exact=exact)
    other_agent = Call(system + prompt_of(100, seed=7), hints=hints("b", system=90, turn=180))
    engine.run(other_agent, exact=exact)
    assert other_agent.cached == 90, "the system text"
    rewritten = Call(first.prompt[:380] + prompt_of(20, seed=8), hints=hints("a", turn=395))
    engine.run(rewritten, exact=exact)
    assert rewritten.cached == 380, "the last message, before the prompt to answer it"
    next_turn = Call(other_agent.whole + prompt_of(20, seed=9), hints=hints("b"))
    engine.run(next_turn, exact=exact)
    assert next_turn.cached == len(other_agent.whole) - 1, "the answer"
    assert engine.watched.num_restored == 3
    assert engine.worst < bound_of(name, bits)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("bits", ["native", "8"])
def test_children_of_a_fork_restore_what_the_first_of_them_computed(
    families: Families, name: str, bits: Literal["native", "8"]
) -> None:
    engine = families(name).engine(bits)
    shared = prompt_of(1030, seed=3)
    children = [
        Call(shared + prompt_of(5 + child, seed=child), hints=hints(f"child{child}", fork=1030))
        for child in range(4)
    ]
    engine.run(*children, exact=bits == "native")
    assert sorted(call.cached for call in children) == [0, 1030, 1030, 1030]
    assert engine.watched.num_restored == 3
    assert engine.worst < bound_of(name, bits)


@pytest.mark.parametrize(
    ("name", "border"), [("qwen3_next", 256), ("qwen3_next", 384), ("qwen3_5", 384), ("qwen3_5_moe", 256)]
)
@pytest.mark.parametrize("bits", ["native", "8"])
def test_a_call_cancelled_at_a_chunk_border_goes_on_from_there(
    families: Families, name: str, border: int, bits: Literal["native", "8"]
) -> None:
    engine, exact = families(name).engine(bits), bits == "native"
    prompt = prompt_of(450, seed=4)
    neighbour = Call(prompt_of(70, seed=2), num_tokens=12)
    engine.run(Call(prompt, cancel_at=border), neighbour, exact=exact)
    again = Call(prompt)
    engine.run(again, Call(neighbour.prompt), exact=exact)
    assert again.cached == border
    assert engine.watched.num_restored == 2
    assert engine.worst < bound_of(name, bits)


def test_rows_between_checkpoint_and_kept_pages_run_again(families: Families) -> None:
    """A prompt parts from an earlier one between two checkpoints, while the earlier one's agent goes on."""
    family = families("qwen3_next")
    engine = family.engine()
    first = Call(prompt_of(420, seed=11), hints=hints("a", system=70))
    engine.run(first)
    parted = Call(first.prompt[:400] + prompt_of(50, seed=12), hints=hints("b"))
    engine.run(Call(first.whole + prompt_of(4, seed=13), num_tokens=12, hints=hints("a")), parted)
    assert parted.cached == 70
    assert engine.worst < EXACT


def hints(agent: str, *, system: int = 0, turn: int = 0, fork: int = 0) -> dict[str, object]:
    """Of one agent's call, as fields of Submit."""
    return {
        "session": "s",
        "agent": agent,
        "system_tokens": system,
        "turn_tokens": turn,
        "fork_tokens": fork,
    }
