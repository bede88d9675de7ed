"""Forks at the points where an engine keeps what it computed, by its own counters; dense and hybrid."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvcache.settings import KVCacheSettings
from tests.models import EngineUnderTest, make_model
from workers.messages import Finished, Pause, Paused, Sampling, Started, Submit, Tokens, TurnEnd
from workers.settings import EngineSettings

from .test_parity import prompt_of

SYSTEM, PROMPT, OPENING = 300, 700, 5
"""Tokens of the system part, of the prompt up to where the answer opens, and of that opening."""

NUM_TOKENS = 30
NUM_OWN = 8


class Family:
    """A parent on a real engine, and children that go on behind its tokens."""

    def __init__(self, folder: Path) -> None:
        kvcache = KVCacheSettings(bits="native", pool_tokens=8192, states=24)
        settings = EngineSettings(model=str(folder), weights="fp32", kvcache=kvcache)
        tested = EngineUnderTest(settings, max_rows=128)
        self.engine, self.is_hybrid = tested.engine, tested.cache.has_states
        self.ids = prompt_of(PROMPT + OPENING)
        self.cached: dict[str, int] = {}
        self.ends: dict[str, TurnEnd] = {}

    def begin(self) -> Submit:
        submit = self.submit("parent", self.ids, NUM_TOKENS)
        submit = msgspec.structs.replace(submit, system_tokens=SYSTEM, turn_tokens=PROMPT)
        self.engine.submit(submit)
        return submit

    def fork(self, num_tokens: int) -> int:
        """How many tokens of its own a child of so many of the parent's found."""
        name = f"child {len(self.cached)}"
        before = self.engine.stats().prompt_tokens_computed
        own = [200 + len(self.cached), *prompt_of(NUM_OWN)[1:]]  # no other begins so
        submit = self.submit(name, [*self.ids[:num_tokens], *own], 3)
        self.engine.submit(
            msgspec.structs.replace(submit, fork_tokens=num_tokens, parent="p", session="s", agent=name)
        )
        self.run(lambda: name in self.ends)
        computed = self.engine.stats().prompt_tokens_computed - before
        assert computed >= num_tokens + NUM_OWN - self.cached[name]
        return self.cached[name]

    def submit(self, run_id: str, ids: list[int], num_tokens: int) -> Submit:
        return Submit(
            run_id=run_id,
            attempt=1,
            incarnation=1,
            digest="",
            token_ids=array("I", ids).tobytes(),
            max_tokens=num_tokens,
            sampling=Sampling(temperature=0),
            ignore_eos=True,
            stops_derailed=False,
            session="s",
            agent="p",
        )

    def run(self, is_done: Callable[[], bool]) -> None:
        while self.engine.has_work and not is_done():
            for told in self.engine.step():
                match told.event:
                    case Started(cached_tokens=cached):
                        self.cached[told.run_id] = cached
                    case Tokens(token_ids=token_ids) if told.run_id == "parent":
                        self.ids += array("I", token_ids).tolist()
                    case Finished() | Paused() as end:
                        self.ends[told.run_id] = end


@pytest.fixture(params=["llama", "qwen3_next"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    return Family(make_model(tmp_path / "model", request.param))


@pytest.mark.parametrize("parent", ["ended", "paused", "running"])
def test_a_fork_at_a_checkpoint_computes_nothing_of_its_parents(family: Family, parent: str) -> None:
    family.begin()
    if parent != "ended":
        family.run(lambda: len(family.ids) >= PROMPT + OPENING + 10)
    if parent == "paused":
        family.engine.pause(Pause(run_id="parent", attempt=1))
    if parent != "running":
        family.run(lambda: "parent" in family.ends)
        end = len(family.ids)
        assert family.fork(end) == end - 1, "an answer's last token is not computed before another follows"
    assert [family.fork(point) for point in (SYSTEM, PROMPT, SYSTEM)] == [SYSTEM, PROMPT, SYSTEM]


def test_a_fork_at_any_other_token_computes_from_the_checkpoint_before_it(family: Family) -> None:
    family.begin()
    family.run(lambda: "parent" in family.ends)
    end, is_hybrid = len(family.ids), family.is_hybrid
    assert [family.fork(500), family.fork(end - 10)] == ([SYSTEM, PROMPT] if is_hybrid else [500, end - 10])


def test_a_further_turn_leaves_the_points_of_those_before_it(family: Family) -> None:
    first = family.begin()
    family.run(lambda: "parent" in family.ends)
    turn_end = len(family.ids)
    family.ids += [199, *prompt_of(250)]
    second = family.submit("parent", family.ids, NUM_TOKENS)
    family.engine.submit(msgspec.structs.replace(second, attempt=first.attempt + 1, system_tokens=SYSTEM))
    del family.ends["parent"]
    family.run(lambda: "parent" in family.ends)
    assert [family.fork(point) for point in (SYSTEM, PROMPT)] == [SYSTEM, PROMPT]
    assert family.fork(turn_end) >= turn_end - 1
