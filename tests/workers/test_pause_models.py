"""Paused and resumed turns of real small models are the uninterrupted ones, token for token."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from kvcache.settings import KVCacheSettings
from tests.models import EngineUnderTest, make_model
from tests.workers.engine_bench import resumed
from tests.workers.test_parity import prompt_of
from workers.messages import Finished, Pause, Paused, Progress, Sampling, Started, Submit, Tokens, TurnEnd
from workers.settings import EngineSettings

NUM_TOKENS = 24
NUM_PROMPT = 150
GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.3, presence_penalty=0.4)
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return functools.cache(lambda name: make_model(tmp_path_factory.mktemp(name) / "model", name))


class Told:
    """One run on a real engine, in as many attempts as it takes."""

    def __init__(self, folder: Path, bits: Literal["native", "8"] = "native") -> None:
        kvcache = KVCacheSettings(bits=bits, pool_tokens=2048, states=16)
        settings = EngineSettings(model=str(folder), weights="fp32", kvcache=kvcache)
        self.tested = EngineUnderTest(settings, max_rows=64)
        self.token_ids: list[int] = []
        self.cached: list[int] = []  # as each attempt was told
        self.ends: list[TurnEnd] = []

    def submit_of(self, sampling: Sampling) -> Submit:
        return Submit(
            run_id="run",
            attempt=1,
            incarnation=1,
            digest=self.tested.loaded.digest,
            token_ids=array("I", prompt_of(NUM_PROMPT)).tobytes(),
            max_tokens=NUM_TOKENS,
            sampling=sampling,
            ignore_eos=True,
        )

    def run(self, submit: Submit, pause_at: int | None = None, *, in_prefill: bool = False) -> None:
        """Until the attempt ends: paused behind so many tokens of the run, or behind its first chunk."""
        engine = self.tested.engine
        engine.submit(submit)
        while engine.has_work:
            for told in engine.step():
                event = told.event
                if isinstance(event, Tokens):
                    self.token_ids += array("I", event.token_ids).tolist()
                elif isinstance(event, Started):
                    self.cached.append(event.cached_tokens)
                elif isinstance(event, TurnEnd):
                    self.ends.append(event)
                is_due = isinstance(event, Progress) if in_prefill else len(self.token_ids) == pause_at
                if is_due:
                    engine.pause(Pause(run_id="run", attempt=submit.attempt))
        engine.check_integrity()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama", "native"), ("llama", "8"), ("qwen3_next", "native"), ("qwen3_5_moe", "native")],
)
def test_a_turn_in_parts_has_the_tokens_of_one_in_one_piece(
    folders: Folders, name: str, bits: Literal["native", "8"], sampling: Sampling
) -> None:
    whole, cut = Told(folders(name), bits), Told(folders(name), bits)
    submit = whole.submit_of(sampling)
    whole.run(submit)
    cut.run(submit, in_prefill=True)
    assert isinstance(cut.ends[-1], Paused) and not cut.token_ids
    for pause_at in (1, 2, 9, 17):
        submit = resumed(submit, cut.token_ids)
        cut.run(submit, pause_at)
        assert isinstance(cut.ends[-1], Paused)
    cut.run(resumed(submit, cut.token_ids))
    end = cut.ends[-1]
    assert isinstance(end, Finished) and cut.token_ids == whole.token_ids
    # Nothing was computed twice: an attempt goes on behind all that the one before computed.
    assert cut.cached == [0, 64, NUM_PROMPT, NUM_PROMPT + 1, NUM_PROMPT + 8, NUM_PROMPT + 16]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (NUM_PROMPT, NUM_TOKENS)
    assert end.usage.cached_tokens == NUM_PROMPT


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_resumed_turn_that_lost_everything_is_computed_anew(folders: Folders, name: str) -> None:
    whole, cut = Told(folders(name)), Told(folders(name))
    submit = whole.submit_of(GREEDY)
    whole.run(submit)
    cut.run(submit, 9)
    cut.tested.engine.abandon()
    cut.tested.cache.evict(2048)
    cut.run(resumed(submit, cut.token_ids))
    assert cut.token_ids == whole.token_ids and cut.cached[1] < NUM_PROMPT
