"""A way to a server that breaks: connections end in the middle of what they carry, as told or by chance."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

SHARE_OF_CUTS = 0.8


class FlakyProxy:
    """Cuts connections after a random number of bytes of the one or the other direction.

    `seed`: of the chance, so that a failure can be had again; None: it cuts nothing by itself.
    """

    def __init__(self, target: str, seed: int | None = None) -> None:
        parts = urlsplit(target)
        assert parts.hostname and parts.port
        self.url = ""
        self.num_cuts = 0
        self.num_connections = 0
        self.is_down = False
        self.num_answers_to_swallow = 0  # the server has done what was asked, nobody hears of it
        self.target = (parts.hostname, parts.port)
        self._random = random.Random(seed)
        self._cuts_by_itself = seed is not None
        self._open: set[asyncio.StreamWriter] = set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.num_connections += 1
        ends = {writer}
        self._open.add(writer)
        try:
            if self.is_down:
                return
            server_reader, server_writer = await asyncio.open_connection(*self.target)
            ends.add(server_writer)
            self._open.add(server_writer)
            limits = self._limits()
            both = [
                asyncio.create_task(self._pump(reader, server_writer, limits[0])),
                asyncio.create_task(self._pump(server_reader, writer, limits[1])),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for pump in both:
                pump.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        finally:
            for end in ends:
                self._open.discard(end)
                end.transport.abort()

    def cut_all(self) -> None:
        """Ends all connections that there are."""
        for end in list(self._open):
            self.num_cuts += 1
            end.transport.abort()

    def _limits(self) -> tuple[int | None, int | None]:
        if not self._cuts_by_itself or self._random.random() > SHARE_OF_CUTS:
            return None, None
        if self._random.random() < 0.3:
            return self._random.randrange(1, 600), None
        return None, self._random.randrange(1, 2500)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None
    ) -> None:
        num_left = limit
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if self.num_answers_to_swallow and data.startswith(b"HTTP/1.1 "):
                    self.num_answers_to_swallow -= 1
                    self.num_cuts += 1
                    return
                if num_left is not None and len(data) >= num_left:
                    writer.write(data[:num_left])
                    await writer.drain()
                    self.num_cuts += 1
                    return
                writer.write(data)
                await writer.drain()
                num_left = None if num_left is None else num_left - len(data)


@contextlib.asynccontextmanager
async def flaky_proxy(target: str, seed: int | None = None) -> AsyncIterator[FlakyProxy]:
    """In front of a server's URL."""
    proxy = FlakyProxy(target, seed)
    server = await asyncio.start_server(proxy.carry, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.url = f"http://{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut_all()
        await server.wait_closed()
