"""For each operation calls that succeed: where fuzzed ones begin.

A string `@kind` in a body or path stands for the id of a live thing of that kind (fuzz_world.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .samples import TOOLS

Json = dict[str, Any]

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLED = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "/a"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "contents"},
]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
FUNCTION = TOOLS[0]["function"]
FORMAT = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA, "strict": True}}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "logit_bias": {"5": 1.5},
    "seed": 7,
    "stop": ["xyz"],
    "stop_token_ids": [3],
    "ignore_eos": False,
    "max_tokens": 20,
    "n": 1,
    "user": "u",
    "prompt_cache_key": "k",
    "metadata": {"a": "b"},
}
HINTS = {
    "session": "s-1",
    "agent": "a-1",
    "parent": "a-0",
    "fork_tokens": 3,
    "expects": "read_file",
    "final": False,
    "retain": "session",
    "explain": True,
    "class": "bulk",
    "priority": 1,
    "expected_output_tokens": 9,
    "unattended": True,
}
CHATS: list[Json] = [
    {"messages": [SYSTEM, USER], **SAMPLING, "tetrarch": HINTS},
    {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}, "model": "model"},
    {"messages": [USER], "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "stream": True},
    {"messages": CALLED, "tools": TOOLS, "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "user", "content": "JSON"}], "response_format": FORMAT},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Think"}]}],
        "chat_template_kwargs": {"enable_thinking": True},
        "max_completion_tokens": 30,
        "stream": True,
    },
]
TEXTS: list[Json] = [
    {"prompt": "Once", **SAMPLING, "logprobs": 2, "echo": False, "best_of": 1},
    {"prompt": ["Once"], "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": [5, 6, 7]},
]
ITEMS: list[Json] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "read_file", "arguments": '{"path": "/a"}'},
    {"type": "function_call_output", "call_id": "c", "output": "contents"},
]
FLAT_TOOLS: list[Json] = [
    {"type": "function", **FUNCTION},
    {"type": "web_search"},
    {"type": "namespace", "name": "mcp", "description": "More.", "tools": [{"type": "function", **FUNCTION}]},
]
RESPONSES: list[Json] = [
    {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 20, "metadata": {"a": "b"}},
    {"input": ITEMS, "tools": FLAT_TOOLS, "tool_choice": "auto", "stream": True, "store": False},
    {"input": "Think", "reasoning": {"effort": "low", "summary": "auto"}, "stream": True},
    {"input": "more", "previous_response_id": "@response", "stream": True, "truncation": "auto"},
    {"input": "Hi", "background": True, "include": ["reasoning.encrypted_content"], "top_logprobs": 2},
    {
        "input": [{"role": "user", "content": "JSON"}],
        "text": {"format": {"type": "json_schema", "name": "reply", "schema": SCHEMA, "strict": True}},
    },
]
ANTHROPIC_TOOLS = [{"name": "read_file", "description": "Reads.", "input_schema": FUNCTION["parameters"]}]
PROMPTS: list[Json] = [
    {
        "messages": [USER],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "model": "claude-x",
    },
    {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "On it."},
                    {"type": "tool_use", "id": "t", "name": "read_file", "input": {"path": "/a"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "contents", "is_error": False}
                ],
            },
        ],
        "tools": ANTHROPIC_TOOLS,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
    {
        "messages": [{"role": "user", "content": "Think"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tetrarch": HINTS,
    },
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "JSON"}]}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "high"},
    },
]
MESSAGES: list[Json] = [
    {**PROMPTS[0], "max_tokens": 20, "stream": True, "stop_sequences": ["xyz"], "metadata": {"user_id": "u"}},
    {**PROMPTS[1], "max_tokens": 20, "temperature": 0.5, "top_p": 0.9, "top_k": 5},
    {**PROMPTS[2], "max_tokens": 30, "stream": True},
    {**PROMPTS[3], "max_tokens": 30},
    {"messages": [USER], "tools": ANTHROPIC_TOOLS, "max_tokens": 60, "stream": True},
]
BUDGET = {"prompt_tokens": 900, "output_tokens": 50, "thinking_tokens": 40, "wall_ms": 9000, "tool_calls": 3}
RUNS: list[Json] = [
    {
        "input": "Hi",
        "session": "s-1",
        "agent": "a-3",
        "parent": "a-1",
        "class": "bulk",
        "priority": 2,
        "budget": BUDGET,
        "deadline_ms": 60_000,
        "queue_ttl_ms": 60_000,
        "heartbeat_ms": 60_000,
        "orphan": "continue",
        "hold_ms": 1000,
        "on_end": "complete",
        "derail": "report",
        "unattended": True,
        "retain": "session",
        "final": False,
        "expects": "read_file",
        "expected_output_tokens": 9,
        "label": "l",
        "metadata": {"a": "b"},
    },
    {"messages": [SYSTEM, USER], "tree_budget": BUDGET, "max_tokens": 20, "temperature": 0.5, "seed": 7},
    {"input": "JSON", "result_schema": SCHEMA, "parent_run": "@ended"},
    {"messages": CALLED, "tools": TOOLS, "tool_choice": "none"},
    {"input": "Go on.", "fork": {"run": "@ended", "at": {"turn": 1}}},
]
BATCHES: list[Json] = [
    {"runs": RUNS[:3], "all_or_nothing": True},
    {"runs": [{"input": "Hi", "fork": {"run": "@ended"}}]},
]
FORKS: list[Json] = [
    {"input": "And you?", "at": "now", "label": "l"},
    {"messages": [USER], "at": {"turn": 1}, "tools": TOOLS, "tool_choice": "none"},
    {"input": "And you?", "at": {"token": 3}},
    {"input": "And you?", "at": {"checkpoint": "prompt"}, "budget": BUDGET},
]
WAITS: list[Json] = [
    {"ids": ["@ended"], "mode": "all", "until": "ended", "timeout_ms": 20},
    {"ids": ["@ended", "@running"], "mode": "any", "until": "settled"},
    {"ids": ["@running", "@asking"], "timeout_ms": 0},
]


@dataclass(frozen=True)
class Seed:
    """A call. `aims`: the kinds that its path's parameter may stand for; the first succeeds."""

    aims: tuple[str, ...] = ()
    body: Json | None = None
    query: dict[str, str] = field(default_factory=dict)


def _each(bodies: list[Json], *aims: str) -> list[Seed]:
    return [Seed(aims, body) for body in bodies]


RUN_KINDS = (
    "ended",
    "queued",
    "running",
    "paused",
    "input_required",
    "asking",
    "cancelled",
    "chat",
    "response",
)
PAST = {"follow": "false"}
WAITING = {"ids": "@ended", "mode": "all", "until": "ended", "timeout_ms": "20"}
LIST = {
    "session": "s-1",
    "agent": "a-1",
    "status": "decoding",
    "class": "default",
    "kind": "run",
    "limit": "5",
}

SEEDS: dict[str, list[Seed]] = {
    "POST /v1/chat/completions": _each(CHATS),
    "GET /v1/chat/completions/{id}": [
        Seed(("chat", "live chat", "message", "text", "response as run")),
        Seed(("chat", "live chat"), query={"after": "1-2"}),
    ],
    "POST /v1/completions": _each(TEXTS),
    "GET /v1/completions/{id}": [
        Seed(("text", "chat", "message", "live chat")),
        Seed(("text", "chat"), query={"after": "1-2"}),
    ],
    "POST /v1/responses": _each(RESPONSES),
    "GET /v1/responses/{id}": [
        Seed(("response", "live response", "unstored response", "ended")),
        Seed(("response", "live response"), query={"stream": "true", "starting_after": "1"}),
    ],
    "DELETE /v1/responses/{id}": [Seed(("response", "live response", "unstored response"))],
    "POST /v1/responses/{id}/cancel": [Seed(("live response", "response", "unstored response"))],
    "GET /v1/responses/{id}/input_items": [
        Seed(("response", "live response", "unstored response"), query={"limit": "5", "order": "asc"})
    ],
    "POST /v1/messages": _each(MESSAGES),
    "POST /v1/messages/count_tokens": _each(PROMPTS),
    "POST /v1/runs": _each(RUNS),
    "GET /v1/runs": [Seed(query=LIST), Seed()],
    "POST /v1/runs/batch": _each(BATCHES),
    "POST /v1/runs/{id}/fork": _each(FORKS, *RUN_KINDS),
    "POST /v1/runs/wait": _each(WAITS),
    "GET /v1/runs/wait": [Seed(query=WAITING)],
    "GET /v1/runs/{id}": [Seed(RUN_KINDS)],
    "DELETE /v1/runs/{id}": [Seed(RUN_KINDS)],
    "GET /v1/runs/{id}/events": [
        Seed(RUN_KINDS),
        Seed(RUN_KINDS, query=PAST),
        Seed(("running",), query=PAST),
    ],
    "POST /v1/runs/{id}/cancel": _each([{"mode": "now", "tree": True}, {"mode": "graceful"}], *RUN_KINDS[1:]),
    "POST /v1/runs/{id}/pause": _each([{"hold_ms": 1000}, {}], "running", *RUN_KINDS),
    "POST /v1/runs/{id}/resume": _each([{}], "paused", *RUN_KINDS),
    "POST /v1/runs/{id}/steer": _each(
        [{"text": "Brief.", "when": when} for when in ("now", "queue", "next_turn")], "running", *RUN_KINDS
    ),
    "POST /v1/runs/{id}/respond": [
        Seed(("input_required", *RUN_KINDS), {"text": "More."}),
        Seed(("asking", *RUN_KINDS), {"outputs": [{"call_id": "@call", "output": "contents"}]}),
    ],
    "POST /v1/runs/{id}/heartbeat": _each([{}], *RUN_KINDS[1:]),
    "GET /v1/sessions/{session}/tree": [Seed(("session",))],
    "GET /v1/sessions/{session}/events": [Seed(("session",), query=PAST), Seed(("session",))],
    "POST /v1/sessions/{session}/cancel": [Seed(("session",), {"agent": "a-1"}), Seed(("session",), {})],
    "GET /v1/models": [Seed()],
    "GET /v1/models/{model}": [Seed(("model", "alias")), Seed(("alias",))],
    "GET /api/v1/models": [Seed()],
    "GET /openapi.json": [Seed()],
    "GET /health": [Seed()],
    "GET /ready": [Seed()],
    "GET /metrics": [Seed()],
}
