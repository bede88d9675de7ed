"""Names that clients send for models of others, and which model here answers to each. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

DEFAULT_MODEL = "default"
"""The only model there is."""

USUAL_ALIASES = ("claude-*=default", "gpt-*=default", "codex-*=default")
"""What Claude Code, Codex and SDK examples ask for without being told otherwise."""

MAX_NAME_CHARS = 256
"""No alias stands for a longer name: patterns with many stars take long on those."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Names that fit `pattern` (as files in a shell, in any case) mean `model`."""

    pattern: str
    model: str


@dataclass(frozen=True, slots=True)
class Aliases:
    """The first alias whose pattern fits counts. What an alias names is a model's id, never another alias."""

    aliases: tuple[Alias, ...] = ()

    def model(self, name: str) -> str | None:
        """The model that is meant by the name of one that is not here."""
        if len(name) > MAX_NAME_CHARS:
            return None
        lowered = name.lower()
        fitting = (alias.model for alias in self.aliases if fnmatchcase(lowered, alias.pattern))
        return next(fitting, None)


def parse_aliases(texts: Iterable[str]) -> Aliases:
    """Each text as PATTERN=MODEL. Raises ValueError naming the first that is not."""
    return Aliases(tuple(map(_parse, texts)))


def _parse(text: str) -> Alias:
    pattern, sign, model = (part.strip() for part in text.partition("="))
    if not (pattern and sign and model) or not text.isprintable() or len(pattern) > MAX_NAME_CHARS:
        raise ValueError(f"aliases: '{text[:60]}' must be PATTERN=MODEL, such as claude-*=default")
    if re.search(r"\[[^\]]*$", pattern):
        raise ValueError(f"aliases: '{text[:60]}' has a [ without its ]: write [[] for the character itself")
    return Alias(pattern.lower(), model)
