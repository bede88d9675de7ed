"""Turns with grammars beside turns without, through the real engine over the fake model."""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from tests.fakes import END_ID, VOCAB_SIZE, FakeModel, fake_rules, fake_submit
from tests.workers.engine_bench import Bench, prompt_of
from workers.grammar import Building, GrammarLimits, Grammars
from workers.messages import Cancel, Failed, Finished, Grammar, Pause, Paused, Sampling, Submit
from workers.plan import Constraint, PendingConstraint
from workers.process import grammars_of
from workers.turn import Turn

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TIGHT = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
SOURCE = "start: %json " + json.dumps(TIGHT)
NEVER = Grammar(source='start: "never built"')


class Grammatical(Grammars):
    """As the engine has them; `begin` waits until they are built, but for NEVER."""

    def begin(self, grammar: Grammar, generated: Sequence[int], now: float) -> Building:
        if grammar == NEVER:
            return Building(grammar, generated, now + 10)
        building = super().begin(grammar, generated, now)
        deadline = time.monotonic() + 10
        while not building.is_done and time.monotonic() < deadline:
            time.sleep(0.0005)
        return building


def bench_of(**settings: Any) -> Bench:
    rules = fake_rules()
    grammars = Grammatical(rules.detokenizer, width=VOCAB_SIZE, end_ids=rules.eos_token_ids)
    return Bench(grammars=grammars, **settings)


def strict(
    run_id: str, seed: int = 0, *, source: str = SOURCE, after: str | None = None, **settings: Any
) -> Submit:
    wanted = {"max_tokens": 150, "sampling": Sampling(temperature=1.0, seed=seed), **settings}
    return fake_submit(
        run_id, prompt_of(20 + seed % 9, seed), grammar=Grammar(source=source, after=after), **wanted
    )


def plain(run_id: str, seed: int = 0, *, max_tokens: int = 30) -> Submit:
    return fake_submit(
        run_id,
        prompt_of(15 + seed, seed),
        max_tokens=max_tokens,
        sampling=Sampling(temperature=1.0, seed=seed),
    )


def assert_valid(bench: Bench, run_id: str) -> None:
    end = bench.end(run_id)
    assert isinstance(end, Finished) and end.reason == "stop", end
    assert not list(Draft202012Validator(PERSON).iter_errors(json.loads(bench.text(run_id))))


@pytest.mark.parametrize("order", range(5))
def test_strict_plain_and_strict_rows_in_any_order_keep_to_their_own(order: int) -> None:
    """Bug 14, processors that do not travel with their rows: rows join and leave the batch in every order."""
    bench = bench_of()
    submits = [strict(f"strict{n}", n) for n in range(4)] + [plain(f"plain{n}", n) for n in range(3)]
    random.Random(order).shuffle(submits)
    for submit in submits:
        bench.engine.submit(submit)
        bench.run(order)
    bench.run()
    for submit in submits:
        if submit.grammar is not None:
            assert_valid(bench, submit.run_id)
        else:
            expected = bench.model.generate(submit, 30)
            assert bench.token_ids(submit.run_id) == expected, "a neighbour's grammar was felt"


def test_a_strict_turn_gives_in_company_what_it_gives_alone() -> None:
    alone, company = bench_of(), bench_of()
    alone.engine.submit(strict("one", 3))
    alone.run()
    for submit in (plain("p", 1), strict("other", 5), strict("one", 3), plain("q", 2)):
        company.engine.submit(submit)
    company.run()
    assert company.token_ids("one") == alone.token_ids("one")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_complete_grammar_ends_the_turn(temperature: float, ignore_eos: bool) -> None:
    bench = bench_of()
    sampling = Sampling(temperature=temperature, seed=1)
    bench.engine.submit(strict("one", source='start: "yes" | "no"', sampling=sampling, ignore_eos=ignore_eos))
    bench.engine.submit(strict("two", source="start: /[ab]{2,9}/", sampling=sampling, ignore_eos=ignore_eos))
    bench.run()
    for run_id, words in (("one", "yesno"), ("two", "ab")):
        end = bench.end(run_id)
        assert isinstance(end, Finished) and end.reason == "stop" and end.stop_text is None
        assert set(bench.text(run_id)) <= set(words) and len(bench.text(run_id)) >= 2
        assert END_ID not in bench.token_ids(run_id)


def test_a_grammar_that_is_complete_with_the_last_token_allowed_ends_in_stop_and_else_in_length() -> None:
    """Bug 20: an answer that is cut is `length`, and one that is whole is not."""
    bench = bench_of()
    bench.engine.submit(strict("whole", source='start: "abc"', max_tokens=3))
    bench.engine.submit(strict("cut", source='start: "abc"', max_tokens=2))
    bench.run()
    ends = [bench.end(run_id) for run_id in ("whole", "cut")]
    assert [end.reason for end in ends if isinstance(end, Finished)] == ["stop", "length"]


def test_logprobs_tell_of_each_token_of_a_strict_turn() -> None:
    bench = bench_of()
    bench.engine.submit(
        strict("one", source='start: "abc"', sampling=Sampling(temperature=0, top_logprobs=1))
    )
    bench.run()
    told = [event.logprobs for event in bench.events["one"] if hasattr(event, "logprobs")]
    assert [len(one) for one in told] == [1, 1, 1]


def test_the_end_of_thinking_begins_the_grammar_and_no_end_comes_before() -> None:
    bench = bench_of(model=FakeModel(alphabet=b"ab</t>", end_every=3))
    bench.engine.submit(strict("one", source='start: "{}"', after="</", max_tokens=200))
    bench.run()
    end, text = bench.end("one"), bench.text("one")
    assert isinstance(end, Finished) and end.reason == "stop"
    assert text.endswith("</{}") and text.count("{") == 1


def test_a_turn_that_never_ends_its_thinking_ends_by_length() -> None:
    bench = bench_of(model=FakeModel(alphabet=b"ab", end_every=2))
    bench.engine.submit(strict("one", after="</think>", max_tokens=40))
    bench.run()
    end = bench.end("one")
    assert isinstance(end, Finished) and end.reason == "length"


class Emptied:
    """A grammar that allows less and less, and nothing in the end, as no real one should."""

    is_complete = False

    def __init__(self, inner: Constraint, num_left: int) -> None:
        self._inner, self._num_left = inner, num_left

    def allowed(self) -> Any:
        if not self._num_left:
            self._inner.advance(END_ID)  # what the library refuses
        return self._inner.allowed()

    def advance(self, token_id: int) -> None:
        self._num_left -= 1
        self._inner.advance(token_id)


class Emptying(Grammatical):
    def begin(self, grammar: Grammar, generated: Sequence[int], now: float) -> Any:
        return _Emptied(super().begin(grammar, generated, now))


class _Emptied:
    def __init__(self, building: PendingConstraint) -> None:
        self._building = building

    def poll(self, now: float) -> Constraint | None:
        inner = self._building.poll(now)
        return None if inner is None else Emptied(inner, 4)


def test_an_empty_mask_fails_that_turn_alone_and_is_never_sampled_from() -> None:
    """Bug 28."""
    rules = fake_rules()
    grammars = Emptying(rules.detokenizer, width=VOCAB_SIZE, end_ids=rules.eos_token_ids)
    bench = Bench(grammars=grammars)
    bench.engine.submit(strict("one"))
    bench.engine.submit(other := plain("two"))
    bench.run()
    end = bench.end("one")
    assert isinstance(end, Failed) and (end.error, end.retryable) == ("grammar_dead_end", False)
    assert end.usage.completion_tokens == 4 and bench.text("one").startswith('{"')
    assert bench.token_ids("two") == bench.model.generate(other, 30)


@pytest.mark.parametrize("source", ["nonsense", 'start: %json {"not": {}}'])
def test_a_grammar_that_cannot_be_built_fails_that_turn_alone(source: str) -> None:
    bench = bench_of()
    bench.engine.submit(strict("one", source=source))
    bench.engine.submit(other := plain("two"))
    bench.run()
    end = bench.end("one")
    assert isinstance(end, Failed) and (end.error, end.retryable) == ("grammar_error", False)
    assert bench.token_ids("two") == bench.model.generate(other, 30)


def test_a_grammar_that_takes_too_long_fails_that_turn_and_holds_up_nobody() -> None:
    bench = bench_of()
    bench.engine.submit(msgspec.structs.replace(strict("one"), grammar=NEVER))
    bench.engine.submit(other := plain("two"))
    bench.run(40)
    assert bench.token_ids("two") == bench.model.generate(other, 30)
    assert not bench.events["one"] and 0 < bench.engine.rest_seconds <= 0.005
    bench.run()
    end = bench.end("one")
    assert isinstance(end, Failed) and end.error == "grammar_error" and "in time" in end.message


def test_an_engine_that_takes_no_grammars_says_so() -> None:
    bench = Bench()
    bench.engine.submit(strict("one"))
    bench.run()
    end = bench.end("one")
    assert isinstance(end, Failed) and end.error == "grammar_error"


def test_a_turn_can_be_cancelled_and_paused_while_its_grammar_is_built() -> None:
    bench = bench_of()
    for run_id in ("one", "two"):
        bench.engine.submit(msgspec.structs.replace(strict(run_id), grammar=NEVER))
    bench.run(3)
    bench.engine.cancel(Cancel(run_id="one", attempt=1))
    bench.engine.pause(Pause(run_id="two", attempt=1))
    bench.run()
    assert [type(bench.events[run_id][-1]).__name__ for run_id in ("one", "two")] == ["Cancelled", "Paused"]
    assert not bench.engine.has_work


def test_a_preempted_turn_goes_on_in_its_grammar() -> None:
    bench = bench_of(num_pages=20, context_length=100)
    submits = [strict(f"run{n}", n, max_tokens=60) for n in range(4)]
    for submit in submits:
        bench.engine.submit(submit)
    bench.run()
    assert bench.engine.stats().num_preempted > 0
    for submit in submits:
        end = bench.end(submit.run_id)
        assert isinstance(end, Finished)
        if end.reason == "stop":
            assert_valid(bench, submit.run_id)


@pytest.mark.parametrize("num_before", [0, 1, 5, 12])
@pytest.mark.parametrize("after", [None, "</"])
def test_a_paused_and_resumed_turn_goes_on_in_its_grammar(num_before: int, after: str | None) -> None:
    model = FakeModel(alphabet=b"ab</", end_every=0)
    whole = bench_of(model=model)
    whole.engine.submit(asked := strict("one", 2, after=after))
    whole.run()
    cut = bench_of(model=model)
    cut.engine.submit(asked)
    while len(cut.token_ids("one")) < num_before:
        cut.step()
    cut.engine.pause(Pause(run_id="one", attempt=1))
    cut.run()
    assert isinstance(cut.events["one"][-1], Paused)
    before = cut.token_ids("one")
    resumed = msgspec.structs.replace(
        asked,
        attempt=2,
        token_ids=asked.token_ids + array("I", before).tobytes(),
        generated_tokens=len(before),
    )
    cut.engine.submit(resumed)
    cut.run()
    assert cut.token_ids("one") == whole.token_ids("one")
    assert cut.text("one") == whole.text("one")


class Echo:
    """Proposes nonsense, which a grammar must never see."""

    def propose(self, turn: Turn) -> Sequence[int]:
        return [ord("z")] * 3


def test_drafts_are_not_taken_where_a_grammar_holds() -> None:
    bench = bench_of(drafter=Echo())
    bench.engine.submit(strict("one", 1))
    bench.engine.submit(other := plain("two"))
    bench.run()
    assert_valid(bench, "one")
    assert bench.token_ids("two") == bench.model.generate(other, 30)


def test_the_rules_of_a_loaded_engine_make_its_grammars() -> None:
    made = grammars_of(fake_rules(), GrammarLimits())
    building = made.begin(Grammar(source='start: "a"'), [], 0.0)
    while (grammar := building.poll(0.0)) is None:
        time.sleep(0.001)
    assert grammar.allowed().nonzero()[0].tolist() == [ord("a")]
