"""Whether llguidance can make a grammar: asked at the door, so that a bad schema is a 400 and no failed turn.

Knows no model: a vocabulary of single bytes stands for any. Call it in threads, it releases the GIL.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import re
import threading
from collections import OrderedDict
from dataclasses import replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from gateway.errors import InvalidField, shorten
from workers.messages import Grammar

from .grammars import grammar_for
from .lark import json_of
from .schemas import Checked
from .wants import CallForm, Thought, Wants

MAX_SOURCE_CHARS = 400_000
NUM_KEPT = 512
_END = 256
_REGEX_FAULT = re.compile(r"regex parse error:[\s\S]*?\nerror: (.+)")
_REASON = re.compile(r"failed to compile JSON schema: (.+)")


class _Bytes:
    """The vocabulary, as the library asks for one."""

    def __init__(self) -> None:
        self.eos_token_id = _END
        self.bos_token_id = None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
        self.special_token_ids = [_END]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def bytes_tokenizer() -> LLTokenizer:
    """A token is a byte; `_END` ends a text."""
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def problem_of(source: str) -> str:
    """What is wrong with a grammar, in one line; "": nothing."""
    if len(source) > MAX_SOURCE_CHARS:
        return f"its grammar has {len(source)} characters, and {MAX_SOURCE_CHARS} are allowed"
    matcher = LLMatcher(bytes_tokenizer(), source, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds what allows nothing
    if not matcher.is_error():
        return ""
    message = matcher.get_error()
    if "oneOf constraints" in message:
        return "the members of a oneOf are not told apart by their types or a const: use anyOf"
    if any(word in message.lower() for word in ("too many", "limit", "too large", "too complex")):
        return "it is too large"
    found = _REGEX_FAULT.search(message) or _REASON.search(message)
    return shorten(found[1], 200) if found else "it allows no answer at all"


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def matches(pattern: str, text: str) -> bool:
    """Whether a JSON schema's pattern is found in the text, in time that grows with its length only."""
    source = "start: " + json_of({"type": "string", "pattern": pattern})
    matcher = LLMatcher(bytes_tokenizer(), source, log_level=0, limits=_limits())
    spelt = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="replace")
    return matcher.try_consume_tokens(list(spelt)) == len(spelt) and matcher.is_accepting()


class GrammarChecks:
    """Makes grammars, lets those through that the library can build, and remembers them."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()  # what became of a source
        self._lock = threading.Lock()

    async def grammar(self, wants: Wants, form: CallForm, thought: Thought) -> Grammar | None:
        """As `grammar_for`, off the event loop. Raises InvalidField for the part that cannot be enforced."""
        return None if wants.is_free else await asyncio.to_thread(self.grammar_now, wants, form, thought)

    def grammar_now(self, wants: Wants, form: CallForm, thought: Thought) -> Grammar | None:
        """The same, here and now: milliseconds, or some hundred for a large schema."""
        grammar = grammar_for(wants, form, thought)
        if grammar is None:
            return None
        key = hashlib.blake2b(repr(grammar).encode(errors="replace"), digest_size=16).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        if problem := problem_of(grammar.source):
            grammar = _loosened(wants, form, thought, problem)
        with self._lock:
            self._known[key] = grammar
            while len(self._known) > NUM_KEPT:
                self._known.popitem(last=False)
        return grammar


def _loosened(wants: Wants, form: CallForm, thought: Thought, problem: str) -> Grammar:
    """Without the schemas that are at fault, where nobody insists on them. Raises InvalidField."""
    if wants.answer is not None:
        _check(wants.answer, wants.answer_path)
    tools = []
    for tool in wants.tools:
        try:
            _check(tool.schema, tool.path)
        except InvalidField:
            if tool.is_strict:
                raise
            tools.append(tool.loosened)
        else:
            tools.append(tool)
    grammar = grammar_for(replace(wants, tools=tuple(tools)), form, thought)
    if grammar is None or (problem := problem_of(grammar.source)):
        path = "tools" if wants.tools else wants.answer_path
        raise InvalidField(path, f"'{path}' cannot be enforced as a whole: {problem}. Make it smaller.")
    return grammar


def _check(checked: Checked, path: str) -> None:
    problem = problem_of("start: " + json_of(checked.schema))
    if not problem:
        return
    for where, pattern in checked.patterns.items():
        if own := problem_of("start: " + json_of({"type": "string", "pattern": pattern})):
            raise InvalidField(where, f"'{where}' cannot be enforced: {own}. Write the pattern another way.")
    raise InvalidField(path, f"'{path}' cannot be enforced: {problem}. Change the schema.")
