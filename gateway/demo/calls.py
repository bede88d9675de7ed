"""The demo's orchestrator: sends the session's calls over OpenAI's API and collects the answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from .progress import LiveCall, Progress
from .report import CallResult
from .workload import ANSWER_TOKENS, NUM_ROUNDS, Agent, Chat, agents, opening

NUM_IN_FLIGHT = 4
AGENT_HEADER = "X-Agent"
_CALL_SECONDS = 180.0
"""Longest silence between two pieces of a stream."""


class CallFailed(Exception):
    """The server answered a call with an error, or not to the end."""


async def run_session(base_url: str, model: str, progress: Progress) -> list[CallResult]:
    """Every agent once a round, four calls at a time; a round begins when the one before is complete."""
    chats = {agent.name: opening() for agent in agents()}
    seats = asyncio.Semaphore(NUM_IN_FLIGHT)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_CALL_SECONDS)
    results: list[CallResult] = []
    async with aiohttp.ClientSession(base_url, timeout=timeout) as session:

        async def ask(agent: Agent, round_number: int) -> None:
            chat = chats[agent.name]
            chat.append({"role": "user", "content": agent.tasks[round_number - 1]})
            async with seats:
                live = LiveCall(agent.name, round_number)
                progress.begin(live)
                result = await _call(session, model, chat, live, progress)
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


async def _call(
    session: aiohttp.ClientSession, model: str, chat: Chat, live: LiveCall, progress: Progress
) -> CallResult:
    usage: Mapping[str, Any] = {}
    finish_reason = ""
    error = None
    try:
        async for chunk in _stream(session, model, chat, live.agent):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or []:
                finish_reason = choice.get("finish_reason") or finish_reason
                delta = choice.get("delta") or {}
                piece = delta.get("content") or ""
                if (piece or delta.get("reasoning_content")) and live.first_token is None:
                    live.first_token = time.monotonic()
                live.answer += piece
            progress.tick()
        if not finish_reason or not usage:
            error = "the stream ended without a finish reason and usage"
    except (CallFailed, aiohttp.ClientError, TimeoutError, ValueError) as failure:
        error = str(failure) or type(failure).__name__
    return CallResult(
        agent=live.agent,
        round=live.round,
        answer=live.answer,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        generated_tokens=usage.get("completion_tokens", 0),
        first_token_seconds=None if live.first_token is None else live.first_token - live.started,
        seconds=time.monotonic() - live.started,
        finish_reason=finish_reason,
        error=error,
    )


async def _stream(
    session: aiohttp.ClientSession, model: str, chat: Chat, agent: str
) -> AsyncIterator[dict[str, Any]]:
    body = {
        "model": model,
        "messages": chat,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post("v1/chat/completions", json=body, headers={AGENT_HEADER: agent}) as response:
        if response.status != 200:
            raise CallFailed(f"status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            name, _, value = line.partition(b":")
            if name != b"data" or not value.strip():
                continue
            if value.strip() == b"[DONE]":
                return
            chunk = json.loads(value)
            if chunk.get("error"):
                raise CallFailed(str(chunk["error"].get("message") or chunk["error"])[:200])
            yield chunk
    raise CallFailed("the connection closed before [DONE]")
