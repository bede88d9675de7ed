"""Gateways without HTTP that make detached runs of chats, for the tests of what runs can do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from gateway.aliases import Aliases
from gateway.http.continuing import ChatTalk
from gateway.runs.outcomes import FINAL
from gateway.runs.spec import RunSpec
from gateway.runs.state import RunState
from gateway.store.results import RunResult
from gateway.text.prompts import PromptLibrary
from tests.conftest import ValkeyServer
from workers.messages import RunEnded, Tokens, TurnEnd

from .fake_engine import until
from .samples import TOOLS
from .test_runs import Gateway, gateway, stored

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "/a"}}\n</tool_call>'


@asynccontextmanager
async def chatting(url: str, name: str = "g1", *, kill: bool = False) -> AsyncIterator[Gateway]:
    """A gateway that knows how chats go on."""
    async with gateway(url, name, kill=kill) as gate:
        gate.runs.talk = ChatTalk(gate.directory, PromptLibrary(), Aliases())
        yield gate


def spec(text: str = "Hello", *, tools: bool = False, **fields: Any) -> RunSpec:
    """A detached run of one user message."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "temperature": 0}
    if tools:
        body["tools"] = TOOLS
    return RunSpec(**{"kind": "run", "body": msgspec.json.encode(body), **fields})


async def ended(gate: Gateway, run_id: str, seconds: float = 10) -> RunState:
    """Waits for a run's end."""
    await reaches(gate, run_id, *FINAL, seconds=seconds)
    await until(lambda: not gate.is_live(run_id))
    return await gate.runs.state(run_id)


async def reaches(gate: Gateway, run_id: str, *statuses: str, seconds: float = 10) -> RunState:
    """Waits until a run has one of these states."""
    async with asyncio.timeout(seconds):
        while (state := await gate.runs.state(run_id)).status not in statuses:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return state


async def generated(gate: Gateway, run_id: str, num_tokens: int) -> None:
    """Waits until a run has so many tokens."""
    async with asyncio.timeout(10):
        while (await gate.runs.state(run_id)).num_tokens < num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def result(gate: Gateway, run_id: str) -> RunResult:
    """What is kept of an ended run."""
    found = await gate.runs.keeper.result_of(run_id)
    assert found is not None
    return found


def assert_adds_up(valkey: ValkeyServer, run_id: str, state: RunState) -> None:
    """One end, the last entry there is, and tokens sent = tokens in usage."""
    events = stored(valkey, run_id)
    assert [event for event in events if isinstance(event, RunEnded)] == events[-1:]
    num_tokens = sum(len(event.token_ids) // 4 for event in events if isinstance(event, Tokens))
    assert state.usage.completion_tokens == num_tokens == state.num_tokens
    assert isinstance(state.turn_end, TurnEnd)
