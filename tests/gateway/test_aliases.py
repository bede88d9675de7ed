"""Names of models that are not here: patterns, the first that fits, and what is no pattern."""

from __future__ import annotations

import time

import pytest

from gateway.aliases import USUAL_ALIASES, parse_aliases
from gateway.settings import SECTION, GatewaySettings
from metrics.settings import SettingsError, load


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("claude-sonnet-4-5", "default"),
        ("Claude-Opus", "default"),
        ("gpt-5-codex", "default"),
        ("llama", None),
        ("my-claude-x", None),
        ("claude-" + "x" * 300, None),
        ("", None),
        ("claude-\n", "default"),
    ],
)
def test_the_usual_names_mean_the_only_model(name: str, model: str | None) -> None:
    assert parse_aliases(USUAL_ALIASES).model(name) == model


def test_the_first_pattern_that_fits_counts() -> None:
    aliases = parse_aliases(["gpt-5*=large", "gpt-?o=small", "gpt-[34]*=old=model", "*=default"])
    names = ("gpt-5.1", "gpt-4o", "gpt-4-turbo", "gpt-2")
    assert [aliases.model(name) for name in names] == ["large", "small", "old=model", "default"]


@pytest.mark.parametrize("text", ["claude", "=x", "claude-*=", " = ", "a\nb=c", "x" * 300 + "=y", "a[b=c"])
def test_what_is_no_alias_is_a_settings_error_that_shows_it(text: str) -> None:
    with pytest.raises(ValueError, match="aliases: '"):
        parse_aliases(["ok=default", text])
    with pytest.raises(SettingsError, match="aliases"):
        flags = {"aliases": text.replace(",", "")}
        load(GatewaySettings, SECTION, file=None, environ={}, flags=flags)


def test_a_pattern_of_many_stars_costs_little() -> None:
    aliases = parse_aliases(["*a" * 60 + "*b=default"])
    started = time.perf_counter()
    assert aliases.model("a" * 256) is None
    assert time.perf_counter() - started < 0.5
