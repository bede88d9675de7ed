"""A limit that is taken, shown and kept by nobody: every field of the budgets, and every time of a run, ends
what it is a limit of. A field that is added to them has no case here and fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.native.structs import BudgetBody, RunRequest
from gateway.runs.spec import Budget
from tests.conftest import ValkeyServer

from .chatting import CALL
from .native_client import NativeClient, Told
from .samples import TOOLS
from .talking_engine import TalkingEngine
from .test_native_real import reaches, serving

THOUGHT = "<think>\nThe quick brown fox jumps over the lazy dog\n</think>\n\nok"
LIMITS = BudgetBody.__struct_fields__
TIMES = tuple(name for name in RunRequest.__struct_fields__ if name.endswith("_ms"))
WALL_MS = 2500


def answers(prompt: str) -> str:
    return CALL if "read_file" in prompt else THOUGHT


def asks_or_ended(told: Told) -> bool:
    return told["status"] in ("completed", "failed", "expired", "cancelled", "input_required")


async def run(client: NativeClient, name: str, **more: Any) -> Told:
    """A run that uses one of what the limit counts, or more, once it has."""
    run_id = await client.create(**({"tools": TOOLS} if name == "tool_calls" else {}), **more)
    return await reaches(client, run_id, asks_or_ended)


def used(told: Told, name: str) -> int:
    """Of what the limit counts."""
    usage = told["usage"]
    counts = {
        "prompt_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "thinking_tokens": usage["reasoning_tokens"],
        "tool_calls": told["input_required"] and len(told["input_required"]["calls"]),
    }
    num_used = counts[name]
    assert num_used
    return int(num_used)


def assert_ended_by(told: Told, name: str, limit: int) -> None:
    assert (told["status"], told["error"]["code"]) == ("failed", "budget_exceeded")
    assert f" {name} is {limit}." in told["error"]["message"]


@pytest.mark.parametrize("name", LIMITS)
async def test_every_limit_of_a_budget_ends_a_run(valkey: ValkeyServer, tmp_path: Path, name: str) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        if name == "wall_ms":
            limit, engine.allowed = 500, 3
        else:
            limit = used(await run(client, name), name)
            within = await run(client, name, budget={name: limit})
            assert within["status"] in ("completed", "input_required"), "reaching it is no offence"
            limit -= 1
        told = await run(client, name, budget={name: limit})
        assert told["budget"][name] == limit
        assert_ended_by(told, name, limit)


@pytest.mark.parametrize("name", LIMITS)
async def test_every_limit_of_a_budget_ends_a_tree(valkey: ValkeyServer, tmp_path: Path, name: str) -> None:
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        limit = WALL_MS if name == "wall_ms" else used(await run(client, name), name)
        engine.allowed = 3 if name == "wall_ms" else None
        root = await client.create(
            tree_budget={name: limit}, **({"tools": TOOLS} if name == "tool_calls" else {})
        )
        if name != "wall_ms":
            told = await reaches(client, root, asks_or_ended)
            assert told["status"] in ("completed", "input_required"), "reaching it is no offence"
        below = root
        for _ in range(2):
            told = await run(client, name, parent_run=below)
            assert told["tree_budget"][name] == limit
            assert_ended_by(told, f"tree_budget.{name}", limit)
            below = told["id"]
        if name == "wall_ms":
            assert_ended_by(await reaches(client, root, asks_or_ended), "tree_budget.wall_ms", limit)


@pytest.mark.parametrize("name", TIMES)
async def test_every_time_of_a_run_comes_to_an_end(valkey: ValkeyServer, tmp_path: Path, name: str) -> None:
    ends = {
        "deadline_ms": ("expired", "deadline_exceeded"),
        "queue_ttl_ms": ("expired", "queue_ttl_exceeded"),
        "heartbeat_ms": ("cancelled", None),
        "hold_ms": ("paused", None),
    }
    status, error = ends[name]
    async with TalkingEngine(valkey.url, answers) as engine, serving(valkey.url, tmp_path) as client:
        engine.allowed, engine.is_starting = 3, name != "queue_ttl_ms"
        run_id = await client.create(**{name: 700})
        if name == "hold_ms":
            await reaches(client, run_id, lambda told: told["usage"]["completion_tokens"] == 3)
            await client.call("POST", f"/v1/runs/{run_id}/pause")
            assert [pause.hold_seconds for pause in engine.pauses] == [0.7]
        told = await reaches(client, run_id, lambda told: told["status"] == status)
        assert (told["error"] or {"code": None})["code"] == error


def test_what_is_asked_for_is_what_is_enforced() -> None:
    assert Budget.__struct_fields__ == LIMITS
