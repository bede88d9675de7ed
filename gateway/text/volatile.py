"""Lines of known clients that change with every call: made constant before tokenising, so that prefixes last.

Pure; rules are data. Only exact known forms are touched, where they stand: nothing is moved or dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Message = dict[str, Any]


class Where(Enum):
    """Which text a rule reads."""

    HEAD = "head"  # the first line of a prompt that begins with a system message
    SYSTEM = "system"  # whole lines of system and developer messages anywhere


@dataclass(frozen=True, slots=True)
class Rule:
    """`parts`: each pattern becomes its constant inside what `form` matches. `kind` is what logs say."""

    kind: str
    where: Where
    form: re.Pattern[str]
    parts: tuple[tuple[re.Pattern[str], str], ...]


RULES = (
    # Claude Code: "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;".
    # The fourth segment and the hash are drawn from the request's content.
    Rule(
        "billing_header",
        Where.HEAD,
        re.compile(
            r"x-anthropic-billing-header:[^\n]*?cch=\w{1,64};|x-anthropic-billing-header:[^\n]{0,200}"
        ),
        (
            (re.compile(r"(?<=cc_version=)(\d+\.\d+\.\d+)\.\w{1,16}(?=;)"), r"\1"),
            (re.compile(r"(?<=cch=)\w{1,64}(?=;)"), "0"),
        ),
    ),
    # Claude Code: "<total_tokens>14962655 tokens left</total_tokens>" as a system message after tool results.
    Rule(
        "tokens_left",
        Where.SYSTEM,
        re.compile(r"^[ \t]*<total_tokens>\s*[\d,]{1,20} tokens left\s*</total_tokens>\s*?$", re.MULTILINE),
        ((re.compile(r"[\d,]+"), "many"),),
    ),
    # Context awareness: "<system_warning>Token usage: 35000/200000; 165000 remaining</system_warning>".
    Rule(
        "token_usage",
        Where.SYSTEM,
        re.compile(
            r"^[ \t]*<system_warning>\s*Token usage: \d+/\d+; \d+ remaining\s*</system_warning>\s*?$",
            re.MULTILINE,
        ),
        ((re.compile(r"\d+/\d+; \d+"), "some/all; enough"),),
    ),
)


@dataclass(frozen=True, slots=True)
class Normalised:
    """The messages, and how many lines of each kind were made constant in them."""

    messages: list[Message]
    counts: Mapping[str, int]


def normalise(messages: Sequence[Message]) -> Normalised:
    """Messages whose contents are strings (or absent), with the known volatile lines made constant."""
    counts: Counter[str] = Counter()
    changed = list(messages)
    for index, message in enumerate(messages):
        content = message.get("content")
        if message["role"] not in ("system", "developer") or not isinstance(content, str):
            continue
        for rule in RULES:
            if rule.where is Where.SYSTEM or index == 0:
                content = _apply(rule, content, counts)
        if content != message["content"]:
            changed[index] = {**message, "content": content}
    return Normalised(changed, counts)


def _apply(rule: Rule, text: str, counts: Counter[str]) -> str:
    if rule.where is Where.HEAD:
        found = rule.form.match(text)
        if found is None:
            return text
        fixed = _fixed(rule, found[0]) + text[found.end() :]
        if fixed != text:
            counts[rule.kind] += 1
        return fixed
    fixed, count = rule.form.subn(lambda found: _fixed(rule, found[0]), text)
    if count:
        counts[rule.kind] += count
    return fixed


def _fixed(rule: Rule, line: str) -> str:
    for pattern, constant in rule.parts:
        line = pattern.sub(constant, line)
    return line
