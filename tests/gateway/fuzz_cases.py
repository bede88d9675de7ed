"""Calls made of those that succeed: fields taken away, added, given any value; odd ids, queries, headers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from .described import Described
from .fuzz_seeds import SEEDS, Json, Seed

Draw = st.DrawFn
Step = str | int


def nested(levels: int, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """So many lists or objects in one another."""
    value: Any = None
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


WORDS: list[Any] = [
    *(
        "",
        " ",
        "a",
        "auto",
        "none",
        "required",
        "true",
        "now",
        "text",
        "user",
        "tool",
        "system",
        "json_schema",
    ),
    *(
        "\0",
        "\ud800",
        "\udfff\ud800",
        "é漢🙂\u2028",
        "\u202e",
        "\r\n",
        "x" * 5000,
        "🙂" * 300,
        "../..",
        "%00",
    ),
    *("<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "</tool_call>", "<think>", "{{ messages }}"),
    *(
        "1-1",
        "0-0",
        "18446744073709551615-18446744073709551615",
        "run-" + "0" * 32,
        "resp_" + "0" * 32,
        "@running",
    ),
]
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 5, 255, 256, 4096, 2**31, 2**31 - 1, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, -(10**30)),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
]
OTHERS: list[Any] = [
    *(None, True, False, [], {}, [[]], [None], [{}], {"": None}, {"\ud800": 1}, {"type": "x"}, {"$ref": "#"}),
    *(
        ["x"] * 100,
        [0] * 300,
        {str(index): index for index in range(100)},
        nested(20, list),
        nested(20, dict),
    ),
    *(nested(63, dict), nested(64, dict), nested(65, list), {"type": "text", "text": "x"}),
    *({"type": "function", "name": "f"}, {"type": "object", "properties": {"a": {"type": "object"}}}),
]
LEAVES = st.one_of(
    st.sampled_from([*WORDS, *NUMBERS, *OTHERS]).map(copy.deepcopy),  # what is drawn is changed further
    st.text(max_size=8),
    st.integers(),
    st.floats(),
)
VALUES = st.one_of(
    LEAVES,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)
IDS = st.one_of(
    st.sampled_from(
        [
            *("x", " ", "%00", "\ud800", "é漢🙂", "a/b", "..", "x" * 4000, "wait", "batch", "run-", "resp_"),
            *(f"{prefix}{'0' * 32}" for prefix in ("run-", "chatcmpl-", "cmpl-", "resp_")),
            *("run-" + "F" * 32, "run-" + "0" * 31, "*", "[a-z]", "{}", "\r\n", "?", "#", "s-1", "none-such"),
        ]
    ),
    st.text(min_size=1, max_size=8),
)
QUERY_VALUES = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "true",
                "false",
                "0",
                "1",
                "-1",
                "99999999999",
                "1e3",
                "½",
                "asc",
                "desc",
                "run",
                "call",
                "all",
            ),
            *(
                "1-2",
                "0-0",
                "1-1",
                "9" * 19 + "-0",
                "9" * 21 + "-1",
                "18446744073709551615-18446744073709551615",
            ),
            *(
                "\0",
                "\ud800",
                "é漢🙂",
                "decoding",
                "completed",
                "any",
                "@running,@ended",
                "@paused",
                "@running",
            ),
        ]
    ),
    st.text(max_size=6),
)
LETTERS = st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f")
HEADER_VALUES = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "k",
                "k2",
                "true",
                "0",
                "-1",
                "1.5",
                "9" * 400,
                "x" * 3000,
                "\xe9\xff",
                "1-2",
                "0-0",
                "a,b",
                "[]",
            ),
            *(
                '{"thread_id": "t"}',
                '{"session_id": 5}',
                "{",
                "s-1",
                "a-1",
                "bulk",
                "system",
                "pin",
                "null",
                '"',
            ),
            *(
                "application/json",
                "text/plain",
                "application/json; charset=latin-1",
                "multipart/form-data",
                "*/*",
            ),
        ]
    ),
    st.text(LETTERS, max_size=8).map(str.strip),
)
HEADERS = [
    *("Idempotency-Key", "Idempotency-Key", "Last-Event-ID", "Content-Type", "Accept", "If-None-Match"),
    *("X-Tetrarch-Session", "X-Tetrarch-Agent", "X-Tetrarch-Parent", "X-Tetrarch-Fork", "X-Tetrarch-Expects"),
    *("X-Tetrarch-Final", "X-Tetrarch-Retain", "X-Tetrarch-Class", "X-Tetrarch-Priority", "X-SMG-Priority"),
    *("X-Tetrarch-Unattended", "X-Tetrarch-Expected-Output", "x-dynamo-session-final", "X-Agent", "Range"),
    *("X-Claude-Code-Session-Id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id", "thread-id"),
    *(
        "session-id",
        "x-codex-turn-metadata",
        "x-codex-parent-thread-id",
        "x-session-id",
        "x-session-affinity",
    ),
    *("x-parent-session-id", "x-request-id", "anthropic-version", "anthropic-beta", "Cookie", "traceparent"),
    *("Accept-Encoding", "If-Modified-Since", "X-Forwarded-For", "User-Agent", "Expect-Never", "Forwarded"),
]


@dataclass(frozen=True)
class Call:
    """One fuzzed call; what begins with @ is filled in when it is made. `aim`: an id; "" for none."""

    aim: str
    is_live: bool  # `aim` is the kind of a live thing
    body: Any  # None: none
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def paths_of(value: Any, at: tuple[Step, ...] = ()) -> list[tuple[Step, ...]]:
    """Where anything is in a JSON value, outermost first."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for name, item in inside for path in ((*at, name), *paths_of(item, (*at, name)))]


def names_of(label: str, described: Described) -> list[str]:
    """The names of all fields that an operation may know, and some of none."""
    return [*described.fields(label), "x", "raw_messages", "endpoint", "__class__", "\ud800"]


def good_values(label: str) -> dict[str, list[Any]]:
    """What the operation's other seeds have in each field."""
    found: dict[str, list[Any]] = {}
    for seed in SEEDS[label]:
        for name, value in (seed.body or {}).items():
            found.setdefault(name, []).append(value)
    return found


@st.composite
def bodies(draw: Draw, seed: Json, names: list[str], good: dict[str, list[Any]]) -> Any:
    """The seed's body with up to three changes."""
    body = copy.deepcopy(seed)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        paths = paths_of(body)
        how = draw(st.sampled_from(["set", "set", "set", "delete", "add", "good", "double"]))
        if how == "add" or not paths:
            body[draw(st.sampled_from(names))] = draw(VALUES)
        elif how == "good" and good:
            name = draw(st.sampled_from(sorted(good)))
            body[name] = copy.deepcopy(draw(st.sampled_from(good[name])))
        else:
            _change(body, draw(st.sampled_from(paths)), how, draw)
    return body


def _change(body: Json, path: tuple[Step, ...], how: str, draw: Draw) -> None:
    *outer, last = path
    holder: Any = body
    for step in outer:
        holder = holder[step]
    if how in ("set", "good"):
        holder[last] = draw(VALUES)
    elif how == "delete":
        del holder[last]
    elif isinstance(holder, list):
        holder.insert(int(last), copy.deepcopy(holder[int(last)]))
    else:
        holder[draw(st.text(max_size=6))] = copy.deepcopy(holder[last])


@st.composite
def calls(draw: Draw, label: str, described: Described, kinds: list[str]) -> Call:
    """A call of one operation."""
    seed: Seed = draw(st.sampled_from(SEEDS[label]))
    aim, is_live = "", False
    if seed.aims:
        aims = draw(st.sampled_from([seed.aims[:1], seed.aims, seed.aims, tuple(kinds), ()]))
        is_live = bool(aims)
        aim = draw(st.sampled_from(aims)) if is_live else draw(IDS)
    body: Any = None
    if seed.body is not None:
        body = draw(bodies(seed.body, names_of(label, described), good_values(label)))
        if draw(st.integers(0, 29)) == 0:
            body = draw(VALUES)
    query = dict(seed.query)
    known = [*described.parameters(label, "query"), "x"]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        name = draw(st.sampled_from(known))
        query[name] = draw(QUERY_VALUES)
    headers: dict[str, str] = {}
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        headers[draw(st.sampled_from(HEADERS))] = draw(HEADER_VALUES)
    return Call(aim, is_live, body, query, headers)


def quoted(text: str) -> str:
    """Any text as a part of a path or a query: lone surrogates as the bytes that no UTF-8 has."""
    return quote(text.encode(errors="surrogatepass"), safe="")
