"""Volatile lines become constants; whatever is not exactly such a line stays as it came."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from gateway.text.volatile import normalise

BILLING = "x-anthropic-billing-header: cc_version=2.1.100.{build}; cc_entrypoint=cli; cch={hash};"


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("joint", ["\n", ""], ids=["line", "parts joined without a line end"])
def test_two_calls_with_another_billing_header_are_equal(joint: str) -> None:
    rest = f"{joint}You are Claude Code. cc_version=1.2.3.4; cch=abc;"
    calls = [
        normalise([system(BILLING.format(build=build, hash=digest) + rest), user("hey")])
        for build, digest in (("7b4", "eb6c6"), ("0d9", "fa690"))
    ]
    assert calls[0] == calls[1]
    assert calls[0].counts == {"billing_header": 1}
    assert calls[0].messages[0]["content"] == (
        "x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch=0;" + rest
    )


def test_the_newer_header_without_a_hash_loses_its_build() -> None:
    text = "x-anthropic-billing-header: cc_version=2.1.278.abc; cc_entrypoint=cli;\nYou are"
    assert normalise([system(text)]).messages[0]["content"] == text.replace(".abc", "")


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (
            "<total_tokens>14962655 tokens left</total_tokens>",
            "<total_tokens>14961419 tokens left</total_tokens>",
            "tokens_left",
        ),
        (
            "<system_warning>Token usage: 35000/200000; 165000 remaining</system_warning>",
            "<system_warning>Token usage: 36001/200000; 163999 remaining</system_warning>",
            "token_usage",
        ),
    ],
)
def test_running_counts_are_made_constant_where_they_stand(first: str, second: str, kind: str) -> None:
    calls = [
        normalise([system("Be brief."), user("a"), system(f"Mind:\n{line}\n"), user("b")])
        for line in (first, second)
    ]
    assert calls[0] == calls[1]
    assert calls[0].counts == {kind: 1}
    assert [message["role"] for message in calls[0].messages] == ["system", "user", "system", "user"]
    assert calls[0].messages[2]["content"].startswith("Mind:\n<")


@pytest.mark.parametrize(
    "messages",
    [
        [user(BILLING.format(build="a", hash="b"))],
        [system("Be brief."), system(BILLING.format(build="a", hash="b"))],
        [system("See " + BILLING.format(build="a", hash="b"))],
        [system("x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli;")],
        [system("x-anthropic-billing-header: none")],
        [user("<total_tokens>5 tokens left</total_tokens>")],
        [system("After each call you see <total_tokens>5 tokens left</total_tokens> or fewer.")],
        [system("`<system_warning>Token usage: 1/2; 1 remaining</system_warning>`")],
        [system("<total_tokens>five tokens left</total_tokens>")],
        [system("<total_tokens>5</total_tokens>")],
        [{"role": "assistant", "content": None}],
    ],
)
def test_all_else_stays_as_it_came(messages: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(messages)
    found = normalise(messages)
    assert found.messages == before == messages
    assert not found.counts


def test_a_hostile_text_takes_no_time() -> None:
    started = time.process_time()
    normalise([system("x-anthropic-billing-header:" + " cch=" * 200_000)])
    normalise([system("<total_tokens>" * 100_000), system("<system_warning>Token usage: 1/1; " * 50_000)])
    normalise([system("<total_tokens>5 tokens left</total_tokens>" + " \n" * 200_000 + "x")])
    assert time.process_time() - started < 2
