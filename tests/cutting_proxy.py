"""A connection to a server that breaks at the worst moment: just when a given command was sent."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path


class CuttingProxy:
    """A unix socket in front of another one."""

    def __init__(self, target: Path) -> None:
        self.socket = target.with_name("proxy.sock")
        self.url = f"unix://{self.socket}"
        self.num_cuts = 0
        self._target = str(target)
        self._word: bytes | None = None
        self._after = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen()
        self._ends: list[socket.socket] = []

    def cut_at(self, word: bytes, *, after: bool = False) -> None:
        """The next request that holds `word` breaks its connection, before the server sees it or `after`."""
        self._word, self._after = word, after

    def serve(self) -> None:
        """Until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                self._ends += [client, server]
                threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.socket.unlink()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, server:  # closed under our feet
            server.connect(self._target)
            while True:
                for end in select.select([client, server], [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    if end is client and self._word is not None and self._word in data:
                        self._word = None
                        if self._after:
                            server.sendall(data)
                            server.recv(1 << 16)
                        self.num_cuts += 1
                        return
                    (server if end is client else client).sendall(data)


@contextlib.contextmanager
def cutting_proxy(target: Path) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    thread = threading.Thread(target=proxy.serve, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()
