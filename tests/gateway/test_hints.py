"""Names and hints: who wins, what is refused, and what a hostile value may do (nothing)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers.hints import MAX_NAME_CHARS, Caller, Hints, Names, read_hints
from gateway.errors import InvalidField
from gateway.flow.classes import NORMAL
from gateway.http.api import parse_chat

UUID = "0b2f9a4e-8d11-4c6e-9a51-2f4f6f0f3c11"


def hints(headers: dict[str, str] | None = None, **fields: Any) -> Hints:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return read_hints(headers or {}, parse_chat(json.dumps(body).encode()))


def test_a_call_without_hints_has_none() -> None:
    assert hints() == Hints()
    assert hints(tetrarch={}) == Hints()


def test_our_headers_say_all_that_the_body_can_say() -> None:
    headers = {
        "X-Tetrarch-Session": "s",
        "X-Tetrarch-Agent": "a",
        "X-Tetrarch-Parent": "p",
        "X-Tetrarch-Fork": "640",
        "X-Tetrarch-Expects": "read_file",
        "X-Tetrarch-Final": "true",
        "X-Tetrarch-Retain": "pin",
        "X-Tetrarch-Class": "Bulk",
        "X-Tetrarch-Priority": "-7",
        "X-Tetrarch-Expected-Output": "90",
    }
    fields = {"session": "s", "agent": "a", "parent": "p", "fork_tokens": 640}
    fields |= {"expects": "read_file", "final": True, "retain": "pin"}
    fields |= {"class": "bulk", "priority": -7, "expected_output_tokens": 90}
    expected = Hints(
        Names("s", "a", "p"),
        640,
        "read_file",
        is_final=True,
        retain="pin",
        flow_class="bulk",
        priority=-7,
        expected_output_tokens=90,
    )
    assert hints(headers) == hints(tetrarch=fields) == expected
    assert hints(tetrarch={"explain": True}).explain


def test_headers_win_over_the_body_and_both_over_other_clients_ways() -> None:
    told = {"session": "body", "agent": "body", "retain": "pin", "fork_tokens": 1, "final": True}
    headers = {
        "X-Tetrarch-Session": "header",
        "X-Tetrarch-Retain": "ephemeral",
        "X-Tetrarch-Fork": "2",
        "X-Tetrarch-Final": "false",
        "X-Claude-Code-Session-Id": "client",
        "x-claude-code-agent-id": "client",
        "x-claude-code-parent-agent-id": "client-parent",
    }
    found = hints(headers, tetrarch=told)
    assert found.names == Names("header", "body", "")
    assert (found.retain, found.fork_tokens, found.is_final) == ("ephemeral", 2, False)


CLIENTS: dict[str, tuple[dict[str, str], dict[str, Any], Names]] = {
    "claude code": (
        {
            "X-Claude-Code-Session-Id": "s",
            "x-claude-code-agent-id": "a",
            "x-claude-code-parent-agent-id": "p",
        },
        {"metadata": {"user_id": f"user_1_account_2_session_{UUID}"}},
        Names("s", "a", "p"),
    ),
    "claude code without headers": ({}, {"metadata": {"user_id": f"user_1_session_{UUID}"}}, Names(UUID)),
    "claude code without headers, as its real length is": (
        {},
        {"metadata": {"user_id": f"user_{'5e' * 32}_account_{UUID}_session_{UUID}"}},
        Names(UUID),
    ),
    "codex": (
        {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "p"},
        {"prompt_cache_key": "t"},
        Names("s", "t", "p"),
    ),
    "codex by metadata": (
        {"x-codex-turn-metadata": '{"session_id":"s","thread_id":"t","agent_name":"/root"}'},
        {},
        Names("s", "t"),
    ),
    "codex by agent name": (
        {"x-codex-turn-metadata": '{"session_id":"s","agent_name":"/root"}'},
        {},
        Names("s", "/root"),
    ),
    "opencode": (
        {"x-session-id": "ses_2", "x-session-affinity": "ses_2", "x-parent-session-id": "ses_1"},
        {},
        Names("", "ses_2", "ses_1"),
    ),
    "opencode with its id as cache key": (
        {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"},
        {"prompt_cache_key": "ses_2"},
        Names("", "ses_2", "ses_1"),
    ),
    "opencode by affinity": ({"x-session-affinity": "ses_1"}, {}, Names("", "ses_1")),
    "an agent alone": ({"X-Agent": "a"}, {"user": "u"}, Names("u", "a")),
    "a cache key": ({}, {"prompt_cache_key": "k", "user": "u"}, Names("k")),
    "a user": ({}, {"user": "u"}, Names("u")),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_real_clients_names_are_understood(client: str) -> None:
    headers, fields, names = CLIENTS[client]
    assert hints(headers, **fields).names == names


def test_dynamos_end_of_a_session_is_final() -> None:
    assert hints({"x-dynamo-session-final": "true"}).is_final
    assert not hints({"x-dynamo-session-final": "maybe"}).is_final


@pytest.mark.parametrize(
    ("headers", "fields", "named"),
    [
        ({"X-Tetrarch-Fork": "-1"}, {}, "X-Tetrarch-Fork"),
        ({"X-Tetrarch-Fork": "many"}, {}, "X-Tetrarch-Fork"),
        ({"X-Tetrarch-Final": "perhaps"}, {}, "X-Tetrarch-Final"),
        ({"X-Tetrarch-Retain": "forever"}, {}, "X-Tetrarch-Retain"),
        ({"X-Tetrarch-Session": "a\tb"}, {}, "X-Tetrarch-Session"),
        ({"X-Tetrarch-Class": "urgent"}, {}, "X-Tetrarch-Class"),
        ({"X-Tetrarch-Priority": "high"}, {}, "X-Tetrarch-Priority"),
        ({"X-Tetrarch-Priority": "1001"}, {}, "X-Tetrarch-Priority"),
        ({"X-Tetrarch-Expected-Output": "0"}, {}, "X-Tetrarch-Expected-Output"),
        ({}, {"tetrarch": {"class": "urgent"}}, "tetrarch.class"),
        ({}, {"tetrarch": {"priority": -1001}}, "tetrarch.priority"),
        ({}, {"tetrarch": {"expected_output_tokens": 0}}, "tetrarch.expected_output_tokens"),
        ({}, {"tetrarch": {"agent": "a\nb"}}, "tetrarch.agent"),
        ({}, {"tetrarch": {"session": 7}}, "tetrarch.session"),
        ({}, {"tetrarch": {"fork_tokens": -1}}, "tetrarch.fork_tokens"),
        ({}, {"tetrarch": {"retain": "forever"}}, "tetrarch.retain"),
        ({}, {"tetrarch": []}, "tetrarch"),
        ({}, {"metadata": "x"}, "metadata"),
        ({}, {"prompt_cache_key": 1}, "prompt_cache_key"),
    ],
)
def test_an_unusable_hint_is_refused_by_name(
    headers: dict[str, str], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        hints(headers, **fields)
    assert caught.value.param == named
    assert "must be" in caught.value.message


def test_what_other_clients_send_is_cleaned_and_never_refused() -> None:
    headers = {
        "session-id": "\x00 s\x1b[31m \n",
        "x-codex-turn-metadata": "{" * 100,
        "x-claude-code-agent-id": "\t\r\n",
    }
    assert hints(headers).names == Names("s[31m")
    assert hints({"x-codex-turn-metadata": "[" * 20_000}).names == Names()
    assert hints(metadata={"user_id": {"a": 1}}).names == Names()


def test_a_class_comes_from_the_header_the_body_another_router_or_the_token_in_that_order() -> None:
    foreign = {"X-SMG-Priority": "interactive"}
    ours = {**foreign, "X-Tetrarch-Class": "system"}
    assert hints(ours, tetrarch={"class": "bulk"}).flow_class == "system"
    assert hints(foreign, tetrarch={"class": "bulk"}).flow_class == "bulk"
    assert hints(foreign).flow_class == "interactive"
    assert hints({"X-SMG-Priority": "7"}).flow_class is None
    assert Caller("t", hints(foreign), flow_class="bulk").flow.flow_class == "interactive"
    assert Caller("t", hints(), flow_class="bulk").flow.flow_class == "bulk"
    assert Caller().flow == NORMAL


def test_long_names_are_capped_and_stay_two() -> None:
    one, other = (hints({"X-Tetrarch-Agent": "x" * 5000 + end}).names.agent for end in "ab")
    assert len(one) == len(other) == MAX_NAME_CHARS
    assert one != other
    assert hints(tetrarch={"agent": "x" * 5000 + "a"}).names.agent == one


def test_a_header_that_is_no_utf8_is_refused_in_words_that_can_be_sent() -> None:
    with pytest.raises(InvalidField) as caught:
        hints({"X-Tetrarch-Agent": "a\udcff"})
    assert caught.value.message.encode()


@given(
    st.dictionaries(st.sampled_from(["session-id", "thread-id", "x-agent", "X-Tetrarch-Agent"]), st.text())
)
def test_any_header_is_data_or_a_named_refusal(headers: dict[str, str]) -> None:
    try:
        names = hints(headers).names
    except InvalidField:
        return
    for name in (names.session, names.agent, names.parent):
        assert name.isprintable() and len(name) <= MAX_NAME_CHARS


def test_scopes_part_tenants_sessions_and_agents() -> None:
    callers = [
        Caller(tenant, Hints(Names(session, agent)))
        for tenant in ("", "t")
        for session in ("", "s")
        for agent in ("", "a")
    ]
    assert len({caller.scope for caller in callers}) == len(callers)
