"""Calls through the official clients: the same words for the sync and the async one, and for both at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import anthropic
import openai

Clients = tuple[Any, Any]
"""One vendor's: sync and async."""

SYNC = (openai.OpenAI, anthropic.Anthropic)


async def call(client: Any, method: str, *given: Any, **asked: Any) -> Any:
    """What `client.<method>` answers. A sync client's waits in a thread."""
    function = attrgetter(method)(client)
    if isinstance(client, SYNC):
        return await asyncio.to_thread(function, *given, **asked)
    return await function(*given, **asked)


async def events(client: Any, method: str, **asked: Any) -> list[Any]:
    """All events of a raw stream."""
    function = attrgetter(method)(client)
    if isinstance(client, SYNC):
        return await asyncio.to_thread(lambda: [*function(**asked, stream=True)])
    return [event async for event in await function(**asked, stream=True)]


async def streamed(client: Any, method: str, get_final: str, **asked: Any) -> Any:
    """What the client's own helper makes of a stream, got by the name `get_final`."""
    function = attrgetter(method)(client)
    if isinstance(client, SYNC):
        return await asyncio.to_thread(_streamed, lambda: function(**asked), get_final)
    async with function(**asked) as stream:
        return await getattr(stream, get_final)()


def _streamed(open_stream: Callable[[], Any], get_final: str) -> Any:
    with open_stream() as stream:
        return getattr(stream, get_final)()


async def both(ask: Callable[..., Any], clients: Clients, *given: Any, **asked: Any) -> list[Any]:
    """`call`, `events` or `streamed` of the sync and the async client at once."""
    return await asyncio.gather(*(ask(client, *given, **asked) for client in clients))
