"""Control tokens and the marks that keep a caller's literals of them apart from the genuine ones.

Pure text work: knows no tokenizer, only what its added tokens are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.errors import InvalidField
from workers.messages import TokenizerBundle

# Noncharacters: valid in strings, never in exchanged text. The first pair that the input lacks is taken.
_MARK_POINTS = [chr(point) for point in range(0xFDD0, 0xFDF0)]
# A delimiter by its look, whatever its `special` flag says: some tokenizers forget the flag on turn markers.
_DELIMITER = re.compile(r"<[|｜].*[|｜]>|\[/?(INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]")


@dataclass(frozen=True, slots=True)
class Marks:
    """Two code points that wrap a caller's control literal; neither occurs in the caller's text."""

    opening: str
    closing: str

    @classmethod
    def absent_from(cls, texts: Iterable[str]) -> Marks:
        """A pair that none of the texts holds, neither raw nor as a JSON escape."""
        held = list(texts)
        absent = (p for p in _MARK_POINTS if not any(p in text or _json_escape(p) in text for text in held))
        points = list(itertools.islice(absent, 2))
        if len(points) < 2:
            raise InvalidField("messages", "The text uses all of U+FDD0 to U+FDEF, which are no characters.")
        return cls(points[0], points[1])

    def unescape(self, text: str) -> str:
        """Marks that a template's JSON filter wrote as escapes, back as code points."""
        for point in (self.opening, self.closing):
            text = text.replace(_json_escape(point), point)
        return text


def _json_escape(point: str) -> str:
    return f"\\u{ord(point):04x}"


class ControlTokens:
    """The added tokens that structure a prompt, and how to find their literals in a caller's text.

    `hard` ones end turns or start roles. `soft` ones (<think>, <tool_call>) are text that the model also
    writes: an assistant message keeps them, a user's or a tool's must not smuggle them in.
    """

    def __init__(self, added: Sequence[dict[str, Any]], bundle: TokenizerBundle) -> None:
        named = set(bundle.special_tokens.values())
        ends = set(bundle.eos_token_ids)
        hard: dict[str, int] = {}
        soft: dict[str, int] = {}
        for token in added:
            literal = token["content"]
            if not literal or literal.isspace():
                continue
            is_hard = (
                token["special"] or literal in named or token["id"] in ends or _DELIMITER.fullmatch(literal)
            )
            if is_hard:
                hard[literal] = token["id"]
            elif literal in bundle.chat_template:
                soft[literal] = token["id"]
        self.hard = hard
        self.soft = soft
        self.hard_pattern = _any_of(hard)
        self.any_pattern = _any_of([*hard, *soft])
        literals = [*hard, *soft]
        self._firsts = tuple({literal[0] for literal in literals})
        heads = (literal[:n] for literal in literals for n in range(1, len(literal)))
        self._heads = {head for head in heads if not head.isalnum()}
        self._tails = {literal[n:] for literal in literals for n in range(1, len(literal))}
        self._longest = max(map(len, literals), default=1)
        self._joined = "\0".join(literals)

    def occur_in(self, text: str) -> bool:
        """Whether `mark` could change the text."""
        if not text:
            return False
        if any(first in text for first in self._firsts) and self.any_pattern.search(text):
            return True
        return self._open_end(text) or self._open_start(text)

    def mark(self, text: str, marks: Marks, *, keep_soft: bool) -> str:
        """The text with each control literal wrapped, and with its ends guarded against joining into one."""
        pattern = self.hard_pattern if keep_soft else self.any_pattern
        guarded = pattern.sub(lambda found: f"{marks.opening}{found[0]}{marks.closing}", text)
        start = marks.closing if self._open_start(text) else ""
        end = marks.closing if self._open_end(text) else ""
        return f"{start}{guarded}{end}"

    def _open_end(self, text: str) -> bool:
        """Ends like the start of a literal, which what follows could complete: `<|im_`."""
        return any(text[-n:] in self._heads for n in range(1, min(len(text), self._longest) + 1))

    def _open_start(self, text: str) -> bool:
        """Starts like the rest of a literal: `|im_end|>`. Not plain words: templates compare those."""
        if text.replace("_", "").isalnum():
            return False
        if len(text) < self._longest and text in self._joined:
            return True
        return any(text[:n] in self._tails for n in range(1, min(len(text), self._longest) + 1))


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
