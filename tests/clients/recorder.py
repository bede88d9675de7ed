"""A proxy between a client and the server that keeps what each sent. It changes no byte and holds none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

HOP_HEADERS = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade"}
"""Of one connection, which is another one behind the proxy."""

LONGEST_SECONDS = 120


@dataclass(slots=True)
class Recorded:
    """One request, and its answer so far."""

    method: str
    path: str  # without the query
    query: str
    headers: dict[str, str]  # names in lower case
    body: Any  # decoded JSON; None where there is none
    num_bytes: int
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytearray = field(default_factory=bytearray)
    was_left: bool = False  # the client hung up before the end

    @property
    def run_id(self) -> str:
        """The server's name of the call; "" for what is no call."""
        return self.answer_headers.get("x-tetrarch-run", "")

    @property
    def tools(self) -> list[Any]:
        """As they are in the body."""
        tools: list[Any] = self.body.get("tools") or [] if isinstance(self.body, dict) else []
        return tools


@dataclass(slots=True)
class Recorder:
    """All requests in the order in which they came. `url` is what clients are given."""

    target: str
    url: str = ""
    requests: list[Recorded] = field(default_factory=list)

    def calls(self, path: str) -> list[Recorded]:
        """Those to one path."""
        return [recorded for recorded in self.requests if recorded.path == path]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Recorder]:
        """Listens on a free port."""
        timeout = aiohttp.ClientTimeout(total=LONGEST_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            app = web.Application(client_max_size=64 << 20)

            async def pass_on(request: web.Request) -> web.StreamResponse:
                return await self._pass_on(session, request)

            app.router.add_route("*", "/{path:.*}", pass_on)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            try:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, session: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        recorded = Recorded(
            request.method,
            request.path,
            request.query_string,
            {name.lower(): value for name, value in request.headers.items()},
            decoded(data),
            len(data),
        )
        self.requests.append(recorded)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        call = session.request(
            request.method,
            f"{self.target}{request.path_qs}",
            data=data,
            headers=headers,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            allow_redirects=False,
        )
        recorded.was_left = True
        async with call as answer:
            recorded.status = answer.status
            recorded.answer_headers = {name.lower(): value for name, value in answer.headers.items()}
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                recorded.answer += chunk
                await response.write(chunk)
            await response.write_eof()
        recorded.was_left = False
        return response


def decoded(data: bytes) -> Any:
    """JSON; None for anything else."""
    try:
        return json.loads(data)
    except ValueError:
        return None
