"""Constrained turns of real small models, paused, resumed and steered: the grammar is where the text is."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import pytest

from tests.models import EngineUnderTest, make_model
from workers.messages import Finished, Grammar, Pause, Paused, Sampling, Submit, Tokens, TurnEnd

from .engine_bench import resumed
from .test_grammar_model import SOURCE, assert_strict, engine_over, submit_of

PROMPT = [(7 * n) % 250 for n in range(40)]
CLOSING = [256, *b"no, another"]
"""What stands between a turn that was cut and the next one's answer."""

AFTER = {"at once": None, "after a thought": "e"}


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", request.param)


def attempt(
    tested: EngineUnderTest, submit: Submit, pause_at: int | None = None
) -> tuple[list[int], str, TurnEnd]:
    """Tokens, text and end; paused behind so many tokens."""
    token_ids: list[int] = []
    text, end = "", None
    tested.engine.submit(submit)
    while tested.engine.has_work:
        for told in tested.engine.step():
            if isinstance(told.event, Tokens):
                token_ids += array("I", told.event.token_ids).tolist()
                text += told.event.text
            elif isinstance(told.event, TurnEnd):
                end = told.event
        if len(token_ids) == pause_at and end is None:
            tested.engine.pause(Pause(run_id=submit.run_id, attempt=submit.attempt))
    tested.engine.check_integrity()
    assert end is not None
    return token_ids, text, end


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER.keys())
def test_a_constrained_turn_in_parts_is_the_one_in_one_piece(folder: Path, after: str | None) -> None:
    tested = engine_over(folder)
    grammar = Grammar(source=SOURCE, after=after)
    sampling = Sampling(temperature=1.0, seed=3, logit_bias={ord("e"): 4.0})
    submit = msgspec.structs.replace(submit_of(tested, "whole", PROMPT, grammar), sampling=sampling)
    whole, text, end = attempt(tested, submit)
    assert_strict(text.partition(after)[2] if after else text, end)
    cut: list[int] = []
    parts = ""
    submit = msgspec.structs.replace(submit, run_id="cut")
    for pause_at in (1, 5, 4, len(whole) - 14):
        more, told, end = attempt(tested, submit, pause_at)
        assert isinstance(end, Paused)
        cut, parts = cut + more, parts + told
        submit = resumed(submit, cut)
    more, told, end = attempt(tested, submit)
    assert cut + more == whole and parts + told == text
    assert isinstance(end, Finished) and end.reason == "stop"


def test_a_steered_turns_grammar_begins_with_its_own_text(folder: Path) -> None:
    tested = engine_over(folder)
    first = submit_of(tested, "run", PROMPT, Grammar(source=SOURCE))
    said, _, end = attempt(tested, first, 7)
    assert isinstance(end, Paused)
    second = submit_of(tested, "run", [*PROMPT, *said, *CLOSING], Grammar(source=SOURCE))
    _, text, end = attempt(tested, msgspec.structs.replace(second, attempt=2))
    assert_strict(text, end)
    _, alone, end = attempt(engine_over(folder), second)
    assert alone == text
