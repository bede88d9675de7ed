"""A caller's wants as one grammar of the whole answer, for a model that thinks and calls in ways. Pure."""

from __future__ import annotations

from workers.messages import Grammar

from .calls import Calls
from .lark import ANY_TEXT, Rules, json_of, literal
from .wants import CallForm, Thought, Wants

_BLANKS = "/[ \\n\\r\\t]{1,8}/"
"""What models put between their thoughts and their words."""


def grammar_for(wants: Wants, form: CallForm, thought: Thought) -> Grammar | None:
    """None: the answer is free. Raises InvalidField for a tool that this way of calling cannot hold."""
    if wants.is_free:
        return None
    rules = Rules()
    body = rules.rule(_body(rules, wants, form))
    match thought.state:
        case "open":
            return Grammar(source=rules.source(f"{_BLANKS}? {body}"), after=thought.closing)
        case "possible":
            inner = rules.rule(ANY_TEXT, suffix=thought.closing)
            first = rules.rule(f"{_BLANKS}? {literal(thought.opening)} {inner} {_BLANKS}?")
            return Grammar(source=rules.source(f"{first}? {body}"))
        case _:
            return Grammar(source=rules.source(body))


def _body(rules: Rules, wants: Wants, form: CallForm) -> str:
    answer = None if wants.answer is None else json_of(wants.answer.schema)
    if not wants.tools:
        assert answer is not None  # it would be free
        return answer
    calls = Calls(rules, form, wants.tools, is_parallel=wants.is_parallel)
    if wants.must_call:
        return calls.only()
    if answer is not None:
        return f"{answer} | {calls.only()}"
    return calls.among_text()
