"""One streamed call to any OpenAI-compatible address, timed from outside."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Timed:
    """A call as its caller saw it; times are monotonic seconds."""

    sent: float
    text: str = ""
    arrivals: list[float] = field(default_factory=list)  # of each piece of text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def first_token_seconds(self) -> float:
        """From sending to the first piece of text."""
        return self.arrivals[0] - self.sent

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first piece, whose tokens (it may hold several) are left out."""
        tokens = self.completion_tokens * (1 - 1 / len(self.arrivals))
        return tokens / (self.arrivals[-1] - self.arrivals[0])


async def call(session: aiohttp.ClientSession, body: dict[str, Any]) -> Timed:
    """Send one greedy streamed chat call. Raises RuntimeError with the server's words."""
    sent = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    timed = Timed(time.monotonic())
    async with session.post("chat/completions", json=sent) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            chunk = json.loads(line[5:])
            if chunk.get("error"):
                raise RuntimeError(str(chunk["error"]))
            _add(timed, chunk)
    if len(timed.arrivals) < 2 or timed.completion_tokens < 2:
        raise RuntimeError(f"too short to time: {timed.completion_tokens} tokens, {timed.text!r}")
    return timed


async def first_model(session: aiohttp.ClientSession) -> str:
    """The id of the first model that the address offers."""
    async with session.get("models") as response:
        return str((await response.json())["data"][0]["id"])


def _add(timed: Timed, chunk: dict[str, Any]) -> None:
    usage = chunk.get("usage")
    if usage:
        timed.prompt_tokens = usage["prompt_tokens"]
        timed.completion_tokens = usage["completion_tokens"]
        timed.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        piece = delta.get("reasoning_content") or delta.get("content")
        if piece:
            timed.text += piece
            timed.arrivals.append(time.monotonic())
