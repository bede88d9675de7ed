"""Chat completions with tools and thinking, as OpenAI's SDK reads them: whole, streamed, resumed, sent on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from array import array
from typing import Any

import msgspec
import pytest

from gateway.text.prompts import Prompts
from workers.messages import ChosenLogprob, Finished, Timings, TokenizerBundle, TokenLogprob, Tokens, Usage

from .fake_runs import Script, engine_view, words
from .http_gateway import CHAT, Gateway, chunks_of, events_of
from .samples import MISTRAL, QWEN, TOOLS, bundle_of, byte_level_tokenizer
from .test_written import clumsy

USER = {"role": "user", "content": "Read /tmp/a.txt"}
ASKED: dict[str, Any] = {"messages": [USER], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "ü </tool_call>", "n": 1.50}}\n</tool_call>'
ARGUMENTS = '{"path": "ü </tool_call>", "n": 1.50}'
TEXT = f"Let me look.\n{CALL}\n{CALL}"
THINKING = QWEN.replace("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}")
XML = (
    QWEN[: QWEN.index('{{- \'\\n<tool_call>\\n{"name"')]
    + (
        "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
        "{%- for key, value in tool_call.arguments | items %}"
        "{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}"
        "{{- '\\n</parameter>\\n' }}"
        "{%- endfor %}{{- '</function>\\n</tool_call>' }}"
    )
    + QWEN[QWEN.index("            {%- endfor %}\n        {%- endif %}\n        {{- '<|im_end|>") :]
)


def serve(gateway: Gateway, template: str) -> TokenizerBundle:
    """The gateway's only engine has this template."""
    bundle = bundle_of(byte_level_tokenizer(), template)
    view = engine_view(bundle, context_length=4096)
    info = msgspec.structs.replace(view.info, digest=template)
    gateway.directory.views = [dataclasses.replace(view, info=info)]
    return bundle


@pytest.fixture
def qwen(gateway: Gateway) -> Gateway:
    serve(gateway, QWEN)
    return gateway


async def ask(gateway: Gateway, text: str, *, reason: str = "stop", **more: Any) -> dict[str, Any]:
    """The only choice of a whole answer."""
    gateway.runs.script = words(text, reason=reason)
    status, body = await gateway.post({**ASKED, **more})
    assert status == 200, body
    choice: dict[str, Any] = body["choices"][0]
    return choice


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together as OpenAI's SDK does it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    assert part["id"] and part["type"] == "function" and part["function"]["name"]
                    calls.append({name: value for name, value in part.items() if name != "index"})
                else:
                    assert part["index"] == len(calls) - 1 and part.keys() == {"index", "function"}
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return {**message, "content": message["content"] or (None if "tool_calls" in message else "")}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "tool_calls": [{**call, "id": ""} for call in message.get("tool_calls", ())]}


async def test_calls_have_openais_shape(qwen: Gateway) -> None:
    choice = await ask(qwen, TEXT)
    first, second = (call["id"] for call in choice["message"]["tool_calls"])
    assert first != second and all(name.startswith("call_") and len(name) == 29 for name in (first, second))
    function = {"name": "read_file", "arguments": ARGUMENTS}
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": first, "type": "function", "function": function},
                {"id": second, "type": "function", "function": function},
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
    }


async def test_calls_without_words_have_null_content(qwen: Gateway) -> None:
    assert (await ask(qwen, CALL))["message"]["content"] is None


async def test_a_stream_of_calls_reads_as_the_whole_answer_however_it_is_cut(qwen: Gateway) -> None:
    whole = (await ask(qwen, TEXT))["message"]
    cuts = [[TEXT], list(TEXT), *([TEXT[:position], TEXT[position:]] for position in range(5, len(TEXT), 9))]
    for pieces in cuts:
        qwen.runs.script = words(*pieces)
        chunks = chunks_of(await qwen.stream(ASKED))
        assert without_ids(assembled(chunks)) == without_ids(whole)
        finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert finishes == [None] * (len(finishes) - 1) + ["tool_calls"]


async def test_arguments_are_streamed_in_deltas(qwen: Gateway) -> None:
    qwen.runs.script = words(*TEXT)
    chunks = chunks_of(await qwen.stream(ASKED))
    calls = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [part["index"] for part in calls if "id" in part] == [0, 1]
    assert len([part for part in calls if part["index"] == 0]) > len(ARGUMENTS) / 2


async def test_a_stream_resumes_within_a_call_with_the_same_ids(qwen: Gateway) -> None:
    qwen.runs.script = words(*(TEXT[start : start + 7] for start in range(0, len(TEXT), 7)))
    whole = await qwen.stream(ASKED)
    path = f"{CHAT}/{chunks_of(whole)[0]['id']}"
    for position, event in enumerate(whole[:-1]):
        if event["id"] is not None:
            async with qwen.http.get(f"{qwen.url}{path}?after={event['id']}") as response:
                assert events_of(await response.text()) == whole[position + 1 :]


async def test_a_call_that_is_cut_off_is_never_told_as_whole(qwen: Gateway) -> None:
    for num_chars in range(1, len(CALL) - len("}\n</tool_call>")):
        choice = await ask(qwen, CALL[:num_chars], reason="length")
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", ()):
            with pytest.raises(json.JSONDecodeError):
                json.loads(call["function"]["arguments"])


async def test_a_stop_string_within_a_call_cuts_it_short(qwen: Gateway) -> None:
    choice = await ask(qwen, CALL[: CALL.index("ü")], stop="ü")
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"path": "'


@pytest.mark.parametrize("arguments", ['{"path": }', "{path: 1}"])
async def test_arguments_that_are_no_json_are_told_as_written_in_bodies_and_streams(
    qwen: Gateway, arguments: str
) -> None:
    """Here they are a string: the client tells its model what is wrong with it."""
    broken = f'Look.\n<tool_call>{{"name": "read_file", "arguments": {arguments}}}</tool_call>'
    choice = await ask(qwen, broken)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    qwen.runs.script = words(*broken)
    chunks = chunks_of(await qwen.stream(ASKED))
    assert without_ids(assembled(chunks)) == without_ids(choice["message"])
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "stop"


async def test_a_broken_call_is_content(qwen: Gateway) -> None:
    choice = await ask(qwen, "<tool_call>{read a file}</tool_call>")
    assert choice["message"] == {"role": "assistant", "content": "<tool_call>{read a file}</tool_call>"}
    assert choice["finish_reason"] == "stop"


async def test_without_tools_calls_are_words(qwen: Gateway) -> None:
    cases: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
    for more in cases:
        choice = await ask(qwen, TEXT, **more)
        assert choice["message"] == {"role": "assistant", "content": TEXT}
        assert choice["finish_reason"] == "stop"


async def test_no_choice_of_tools_keeps_them_out_of_the_prompt(qwen: Gateway) -> None:
    await ask(qwen, "x", tool_choice="none")
    prompt = qwen.runs.last.order.token_ids
    await ask(qwen, "x", tools=None)
    assert qwen.runs.last.order.token_ids == prompt
    await ask(qwen, "x", tool_choice="auto")
    assert qwen.runs.last.order.token_ids != prompt


@pytest.mark.parametrize(
    "choice",
    ["any", "", {}, {"type": "function"}, {"type": "function", "function": {"name": "other"}}, 7, ["auto"]],
)
async def test_a_choice_that_cannot_be_is_refused_by_name(qwen: Gateway, choice: Any) -> None:
    status, body = await qwen.post({**ASKED, "tool_choice": choice})
    assert status == 400 and body["error"]["param"].startswith("tool_choice")
    assert "'required'" in body["error"]["message"] or "one of the tools" in body["error"]["message"]
    assert not qwen.runs.runs


async def test_one_call_at_a_time_is_kept_to(qwen: Gateway) -> None:
    for pieces in ([TEXT], list(TEXT)):
        qwen.runs.script = words(*pieces)
        message = assembled(chunks_of(await qwen.stream({**ASKED, "parallel_tool_calls": False})))
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS]
    choice = await ask(qwen, TEXT, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_that_calls_on_is_stopped_where_one_call_is_wanted(qwen: Gateway, stream: bool) -> None:
    qwen.runs.script = lambda order: [
        Tokens(token_ids=b"", text=CALL),
        Tokens(token_ids=b"", text=CALL),
        60.0,
        *words("never")(order),
    ]
    asked = {**ASKED, "parallel_tool_calls": False}
    if stream:
        events = await qwen.stream(asked)
        assert events[-1]["data"] == "[DONE]"
        message, reason = assembled(chunks_of(events)), chunks_of(events)[-1]["choices"][0]["finish_reason"]
    else:
        status, body = await qwen.post(asked)
        assert status == 200
        message, reason = body["choices"][0]["message"], body["choices"][0]["finish_reason"]
    assert len(message["tool_calls"]) == 1 and reason == "tool_calls"
    assert len(qwen.runs.cancelled) == 1
    [run_id] = qwen.runs.runs
    async with qwen.http.get(f"{qwen.url}{CHAT}/{run_id}") as again:
        assert again.status == 200  # told as a whole answer, though the turn was stopped


async def test_mistrals_calls_have_ids_that_its_templates_take(gateway: Gateway) -> None:
    serve(gateway, MISTRAL + "{# [TOOL_CALLS] #}")
    choice = await ask(gateway, '[TOOL_CALLS]read_file[ARGS]{"path": "a"}')
    [call] = choice["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()


async def test_logprobs_of_a_call_are_not_lost(qwen: Gateway) -> None:
    def play(order: Any) -> list[Any]:
        tokens = [
            Tokens(
                token_ids=array("I", [300]).tobytes(),
                text=letter,
                logprobs=(ChosenLogprob(TokenLogprob(300, letter.encode(), -0.5)),),
            )
            for letter in CALL
        ]
        return [*tokens, Finished(reason="stop", usage=Usage(completion_tokens=len(CALL)), timings=Timings())]

    qwen.runs.script = play
    chunks = chunks_of(await qwen.stream({**ASKED, "logprobs": True}))
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert "".join(entry["token"] for logprobs in told if logprobs for entry in logprobs["content"]) == CALL


# Thinking


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (QWEN, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (QWEN, "Yes.", None, "Yes."),
        (QWEN, "Yes. </think>", None, "Yes. </think>"),
        (QWEN, "<think>\nHm", "Hm", ""),
        (THINKING, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (THINKING, "Hm", "Hm", ""),
    ],
)
async def test_thinking_is_told_apart_by_what_the_prompt_opened(
    gateway: Gateway, template: str, text: str, reasoning: str | None, content: str
) -> None:
    serve(gateway, template)
    expected = {"role": "assistant", "content": content}
    if reasoning is not None:
        expected["reasoning_content"] = reasoning
    assert (await ask(gateway, text, tools=None))["message"] == expected
    gateway.runs.script = words(*text)
    assert assembled(chunks_of(await gateway.stream(ASKED))) == expected


async def test_a_thought_that_a_caller_closes_or_opens_is_not_the_prompts(gateway: Gateway) -> None:
    serve(gateway, THINKING)
    closed = {"enable_thinking": False}
    choice = await ask(gateway, "Yes.", tools=None, chat_template_kwargs=closed)
    assert choice["message"] == {"role": "assistant", "content": "Yes."}
    serve(gateway, QWEN.replace("{%- if add_generation_prompt %}", "{%- if false %}"))
    choice = await ask(gateway, "Yes.", messages=[{"role": "user", "content": "<think>"}])
    assert choice["message"] == {"role": "assistant", "content": "Yes."}


# What comes back

XML_CALL = (
    "<tool_call>\n<function=read_file>\n<parameter=path>\n/tmp/ü\n</parameter>\n"
    "<parameter=deep>\n<b>\n\n</parameter>\n</function>\n</tool_call>"
)
HERMES_CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a",  "b": [1]}}\n</tool_call>'


def generating(ids: array[int], text: str) -> Script:
    usage = Usage(prompt_tokens=1, completion_tokens=len(ids))
    return lambda order: [
        Tokens(token_ids=ids.tobytes(), text=text),
        Finished(reason="stop", usage=usage, timings=Timings()),
    ]


@pytest.mark.parametrize("keeps_thinking", [True, False], ids=["thinking kept", "thinking left out"])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, f"Let me look.\n{HERMES_CALL}"),
        (QWEN, f"{HERMES_CALL}\n{HERMES_CALL}"),
        (QWEN, f"<think>\nHm.\n</think>\n\n{HERMES_CALL}"),
        (THINKING, f"Hm.\n</think>\n\nLook.\n\n{HERMES_CALL}"),
        (XML, f"Let me look.\n\n{XML_CALL}"),
        (XML, f"<think>\nHm.\n</think>\n\n{XML_CALL}"),
    ],
)
async def test_the_turn_after_a_call_starts_with_the_generated_ids(
    gateway: Gateway,
    template: str,
    text: str,
    keeps_thinking: bool,
) -> None:
    prompts = Prompts(serve(gateway, template))
    end = prompts.tokenizer.control.hard["<|im_end|>"]
    messages, kept = [USER], b""
    for number in range(3):
        answer = text.replace("Look", f"Look {number}")
        ids = array("I", [*(await asyncio.to_thread(clumsy, prompts, answer)), end])
        gateway.runs.script = generating(ids, answer)
        _, body = await gateway.post({**ASKED, "messages": messages})
        prompt = gateway.runs.last.order.token_ids
        assert prompt.startswith(kept)
        kept = prompt + ids.tobytes()
        message = body["choices"][0]["message"]
        if not keeps_thinking:
            message.pop("reasoning_content", None)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "text"} for call in message["tool_calls"]
        ]
        messages = [*messages, message, *results]
