"""Traces as files: what is read from them, what is refused, and the tokens made of them."""

from __future__ import annotations

import gzip
import json
from array import array
from pathlib import Path

import pytest

from workers.errors import TraceError
from workers.simulate_trace import Call, Prompts, Trace, read_trace


def line(**changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "session": 0,
        "agent": "main",
        "think": 2.0,
        "input_length": 130,
        "output_length": 5,
        "stop": "tool_use",
        "hash_ids": [1, 2],
    }
    return fields | changes


def written(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def only_call(trace: Trace) -> Call:
    assert trace.num_calls == 1
    return trace.sessions[0][0]


def token_ids(prompt: bytes) -> list[int]:
    tokens = array("I")
    tokens.frombytes(prompt)
    return tokens.tolist()


def test_a_call_has_what_its_line_says(tmp_path: Path) -> None:
    call = only_call(read_trace(written(tmp_path / "trace.jsonl", line())))
    assert (call.session, call.agent, call.parent, call.think_seconds) == ("0", "main", "", 2.0)
    assert (call.prompt_tokens, call.output_tokens, call.num_tokens) == (130, 5, 135)
    assert call.waits_for_tool and call.is_final
    assert call.repeatable_tokens == 128


def test_gzipped_and_plain_files_read_alike(tmp_path: Path) -> None:
    plain = written(tmp_path / "trace.jsonl", line())
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed)


def test_sessions_keep_their_calls_in_order_also_when_lines_are_mixed(tmp_path: Path) -> None:
    lines = [line(session=index % 2, input_length=100 + index) for index in range(4)]
    trace = read_trace(written(tmp_path / "trace.jsonl", *lines))
    assert [[call.prompt_tokens for call in session] for session in trace.sessions] == [
        [100, 102],
        [101, 103],
    ]


def test_an_agents_last_call_is_final_and_a_sub_agent_knows_its_parent(tmp_path: Path) -> None:
    agents = ["main", "main/scout", "main/scout", "main"]
    lines = [line(agent=agent) for agent in agents]
    (session,) = read_trace(written(tmp_path / "trace.jsonl", *lines)).sessions
    assert [call.is_final for call in session] == [False, False, True, True]
    assert [call.parent for call in session] == ["", "main", "main", ""]


def test_without_sessions_each_call_is_one_and_blocks_have_512_tokens(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"timestamp": 7, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]} for _ in range(2)
    ]
    trace = read_trace(written(tmp_path / "trace.jsonl", *lines))
    assert not trace.has_sessions
    assert [len(session) for session in trace.sessions] == [1, 1]
    assert trace.sessions[0][0].repeatable_tokens == 1000  # the second block is not whole


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no call"),
        ("no json\n", "line 1"),
        (json.dumps(line()) + "\n" + json.dumps({"input_length": 5}) + "\n", "line 2"),
        (json.dumps(line(input_length=0)), "input_length is 0"),
        (json.dumps(line(hash_ids=["a"])), "hash_ids"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_a_missing_and_a_torn_file_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl: No such file"):
        read_trace(tmp_path / "absent.jsonl")
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(json.dumps(line()).encode())[:-8])
    with pytest.raises(TraceError, match=r"torn\.jsonl\.gz"):
        read_trace(torn)


def test_a_context_leaves_longer_calls_out_and_sessions_that_it_empties(tmp_path: Path) -> None:
    lines = [line(input_length=100), line(input_length=300), line(session=1, input_length=301)]
    trace = read_trace(written(tmp_path / "trace.jsonl", *lines)).within(105)
    assert [[call.prompt_tokens for call in session] for session in trace.sessions] == [[100]]


def test_equal_blocks_give_equal_tokens_and_the_rest_is_new(tmp_path: Path) -> None:
    lines = [line(), line(), line(hash_ids=[1, 3])]
    (session,) = read_trace(written(tmp_path / "trace.jsonl", *lines)).sessions
    prompts = Prompts()
    first, again, other = (token_ids(prompts.of(call)) for call in session)
    assert len(first) == len(again) == len(other) == 130
    assert first[:128] == again[:128] and first[128] != again[128]
    assert first[:64] == other[:64] and first[64] != other[64]


def test_a_last_block_that_is_not_whole_is_cut(tmp_path: Path) -> None:
    call = only_call(read_trace(written(tmp_path / "trace.jsonl", line(input_length=100))))
    assert len(token_ids(Prompts().of(call))) == 100 == call.repeatable_tokens
