"""Requests to one server: each tried until it is answered, under one key so that nothing is done twice.

Owns connections and retries. Knows no run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec

from .errors import TetrarchError, Unreachable, refused
from .patience import Patience, Tries

ANSWER_SECONDS = 120.0
"""The longest that a request may take, its prompt's tokens counted and a place in line found."""
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""A stream that says nothing for so long, no keep-alive either, is dead."""

Answer = TypeVar("Answer")
Query = Mapping[str, str | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. It may be sent several times: `key` makes that safe where it is not so by nature."""

    method: str = "GET"
    path: str
    body: bytes | None = None
    query: Query = field(default_factory=dict)
    key: str | None = None  # the Idempotency-Key
    seconds: float = ANSWER_SECONDS


class Wire:
    """One server."""

    def __init__(self, base_url: str, token: str | None, patience: Patience) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is '{base_url}', but must begin with http:// or https://")
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Before any request."""
        # Streams of hundreds of runs are open at once.
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0), raise_for_status=False
        )

    async def close(self) -> None:
        """Ends all connections; what runs on the server goes on."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def tries(self) -> Tries:
        """Fresh ones."""
        return Tries(self._patience, time.monotonic, random.random)

    async def ask(self, ask: Ask, kind: type[Answer]) -> Answer:
        """The answer. Raises Refused, or Unreachable when nobody answered for all the patience there is."""
        tries = self.tries()
        while True:
            try:
                return msgspec.json.decode(await self._once(ask), type=kind)
            except msgspec.MsgspecError as error:
                raise TetrarchError(
                    f"{self.base_url}{ask.path} did not answer as a Tetrarch server does: {error}.",
                    "Is the address right, and is the server of this client's version?",
                ) from None
            except TetrarchError as error:
                delay = tries.delay(error)
                if delay is None:
                    raise
            await asyncio.sleep(delay)

    @contextlib.asynccontextmanager
    async def listen(self, path: str, query: Query, after: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of an event stream behind an id; nothing where all was seen. Not tried again.

        Raises Refused or Unreachable, also from the bytes.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        with self._broken_is_unreachable():
            async with self._open_session.get(
                self.base_url + path,
                params=_params(query),
                headers={"Accept": "text/event-stream", "Last-Event-ID": after},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status not in (200, 204):
                    raise await _refused(response)
                yield self._chunks(response)

    async def _chunks(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        with self._broken_is_unreachable():
            async for chunk in response.content.iter_any():
                yield chunk

    async def _once(self, ask: Ask) -> bytes:
        headers = {} if ask.key is None else {"Idempotency-Key": ask.key}
        if ask.body is not None:
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=ask.seconds, sock_connect=CONNECT_SECONDS)
        with self._broken_is_unreachable():
            async with self._open_session.request(
                ask.method,
                self.base_url + ask.path,
                params=_params(ask.query),
                data=ask.body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if not 200 <= response.status < 300:
                    raise await _refused(response)
                return await response.read()

    @contextlib.contextmanager
    def _broken_is_unreachable(self) -> Any:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            raise Unreachable(self.base_url, str(cause) or type(cause).__name__) from error

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is not open: write `async with Client(...) as client:`")
        return self._session


def _params(query: Query) -> dict[str, str]:
    return {name: str(value) for name, value in query.items() if value is not None}


async def _refused(response: aiohttp.ClientResponse) -> TetrarchError:
    headers = response.headers
    return refused(
        response.status, await response.read(), headers.get("Retry-After"), headers.get("x-should-retry")
    )
