"""Grammars over real models: the mask comes before all that picks, and outputs validate."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from kvcache.settings import KVCacheSettings
from tests.models import EngineUnderTest, make_model
from workers.errors import DeadEnd
from workers.fetch import cache_dir, fetch_default_model
from workers.messages import Finished, Grammar, Sampling, Submit, Tokens
from workers.plan import RowSampling, SegmentResult
from workers.sampling import draw
from workers.settings import EngineSettings

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["fox", "owl", "é"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
SOURCE = "start: %json " + json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
LOGITS = [3.0, 2.0, 1.0, 0.0, -1.0]


class Only:
    """Allows some tokens."""

    is_complete = False

    def __init__(self, *token_ids: int, width: int = len(LOGITS)) -> None:
        self._mask = np.zeros(width, np.bool_)
        self._mask[list(token_ids)] = True

    def allowed(self) -> Any:
        return self._mask

    def advance(self, token_id: int) -> None:
        raise AssertionError("a draw does not move the grammar")


def drawn(sampling: Sampling, grammar: Only, **row: Any) -> SegmentResult:
    known: dict[str, Any] = {"seed": 1, "step": 0, "prompt": (), "generated": (), **row}
    return draw(mx.array(LOGITS), RowSampling(sampling=sampling, constraint=grammar, **known)).result()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.0, "logit_bias": {0: 100.0, 3: -100.0, 4: -100.0}},
        {"temperature": 1.0, "repetition_penalty": 10.0, "presence_penalty": 2.0, "top_k": 2},
        {"temperature": 0.0, "repetition_penalty": 0.01, "frequency_penalty": -2.0},
    ],
)
def test_nothing_that_picks_sees_what_the_grammar_forbids(settings: dict[str, Any]) -> None:
    for step in range(30):
        result = drawn(Sampling(**settings), Only(3, 4), step=step, generated=(0, 1, 0), prompt=(0, 4))
        assert result.fault is None and result.token_ids[0] in (3, 4)


def test_logprobs_of_a_masked_row_are_those_of_the_raw_logits() -> None:
    free = drawn(Sampling(temperature=0, top_logprobs=5), Only(0, 1, 2, 3, 4)).logprobs[0]
    masked = drawn(Sampling(temperature=0, top_logprobs=5), Only(4)).logprobs[0]
    assert masked.top == free.top and masked.chosen == free.top[4]


def test_no_mask_is_an_error_rather_than_an_unmasked_row() -> None:
    """Bug 28: a mask of another width, or an empty one, never falls back to a free draw."""
    with pytest.raises(DeadEnd):
        drawn(Sampling(temperature=0), Only(0, width=4))
    assert drawn(Sampling(temperature=0), Only()).fault


def engine_over(folder: Path) -> EngineUnderTest:
    kvcache = KVCacheSettings(bits="native", pool_tokens=4096)
    return EngineUnderTest(EngineSettings(model=str(folder), weights="fp32", context=1024, kvcache=kvcache))


def submit_of(tested: EngineUnderTest, run_id: str, prompt: list[int], grammar: Grammar | None) -> Submit:
    return Submit(
        run_id=run_id,
        attempt=1,
        incarnation=1,
        digest=tested.loaded.digest,
        token_ids=array("I", prompt).tobytes(),
        max_tokens=120 if grammar is not None else 40,
        sampling=Sampling(temperature=1.0, seed=len(prompt)),
        ignore_eos=grammar is None,
        grammar=grammar,
    )


def answers(tested: EngineUnderTest, submits: list[Submit]) -> dict[str, tuple[str, Any]]:
    for submit in submits:
        tested.engine.submit(submit)
    texts: dict[str, str] = {submit.run_id: "" for submit in submits}
    ends: dict[str, Any] = {}
    while tested.engine.has_work:
        for told in tested.engine.step():
            if isinstance(told.event, Tokens):
                texts[told.run_id] += told.event.text
            elif hasattr(told.event, "usage"):
                ends[told.run_id] = told.event
    tested.engine.check_integrity()
    return {run_id: (texts[run_id], ends[run_id]) for run_id in texts}


def assert_strict(text: str, end: Any) -> None:
    assert isinstance(end, Finished) and end.reason == "stop", (text, end)
    Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5"])
def test_strict_rows_of_a_small_model_validate_and_their_neighbours_are_unchanged(
    tmp_path: Path, model_type: str
) -> None:
    tested = engine_over(make_model(tmp_path / "model", model_type))
    prompts = [[(7 * n + i) % 250 for i in range(20 + n)] for n in range(8)]
    grammar = Grammar(source=SOURCE)
    plain = [submit_of(tested, f"plain{n}", prompts[n], None) for n in range(2)]
    alone = {submit.run_id: answers(tested, [submit])[submit.run_id][0] for submit in plain}
    strict = [submit_of(tested, f"strict{n}", prompts[n], grammar) for n in range(2, 8)]
    mixed = [strict[0], plain[0], *strict[1:4], plain[1], *strict[4:]]
    told = answers(tested, mixed)
    for submit in strict:
        assert_strict(*told[submit.run_id])
    assert {submit.run_id: told[submit.run_id][0] for submit in plain} == alone


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_default_model(cache_dir(os.environ))


@pytest.mark.timeout(300)
def test_the_default_model_answers_as_its_schema_says_and_ends_by_its_own_end_token(folder: Path) -> None:
    """Its tokenizer's file alone names the wrong one: the model's own list is passed explicitly."""
    tested = engine_over(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    asked = {
        "strict": (Grammar(source=SOURCE), "Describe an animal as JSON."),
        "free": (Grammar(source='start: /[a-z ]{1,40}/ | %json {"type": "boolean"}'), "Is a fox an animal?"),
    }
    submits = [
        submit_of(tested, name, tokenizer.encode(chat.format(question)).ids, grammar)
        for name, (grammar, question) in asked.items()
    ]
    told = answers(tested, submits)
    assert_strict(*told["strict"])
    assert isinstance(end := told["free"][1], Finished) and end.reason == "stop"
    assert tokenizer.token_to_id("<|im_end|>") in tested.loaded.bundle.eos_token_ids
