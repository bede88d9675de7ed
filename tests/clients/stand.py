"""What a client talks to: a real bus, gateway and engine process (its model is a script), and a recorder.

Knows no client.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gateway.serving.supervisor import LISTEN_VARIABLE
from gateway.settings import SUPERVISOR_VARIABLE
from tests.conftest import ValkeyServer
from workers.messages import EVENT_FIELD, Event, Finished, Usage, decode_event, run_events_key

from .recorder import Recorded, Recorder

ROOT = Path(__file__).parents[2]
READY_SECONDS = 30.0
KEEPALIVE_SECONDS = 1


@dataclass(slots=True)
class Stand:
    """One server and what was sent to it."""

    url: str
    recorder: Recorder
    bus: ValkeyServer

    def events(self, run_id: str) -> list[Event]:
        """A run's events on the bus."""
        with self.bus.client() as client:
            entries: Any = client.xrange(run_events_key(run_id))
        return [decode_event(fields[EVENT_FIELD]) for _, fields in entries]

    def usage(self, recorded: Recorded) -> Usage:
        """The engine's own count for a call that finished."""
        found = [event for event in self.events(recorded.run_id) if isinstance(event, Finished)]
        assert found, (recorded.path, recorded.status, bytes(recorded.answer[-500:]))
        return found[-1].usage

    async def agents(self) -> Counter[tuple[str, str, str]]:
        """Session, agent and parent of all calls, as the server tells them, and how many each made."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/v1/runs") as response:
            assert response.status == 200, await response.text()
            runs = (await response.json())["data"]
        return Counter((run["session"], run["agent"], run["parent"]) for run in runs)


@asynccontextmanager
async def standing(bus: ValkeyServer, folder: Path, prefill_rate: float) -> AsyncIterator[Stand]:
    """A server whose model prefills so many tokens a second."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    home = folder / "server"
    home.mkdir()
    shared = {"TETRARCH_REDIS_URL": bus.url, "TETRARCH_HOME": str(home), "TETRARCH_ENGINE_ID": "scripted"}
    gateway = ["gateway", "gateway", f"--keepalive-seconds={KEEPALIVE_SECONDS}"]
    engine = ["tests.clients.scripted_engine", str(prefill_rate)]
    fd = listener.fileno()
    with (
        listener,
        _process(engine, shared, home / "engine.log"),
        _process(gateway, shared | {LISTEN_VARIABLE: str(fd)}, home / "gateway.log", fd),
    ):
        await _until_ready(url, home)
        async with Recorder(url).running() as recorder:
            yield Stand(url, recorder, bus)


@contextmanager
def _process(module: list[str], variables: dict[str, str], log: Path, *descriptors: int) -> Iterator[None]:
    """Ends with the test process, however that ends."""
    reader, writer = os.pipe()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TETRARCH_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            cwd=ROOT,
            env=environ | variables | {SUPERVISOR_VARIABLE: str(reader)},
            pass_fds=[reader, *descriptors],
            stdout=output,
            stderr=output,
        )
    os.close(reader)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(writer)


async def _until_ready(url: str, home: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            assert time.monotonic() < deadline, _words(home)
            await asyncio.sleep(0.1)


def _words(home: Path) -> list[str]:
    """The end of what the processes printed."""
    return [f"{log.name}: {log.read_text()[-2000:]}" for log in home.glob("*.log")]
