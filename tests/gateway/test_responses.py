"""The Responses API's answers: events, items and response objects, and what they say of each other."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from gateway.dialects.responses.ids import open_reasoning, seal_reasoning
from workers.messages import (
    ChosenLogprob,
    Derail,
    Derailed,
    Finished,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)

from .http_gateway import Gateway
from .responses_api import ARGUMENTS, ASKED, CALL, SseEvent, ask, assembled, stream
from .samples import QWEN
from .test_tool_calls import THINKING, serve

SPAWN = {**ASKED["tools"][0], "name": "spawn_agent"}
NAMESPACE = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for sub-agents.",
    "tools": [SPAWN, {**SPAWN, "name": "wait_agent"}],
}
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
THOUGHT = "<think>\nHm, ü.\n</think>\n\n"


@pytest.fixture(autouse=True)
def qwen(gateway: Gateway) -> None:
    serve(gateway, QWEN)


def kinds(events: list[SseEvent]) -> list[str]:
    return [event.name.removeprefix("response.") for event in events]


async def test_a_response_has_openais_shape(gateway: Gateway) -> None:
    body = await ask(gateway, "Hel", "lo", store=False, metadata={"k": "v"}, temperature=0.5)
    run_id = [*gateway.runs.runs][-1]
    num_prompt = len(gateway.runs.last.order.token_ids) // 4
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert body["id"] == f"resp_{run_id.removeprefix('run-')}"
    [item] = body.pop("output")
    assert item.pop("id").startswith("msg_")
    assert item == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert body.pop("usage") == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_prompt // 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 2,
    }
    assert isinstance(body.pop("created_at"), int) and body.pop("id") and body.pop("tools") == ASKED["tools"]
    assert body == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "store": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"k": "v"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


async def test_the_events_of_a_stream_are_all_there_and_in_order(gateway: Gateway) -> None:
    events = await stream(gateway, "<think>\nHm", ".\n</think>\n\nLet me", " look.\n", CALL)
    message, call = ["output_text.delta", "output_text.delta"], ["function_call_arguments.delta"]
    assert kinds(events) == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", *message),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", *call, "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


async def test_no_sequence_number_is_missing(gateway: Gateway) -> None:
    events = await stream(gateway, THOUGHT, "Look.\n", CALL)
    assert [event.data["sequence_number"] for event in events] == [*range(len(events))]


async def test_no_part_comes_before_its_item_was_added(gateway: Gateway) -> None:
    """Codex drops what it has no item for."""
    added: set[str] = set()
    for event in await stream(gateway, THOUGHT, "Look.\n", CALL, CALL):
        if event.name == "response.output_item.added":
            added.add(event.data["item"]["id"])
        elif "item_id" in event.data:
            assert event.data["item_id"] in added


async def test_ids_and_items_of_the_end_are_those_of_the_stream_to_the_byte(gateway: Gateway) -> None:
    events = await stream(gateway, THOUGHT, "Look.\n", CALL, CALL, include=["reasoning.encrypted_content"])
    final = events[-1]
    done = [event.raw for event in events if event.name == "response.output_item.done"]
    assert len(done) == 4
    for event in (event for event in events if event.name == "response.output_item.done"):
        item = json.dumps(event.data["item"], separators=(",", ":"), ensure_ascii=False)
        assert item in event.raw and item in final.raw
    assert assembled(events) == final.data["response"]["output"]
    assert final.data["response"]["id"] == events[0].data["response"]["id"]


@pytest.mark.parametrize("text", ["Hello", THOUGHT + "Yes.", f"Look.\n{CALL}\n{CALL}", THOUGHT + CALL, CALL])
@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_a_stream_adds_up_to_the_whole_body(gateway: Gateway, text: str, reason: str) -> None:
    whole = await ask(gateway, *text, reason=reason)
    streamed = (await stream(gateway, *text, reason=reason))[-1].data["response"]
    assert [without_ids(item) for item in whole["output"]] == [
        without_ids(item) for item in streamed["output"]
    ]
    assert (whole["status"], whole["usage"]) == (streamed["status"], streamed["usage"])


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


async def test_calls_have_stable_ids_of_their_own(gateway: Gateway) -> None:
    events = await stream(gateway, f"{CALL}\n{CALL}")
    done = [event.data["item"] for event in events if event.name == "response.output_item.done"]
    assert [item["arguments"] for item in done] == [ARGUMENTS, ARGUMENTS]
    assert len({item["call_id"] for item in done}) == len({item["id"] for item in done}) == 2
    added = [event.data["item"] for event in events if event.name == "response.output_item.added"]
    assert [item["call_id"] for item in added] == [item["call_id"] for item in done]


async def test_a_call_cut_by_the_limit_is_incomplete_and_not_told_as_done(gateway: Gateway) -> None:
    for length in range(len("<tool_call>\n{"), CALL.index(ARGUMENTS) + len(ARGUMENTS), 7):
        events = await stream(gateway, "Look.\n", CALL[:length], reason="length")
        final = events[-1].data["response"]
        assert events[-1].name == "response.incomplete" and final["status"] == "incomplete"
        assert final["incomplete_details"] == {"reason": "max_output_tokens"}
        assert {item["type"] for item in final["output"]} == {"message"}
        assert "function_call_arguments.done" not in kinds(events)
        assert assembled(events) == final["output"]


async def test_text_cut_by_the_limit_is_an_incomplete_message(gateway: Gateway) -> None:
    body = await ask(gateway, "Hel", reason="length", max_output_tokens=1)
    assert body["status"] == "incomplete" and body["output"][-1]["status"] == "incomplete"
    assert gateway.runs.last.order.max_tokens == 1 and body["max_output_tokens"] == 1


async def test_an_answer_without_a_word_is_complete(gateway: Gateway) -> None:
    body = await ask(gateway, "")
    assert (body["status"], body["output"]) == ("completed", [])


async def test_a_derailed_answer_says_so(gateway: Gateway) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    gateway.runs.script = lambda order: [
        Tokens(token_ids=b"\1\0\0\0", text="x x x"),
        Derailed(what=Derail(derail="token_cycle", first_token=1, excerpt="x")),
        Finished(reason="derailed", usage=usage, timings=Timings()),
    ]
    final = (await stream(gateway))[-1].data["response"]
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "derailed"})
    assert final["tetrarch"]["derail"]["kind"] == "token_cycle"


# Tools


async def test_calls_of_a_namespaces_tool_come_back_with_their_namespace(gateway: Gateway) -> None:
    """Codex finds tools by namespace and name: a flat name is an unsupported call to it."""
    call = CALL.replace("read_file", "multi_agent_v1.spawn_agent")
    body = await ask(gateway, call, tools=[NAMESPACE, {"type": "web_search"}])
    [item] = body["output"]
    assert (item["type"], item["namespace"], item["name"]) == (
        "function_call",
        "multi_agent_v1",
        "spawn_agent",
    )
    assert body["tools"] == [NAMESPACE, {"type": "web_search"}]
    events = await stream(gateway, call, tools=[NAMESPACE])
    items = [event.data["item"] for event in events if "item" in event.data]
    assert {(item["namespace"], item["name"]) for item in items} == {("multi_agent_v1", "spawn_agent")}


async def test_custom_tools_are_called_with_text(gateway: Gateway) -> None:
    patch = '*** Begin Patch\n"ü"\n'
    call = (
        f'<tool_call>\n{{"name": "apply_patch", "arguments": {json.dumps({"input": patch})}}}\n</tool_call>'
    )
    events = await stream(gateway, *call, tools=[CUSTOM])
    [item] = events[-1].data["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert assembled(events) == [item] and item["id"].startswith("ctc_")
    assert kinds(events)[-4:] == [
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.parametrize("arguments", ['{"other": 1}', '{"input": 7}', "{}"])
async def test_a_custom_call_of_another_shape_is_its_text(gateway: Gateway, arguments: str) -> None:
    call = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    body = await ask(gateway, call, tools=[CUSTOM])
    assert body["output"][0]["input"] == arguments


# Reasoning


async def test_reasoning_is_told_as_text_and_counted(gateway: Gateway) -> None:
    body = await ask(gateway, "<think>", "\nHm.", "\n</think>\n\n", "Yes.", "No.")
    reasoning, message = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (reasoning["summary"], "encrypted_content" in reasoning) == ([], False)
    assert message["content"][0]["text"] == "Yes.No."
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    serve(gateway, THINKING)
    body = await ask(gateway, "H", "m.", "\n</think>\n\n", "Yes.")
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


async def test_reasoning_is_told_as_the_summary_that_was_asked_for(gateway: Gateway) -> None:
    asked: dict[str, Any] = {
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }
    events = await stream(gateway, *(THOUGHT + "Yes."), **asked)
    [reasoning, _] = events[-1].data["response"]["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm, ü."}]
    assert open_reasoning(reasoning["encrypted_content"]) == "Hm, ü." and "content" not in reasoning
    assert assembled(events) == events[-1].data["response"]["output"]
    assert "reasoning_summary_part.added" in kinds(events) and "reasoning_text.delta" not in kinds(events)
    assert events[0].data["response"]["reasoning"] == asked["reasoning"]


@pytest.mark.parametrize("text", ["", "Hm, ü 漢字 🙂", "a" * 1_000_000])
def test_sealed_reasoning_opens_to_what_it_was(text: str) -> None:
    assert open_reasoning(seal_reasoning(text)) == text


@pytest.mark.parametrize("sealed", ["", "gAAAAAB", "ttr1.", "ttr1.AAAA", "ttr1.ü", "ttr1.====", "ttr1.eJw="])
def test_what_others_sealed_does_not_open(sealed: str) -> None:
    assert open_reasoning(sealed) is None


def test_sealed_reasoning_that_unpacks_to_too_much_does_not_open() -> None:
    assert open_reasoning(seal_reasoning("a" * (5 << 20))) is None


async def test_logprobs_come_with_the_words_that_they_are_of(gateway: Gateway) -> None:
    chosen = TokenLogprob(5, "é".encode(), -0.5)
    other = TokenLogprob(6, b"x", float("-inf"))
    tokens = [
        Tokens(token_ids=b"\5\0\0\0", text=text, logprobs=(ChosenLogprob(chosen, (chosen, other)),))
        for text in ("<think>\nHm.", "\n</think>\n\n", "Y", "", "es")
    ]
    usage = Usage(prompt_tokens=1, completion_tokens=5)
    gateway.runs.script = lambda order: [*tokens, Finished(reason="stop", usage=usage, timings=Timings())]
    events = await stream(gateway, include=["message.output_text.logprobs"], top_logprobs=2)
    [_, message] = events[-1].data["response"]["output"]
    told = [event.data["logprobs"] for event in events if event.name == "response.output_text.delta"]
    assert [len(logprobs) for logprobs in told] == [1, 2]
    assert message["content"][0]["logprobs"] == [*itertools.chain(*told)]
    top = [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
        {"token": "x", "logprob": -9999.0, "bytes": [120]},
    ]
    assert told[0][0] == {**top[0], "top_logprobs": top}
    assert gateway.runs.last.order.sampling.top_logprobs == 2
