"""The demo's orchestrator: starts the session's runs, follows them and collects the answers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

from gateway.client import Client, RunBody, RunHandle, RunUsage, TetrarchError, Thinking, TokenText

from .progress import LiveCall, Progress
from .report import CallResult
from .workload import ANSWER_TOKENS, NUM_ROUNDS, Agent, Chat, agents, opening

NUM_IN_FLIGHT = 4
SESSION = "demo"


class CallFailed(Exception):
    """A page of the server is not there, or not what it should be."""


async def run_session(base_url: str, model: str, progress: Progress) -> list[CallResult]:
    """Every agent once a round, four calls at a time; a round begins when the one before is complete."""
    chats = {agent.name: opening() for agent in agents()}
    seats = asyncio.Semaphore(NUM_IN_FLIGHT)
    results: list[CallResult] = []
    async with Client(base_url) as client:

        async def ask(agent: Agent, round_number: int) -> None:
            chat = chats[agent.name]
            chat.append({"role": "user", "content": agent.tasks[round_number - 1]})
            async with seats:
                live = LiveCall(agent.name, round_number)
                progress.begin(live)
                result = await _call(client, model, chat, live, progress)
                progress.end(live, result)
            chat.append({"role": "assistant", "content": result.answer})
            results.append(result)

        for round_number in range(1, NUM_ROUNDS + 1):
            async with asyncio.TaskGroup() as group:
                for agent in agents():
                    group.create_task(ask(agent, round_number))
    return results


async def get_json(session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    """The JSON object at a path. Raises CallFailed."""
    try:
        found = json.loads(await get_text(session, path))
    except ValueError as error:
        raise CallFailed(f"GET {path} did not answer JSON") from error
    if not isinstance(found, dict):
        raise CallFailed(f"GET {path} did not answer an object")
    return found


async def get_text(session: aiohttp.ClientSession, path: str) -> str:
    """The body at a path. Raises CallFailed."""
    async with session.get(path) as response:
        body = await response.text()
        if response.status != 200:
            raise CallFailed(f"GET {path} answered {response.status}: {body[:200]}")
        return body


async def _call(client: Client, model: str, chat: Chat, live: LiveCall, progress: Progress) -> CallResult:
    usage, finish_reason, error = RunUsage(), "", None
    try:
        run = await client.spawn(
            messages=chat,
            model=model,
            session=SESSION,
            agent=live.agent,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
        )
        await _read(run, live, progress)
        ended = await run.read()
        usage, error = ended.usage, _failure(ended)
        finish_reason = (ended.result.finish_reason if ended.result is not None else None) or ""
    except TetrarchError as failure:
        error = str(failure)
    return CallResult(
        agent=live.agent,
        round=live.round,
        answer=live.answer,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.completion_tokens,
        first_token_seconds=None if live.first_token is None else live.first_token - live.started,
        seconds=time.monotonic() - live.started,
        finish_reason=finish_reason,
        error=error,
    )


async def _read(run: RunHandle, live: LiveCall, progress: Progress) -> None:
    async with run.stream() as events:
        async for event in events:
            if isinstance(event, TokenText | Thinking) and live.first_token is None:
                live.first_token = time.monotonic()
            if isinstance(event, TokenText):
                live.answer += event.text
            progress.tick()


def _failure(run: RunBody) -> str | None:
    if run.status == "completed":
        return None
    return f"{run.status}: {run.error.message}" if run.error is not None else run.status
