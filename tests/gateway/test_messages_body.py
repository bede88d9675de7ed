"""Messages bodies become chat requests: every block in its place, every refusal with its path."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.messages.signature import MAX_THOUGHT_BYTES, sign, thought_of
from gateway.errors import GatewayError, InvalidField
from gateway.http.api import ChatRequest
from gateway.http.messages.blocks import join
from gateway.http.messages.body import MessagesRequest, parse_messages, parse_prompt
from gateway.http.messages.history import plain_id
from gateway.http.messages.remedies import MESSAGES_REMEDIES

from .messages_api import HELLO, SCHEMA, TOOL, USER

RUN = "run-" + "0" * 31 + "1"


def parse(**more: Any) -> ChatRequest:
    return parse_messages(msgspec.json.encode({**HELLO, **more}))


def chat(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return parse(messages=[*messages], **more).raw_messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(call_id: str, content: Any = "done", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {"path": "/a", "deep": {"b": [1]}}}


# What is taken


def test_fields_reach_the_chat_request() -> None:
    asked = parse(
        max_tokens=7,
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["a", "b"],
        metadata={"user_id": "u_session_0f9d"},
        tetrarch={"agent": "a1"},
    )
    assert (asked.max_tokens, asked.stream, asked.stops) == (7, True, ("a", "b"))
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.5, 0.9, 3)
    assert asked.metadata == {"user_id": "u_session_0f9d"} and asked.endpoint == "messages"
    assert asked.tetrarch is not None and asked.tetrarch.agent == "a1"


def test_what_claude_code_sends_is_taken() -> None:
    asked = parse(
        system=[
            text("x-anthropic-billing-header: cc_version=2.1.332.bb5; cc_entrypoint=sdk-cli;"),
            text("You are"),
        ],
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "xhigh"},
        metadata={"user_id": '{"session_id":"af3b5d68-5596-4075-8afe-07bc089bdf20"}'},
        service_tier="auto",
        betas=["claude-code-20250219"],
        speed="fast",
    )
    assert asked.chat_template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert asked.echoed == {"omits_thoughts": True}


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, True),
    ],
)
def test_thinking_is_on_where_it_is_asked_for(thinking: Any, enabled: bool) -> None:
    asked = parse(thinking=thinking)
    assert asked.chat_template_kwargs == {"enable_thinking": enabled} and asked.echoed == {}


def test_null_is_absent() -> None:
    names = set(MessagesRequest.__struct_fields__) - {"messages", "max_tokens"}
    assert parse(**dict.fromkeys(names)) == parse_messages(
        msgspec.json.encode({name: HELLO[name] for name in ("messages", "max_tokens")})
    )
    assert chat(user(text("a", cache_control=None), result("t", None, is_error=None)))


def test_content_parts_are_joined_in_order_each_on_its_line() -> None:
    assert chat(user(text("a", **CACHED), text("b\n"), text(""), text("c"), text("\nd"))) == [
        {"role": "user", "content": "a\nb\nc\nd"}
    ]
    assert chat(USER, system=[text("a"), text("b", **CACHED)])[0] == {"role": "system", "content": "a\nb"}
    assert join(["", "a"]) == "a" and join([]) == ""


def test_an_assistants_blocks_are_one_message_again() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    said = assistant(thought, redacted, text("Let me "), text("look."), USE, {**USE, "id": "toolu_2"})
    function = {"name": "read_file", "arguments": USE["input"]}
    assert chat(USER, said, USER)[1] == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": plain_id(call_id), "type": "function", "function": function}
            for call_id in ("toolu_1", "toolu_2")
        ],
    }
    assert chat(USER, assistant(USE), USER)[1]["content"] is None
    assert chat(USER, assistant(redacted), USER) == [USER, USER]


def test_tool_results_are_messages_of_their_own_in_order() -> None:
    parts = [text("a"), text("b")]
    answer = user(result("toolu_1", parts), result("toolu_2"), text("And now?"), text("Well?"))
    told = chat(USER, assistant(USE, {**USE, "id": "toolu_2"}), answer)[2:]
    assert told == [
        {"role": "tool", "tool_call_id": plain_id("toolu_1"), "content": "a\nb", "name": "read_file"},
        {"role": "tool", "tool_call_id": plain_id("toolu_2"), "content": "done", "name": "read_file"},
        {"role": "user", "content": "And now?\nWell?"},
    ]
    assert all(len(message["tool_call_id"]) == 9 for message in told[:2])


def test_a_failed_tool_says_so_once() -> None:
    failed = user(result("t", "No such file.", is_error=True), result("t", "error: gone", is_error=True))
    assert [message["content"] for message in chat(failed)] == ["Error: No such file.", "error: gone"]


def test_system_text_in_the_middle_stays_where_it_is() -> None:
    late = {"role": "system", "content": [text("It is Monday.", **CACHED)]}
    asked = chat(USER, late, assistant(text("Yes?")), USER, system="Be brief.")
    assert [message["role"] for message in asked] == ["system", "user", "system", "assistant", "user"]
    assert asked[2]["content"] == "It is Monday."


def test_system_text_that_shall_go_is_there_until_the_user_speaks() -> None:
    fleeting = {"role": "system", "content": "5 left.", "clear_at": "next_user_message"}
    assert len(chat(USER, fleeting)) == 2
    assert chat(USER, fleeting, assistant(text("Yes?")), USER) == chat(USER, assistant(text("Yes?")), USER)


def test_plain_documents_and_search_results_are_their_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    nested = {"type": "content", "content": [text("upon"), text("a time")]}
    blocks = [
        {"type": "document", "source": source, "title": "Tale", "context": None},
        {"type": "document", "source": nested},
        {"type": "search_result", "source": "tales.org", "title": "More", "content": [text("end")]},
    ]
    expected = "Tale\nOnce.\nupon\na time\nMore\ntales.org\nend"
    assert chat(user(*blocks))[0]["content"] == expected
    assert chat(user(result("t", blocks)))[0]["content"] == expected


# Tools


def test_tools_become_functions() -> None:
    asked = parse(tools=[{**TOOL, **CACHED, "type": "custom", "strict": True, "input_examples": []}])
    assert asked.raw_tools == [
        {
            "type": "function",
            "function": {
                "name": "read_file",
                "description": "Reads a file.",
                "parameters": SCHEMA,
                "strict": True,
            },
        }
    ]
    assert asked.tool_choice == "auto" and asked.parallel_tool_calls


def test_tools_of_anthropics_servers_are_left_out() -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    assert parse(tools=[hosted, TOOL]).raw_tools == parse(tools=[TOOL]).raw_tools
    assert parse(tools=[hosted]).raw_tools is None


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250124", "str_replace_editor", {"command", "path", "file_text", "view_range"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "insert_text"}),
        ("memory_20250818", "memory", {"command", "path", "old_path", "new_path"}),
    ],
)
def test_typed_tools_that_the_client_runs_are_offered_as_functions(
    kind: str, name: str, fields: set[str]
) -> None:
    typed = {"type": kind, "name": name}
    asked = parse(tools=[typed, TOOL], tool_choice={"type": "tool", "name": name})
    assert asked.raw_tools is not None
    function = asked.raw_tools[0]["function"]
    assert function["name"] == name and function["description"]
    assert fields <= function["parameters"]["properties"].keys()
    commands = function["parameters"]["properties"]["command"].get("enum", [])
    assert ("undo_edit" in commands) == (kind == "text_editor_20250124")
    deferred = parse(tools=[{**typed, "defer_loading": True}, TOOL])
    assert deferred.raw_tools == parse(tools=[TOOL]).raw_tools
    assert [tool["function"]["name"] for tool in deferred.later_tools] == [name]


@pytest.mark.parametrize("kind", ["web_search_20250305", "computer_20250124", "bash_20250124x", "bash"])
def test_a_demanded_tool_that_nobody_here_runs_is_named(kind: str) -> None:
    with pytest.raises(InvalidField) as refused:
        parse(
            tools=[{"type": kind, "name": "the_tool"}, TOOL], tool_choice={"type": "tool", "name": "the_tool"}
        )
    assert refused.value.param == "tool_choice.name" and "the_tool" in refused.value.message


def test_a_deferred_tool_is_told_where_a_message_refers_to_it() -> None:
    later = {**TOOL, "name": "fetch", "defer_loading": True}
    reference = user(result("t", [{"type": "tool_reference", "tool_name": "fetch"}]))
    asked = parse(tools=[TOOL, later], messages=[USER, assistant(USE), reference])
    assert asked.raw_tools == parse(tools=[TOOL]).raw_tools
    assert [tool["function"]["name"] for tool in asked.callable_tools] == ["read_file", "fetch"]
    definition = asked.raw_messages[-1]["content"]
    assert definition.startswith('<functions>\n<function>{"name": "fetch", ')
    assert definition.endswith("}</function>\n</functions>")
    before = parse(tools=[TOOL], messages=[USER, assistant(USE), user(result("t", ""))])
    assert asked.raw_messages[:2] == before.raw_messages[:2]


def test_tools_that_come_and_go_in_the_conversation_are_told_there() -> None:
    definition = {**TOOL, "name": "fetch"}
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
    again = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}}
    gone = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "read_file"}}
    asked = parse(tools=[TOOL], messages=[USER, {"role": "system", "content": [added, again, gone]}])
    told = asked.raw_messages[1]["content"]
    assert told.count('<function>{"name": "fetch"') == 2 and "read_file is no longer there" in told
    assert [tool["function"]["name"] for tool in asked.callable_tools] == ["read_file", "fetch"]


def test_no_choice_means_no_calls() -> None:
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).tools_in_use is None
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).callable_tools == []
    one = parse(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert not one.parallel_tool_calls


# Signatures


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("thought", ["", "Hm.", "漢字 🙂", "x" * 100_000])
def test_a_thought_comes_back_as_it_was(thought: str, carries: bool) -> None:
    signature = sign(RUN, thought, carries_text=carries)
    assert signature == sign(RUN, thought, carries_text=carries) != sign(RUN, thought + "x")
    back = thought_of("" if carries else thought, signature)
    assert back.text == thought and not back.is_changed
    assert thought_of("Other.", signature) == thought_of("Other.", sign(RUN, thought))
    assert thought_of("Other.", signature).is_changed


@pytest.mark.parametrize("signature", ["", "c2ln", "not base64!", "AQ==", "EqQBCkYIBxgCKkA" * 9, "é"])
def test_signatures_of_others_say_nothing(signature: str) -> None:
    assert thought_of("Hm.", signature).text == "Hm."


def test_a_signature_does_not_unpack_to_more_than_a_thought() -> None:
    signature = sign(RUN, "x" * (MAX_THOUGHT_BYTES + 9), carries_text=True)
    back = thought_of("", signature)
    assert back.is_changed and len(back.text) <= MAX_THOUGHT_BYTES


def test_an_omitted_thought_is_part_of_the_history_again() -> None:
    block = {"type": "thinking", "thinking": "", "signature": sign(RUN, "Hm.", carries_text=True)}
    assert chat(USER, assistant(block, text("Yes.")), USER)[1]["reasoning_content"] == "Hm."


# What is refused

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [assistant(text("{"))]}, "messages[0].role"),
        ({"messages": [user(text("a"), IMAGE)]}, "messages[0].content[1].type"),
        ({"messages": [USER, user(result("t", [IMAGE]))]}, "messages[1].content[0].content[0].type"),
        (
            {"messages": [user({"type": "document", "source": {"type": "base64"}})]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({})]}, "messages[0].content[0].type"),
        ({"messages": [user(result("t", 7))]}, "messages[0].content[0].content"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [USER, assistant({"type": "server_tool_use"}), USER]}, "messages[1].content[0].type"),
        ({"messages": [USER, assistant({**USE, "input": "{}"}), USER]}, "messages[1].content[0].input"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "defer_loading": "yes"}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"mcp_servers": [{"type": "url", "url": "x"}]}, "mcp_servers"),
        ({"container": "c1"}, "container"),
        ({"thread": {"id": "t"}}, "thread"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_is_refused_is_named(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as found:
        parse(**more)
    assert found.value.param is not None and found.value.param.startswith(param)
    assert f"'{found.value.param}'" in found.value.message and len(found.value.message) < 400


def test_counting_needs_no_limit() -> None:
    assert parse_prompt(msgspec.json.encode({"messages": [USER]})).max_tokens is None


def test_every_field_has_a_remedy() -> None:
    assert set(MessagesRequest.__struct_fields__) <= MESSAGES_REMEDIES.keys()


# Whatever comes

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "text",
                    "content",
                    "source",
                    "name",
                    "tool",
                    "input",
                    "id",
                    "thinking",
                    "signature",
                    "role",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(
    ["text", "image", "document", "tool_use", "tool_result", "thinking", "tool_addition", "tool_removal", "x"]
)
BLOCKS = st.dictionaries(
    st.sampled_from(["text", "content", "source", "name", "tool", "input", "id", "tool_use_id", "thinking"]),
    JSON_VALUES,
    max_size=5,
).flatmap(lambda block: KINDS.map(lambda kind: {**block, "type": kind}))
ROLES = st.sampled_from(["user", "assistant", "system"])


@settings(max_examples=120, deadline=None)
@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=4) | st.lists(BLOCKS, max_size=3)}),
        max_size=4,
    ),
    field=st.sampled_from(sorted(MessagesRequest.__struct_fields__)),
    value=JSON_VALUES,
)
def test_any_body_is_taken_or_refused_in_words(messages: Any, field: str, value: Any) -> None:
    for body in ({**HELLO, "messages": [*messages, USER]}, {**HELLO, field: value}):
        try:
            parse_messages(msgspec.json.encode(body))
        except GatewayError as error:
            assert error.status == 400 and error.message
