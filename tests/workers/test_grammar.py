"""Grammars: what they allow, how they wait for a marker, and what never ends in a free answer."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.fakes import END_ID, VOCAB_SIZE, byte_tokenizer
from workers.errors import DeadEnd, TurnRefused
from workers.grammar import Building, GrammarLimits, Grammars, TurnGrammar
from workers.messages import Grammar
from workers.text import Detokenizer

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**NUMBER, "additionalProperties": False}
WIDTH = VOCAB_SIZE + 63  # logits are often padded


def source_of(schema: Any) -> str:
    return "start: %json " + json.dumps(schema)


def grammars(**limits: Any) -> Grammars:
    return Grammars(
        Detokenizer(byte_tokenizer()), width=WIDTH, end_ids={END_ID}, limits=GrammarLimits(**limits)
    )


def wait_for(building: Building) -> TurnGrammar:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        built = building.poll(0.0)
        if built is not None:
            return built
        time.sleep(0.001)
    raise AssertionError("the grammar was never built")


def built(source: str, after: str | None = None, generated: bytes = b"") -> TurnGrammar:
    return wait_for(grammars().begin(Grammar(source=source, after=after), list(generated), 0.0))


def allowed(grammar: TurnGrammar) -> set[int]:
    mask = grammar.allowed()
    assert mask.shape == (WIDTH,) and mask.dtype == np.bool_
    return set(np.flatnonzero(mask).tolist())


def test_only_what_the_schema_allows_is_allowed_and_no_id_beyond_the_tokenizer() -> None:
    grammar = built(source_of(CLOSED))
    for byte in b'{"a":12':
        assert byte in allowed(grammar) and END_ID not in allowed(grammar)
        assert max(allowed(grammar)) < VOCAB_SIZE
        grammar.advance(byte)
        assert not grammar.is_complete
    assert allowed(grammar) == set(b" \t\r\n0123456789}")
    grammar.advance(ord("}"))
    assert grammar.is_complete


def test_an_end_is_allowed_where_the_text_may_end_and_may_go_on() -> None:
    grammar = built('start: "a" "b"?')
    grammar.advance(ord("a"))
    assert allowed(grammar) == {ord("b"), END_ID}
    assert not grammar.is_complete


def test_every_end_token_ends_a_text_and_none_of_them_before() -> None:
    detokenizer = Detokenizer(byte_tokenizer())
    two = Grammars(detokenizer, width=WIDTH, end_ids={END_ID, 7}, limits=GrammarLimits())
    grammar = wait_for(two.begin(Grammar(source='start: "a" "b"?'), [], 0.0))
    assert allowed(grammar) == {ord("a")}
    grammar.advance(ord("a"))
    assert allowed(grammar) == {ord("b"), END_ID, 7}


def test_an_empty_mask_is_an_error_and_no_end_of_the_turn() -> None:
    """servers.md bug 28: never sample from an empty mask. The library would allow the end of the turn."""
    grammar = built('start: "ab"')
    grammar.advance(ord("z"))
    for _ in range(2):
        with pytest.raises(DeadEnd):
            grammar.allowed()
    assert not grammar.is_complete


def test_a_refused_end_token_is_an_error_too() -> None:
    grammar = built('start: "ab"')
    grammar.advance(END_ID)
    assert not grammar.is_complete
    with pytest.raises(DeadEnd):
        grammar.allowed()


@pytest.mark.parametrize(
    "source",
    [
        "nonsense",
        "",
        "{",
        'start: "a" other',
        source_of({"not": {}}),
        source_of({"type": "string", "pattern": "(?=a)"}),
        source_of({"$ref": "#"}),  # allows nothing that ends
        source_of({"properties": {"a": False}, "required": ["a"], "type": "object"}),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_without_its_text(source: str) -> None:
    building = grammars().begin(Grammar(source=source), [], 0.0)
    with pytest.raises(TurnRefused) as refused:
        wait_for(building)
    assert refused.value.kind == "grammar_error" and not refused.value.retryable
    assert "nonsense" not in str(refused.value) and "simplify" in str(refused.value)


def test_a_grammar_too_large_is_refused_at_once() -> None:
    with pytest.raises(TurnRefused, match="characters"):
        grammars(max_source=100).begin(Grammar(source='start: "' + "a" * 100 + '"'), [], 0.0)


def test_a_grammar_too_slow_is_refused_by_the_clock_and_the_next_ones_are_built() -> None:
    slow = Grammar(source=source_of({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}))
    makers = grammars(build_seconds=5.0)
    building = makers.begin(slow, [], 100.0)
    with pytest.raises(TurnRefused, match="in time"):
        building.poll(105.0)
    next_one = makers.begin(Grammar(source='start: "a"'), [], 106.0)
    assert allowed(wait_for_at(next_one, 106.0)) == {ord("a")}


def test_a_thread_that_was_late_ends_with_its_work() -> None:
    before = set(threading.enumerate())
    makers = grammars(build_seconds=5.0)
    slow = Grammar(source=source_of({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}))
    for now in (100.0, 200.0, 300.0):
        makers.begin(slow, [], now)
    wait_for_at(makers.begin(Grammar(source='start: "a"'), [], 301.0), 301.0)
    deadline = time.monotonic() + 20
    while len(set(threading.enumerate()) - before) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(set(threading.enumerate()) - before) == 1


def wait_for_at(building: Building, now: float) -> TurnGrammar:
    for _ in range(10_000):
        grammar = building.poll(now)
        if grammar is not None:
            return grammar
        time.sleep(0.001)
    raise AssertionError("the grammar was never built")


def test_turns_with_one_grammar_do_not_see_each_other() -> None:
    makers = grammars()
    asked = Grammar(source=source_of(CLOSED))
    first, second = (wait_for(makers.begin(asked, [], 0.0)) for _ in range(2))
    for byte in b'{"a":':
        first.advance(byte)
    assert allowed(second) == {ord("{")}
    assert allowed(wait_for(makers.begin(asked, [], 0.0))) == {ord("{")}


def test_few_grammars_are_kept() -> None:
    makers = grammars(num_kept=2)
    for text in "abcab":
        assert allowed(wait_for(makers.begin(Grammar(source=f'start: "{text}"'), [], 0.0))) == {ord(text)}
    assert makers.num_kept == 2


@pytest.mark.parametrize("text", ['"é😀"', '"日本"', r'"\n\\"', '"\u2028"'])
def test_strings_in_any_script_are_spelt_byte_by_byte(text: str) -> None:
    grammar = built(source_of({"type": "string"}))
    for byte in text.encode():
        assert byte in allowed(grammar)
        grammar.advance(byte)
    assert grammar.is_complete


def test_no_string_ends_inside_of_a_character() -> None:
    grammar = built(source_of({"type": "string"}))
    for byte in b'"\xf0\x9f':
        grammar.advance(byte)
    assert allowed(grammar) == set(range(0x80, 0xC0))


def test_it_waits_for_its_marker_and_forbids_the_end_until_then() -> None:
    grammar = built(source_of(CLOSED), after="</think>")
    for byte in b"hm {not json} </think":
        assert grammar.is_free
        assert allowed(grammar) == set(range(WIDTH)) - {END_ID}
        grammar.advance(byte)
    grammar.advance(ord(">"))
    assert not grammar.is_free and allowed(grammar) == {ord("{")}


@pytest.mark.parametrize("before", ["<", "</", "</thin", "<</think", "</think</thin", "</t</"])
def test_a_marker_is_found_behind_what_looks_like_its_beginning(before: str) -> None:
    grammar = built('start: "x"', after="</think>")
    for byte in (before + "</think>").encode():
        assert grammar.is_free
        grammar.advance(byte)
    assert not grammar.is_free


@pytest.mark.parametrize(
    ("rest", "source"), [("\n\n", 'start: /\\n*/ "x"'), ("\n\n", 'start: "x"'), ("x", 'start: "xy"')]
)
def test_what_a_token_holds_behind_the_marker_is_the_grammars(rest: str, source: str) -> None:
    """Tokens such as `>` and two line ends in one: white space is let through where the grammar has none."""
    grammar = built(source, after="END")
    marker = {1: ("END" + rest).encode()}
    told = TurnGrammar(grammar._matcher, _with_tokens(grammar, marker), b"END")
    told.advance(1)
    assert ord("y" if rest == "x" else "x") in allowed(told)


def test_words_behind_the_marker_in_one_token_that_the_grammar_forbids_are_a_dead_end() -> None:
    grammar = built('start: "x"', after="END")
    told = TurnGrammar(grammar._matcher, _with_tokens(grammar, {1: b"ENDso"}), b"END")
    told.advance(1)
    with pytest.raises(DeadEnd):
        told.allowed()


def _with_tokens(grammar: TurnGrammar, known: dict[int, bytes]) -> Any:
    detokenizer = Detokenizer(byte_tokenizer())
    detokenizer._bytes |= known
    return type(grammar._vocabulary)(
        grammar._vocabulary.tokenizer, detokenizer, WIDTH, grammar._vocabulary.all_but_ends
    )


@pytest.mark.parametrize("cut", range(12))
def test_a_resumed_turn_stands_where_it_was(cut: int) -> None:
    text = b'ab</t>{"a":1'
    whole = built(source_of(CLOSED), after="</t>")
    for byte in text:
        whole.advance(byte)
    resumed = built(source_of(CLOSED), after="</t>", generated=text[:cut])
    for byte in text[cut:]:
        assert byte in allowed(resumed)
        resumed.advance(byte)
    assert allowed(resumed) == allowed(whole)


@pytest.mark.parametrize("after", ["", "x" * 300])
def test_an_odd_marker_is_refused(after: str) -> None:
    with pytest.raises(TurnRefused, match="after"):
        grammars().begin(Grammar(source='start: "a"', after=after), [], 0.0)


def test_a_model_without_an_end_token_takes_no_grammar() -> None:
    endless = Grammars(Detokenizer(byte_tokenizer()), width=WIDTH, end_ids=set(), limits=GrammarLimits())
    with pytest.raises(TurnRefused, match="tokenizer"):
        wait_for(endless.begin(Grammar(source='start: "a"'), [], 0.0))
