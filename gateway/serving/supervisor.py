"""`tetrarch serve`: starts bus, engine and gateway, watches them, starts the dead again, stops them in order.

The children hold the read end of a pipe; when this process dies, however, they see its end and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.flow.directory import POLL_SECONDS, read_engine
from gateway.settings import SUPERVISOR_VARIABLE, GatewaySettings
from metrics.hosts import machine_name
from workers.messages import EngineInfo, engine_incarnation_key, engine_lease_key

from .children import Child, Command, describe_exit, unbreakable
from .paths import Home
from .process import UnfitGateway, check_exposure, listen, stop_signals, url_of
from .valkey import BusError, check_external, hold_lock, name_holder

LISTEN_VARIABLE = "TETRARCH_LISTEN_FD"
"""Number of the inherited listening socket: it outlives a gateway, so callers wait and are not refused."""

PORT_SECONDS = 3.0
"""A predecessor that was killed may hold the port for a moment."""

BUS_SECONDS = 30.0
STOP_SECONDS = {"gateway": 12.0, "engine": 12.0, "bus": 12.0}
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""After a child that ran this long, the pauses between its starts begin with the first again."""

LONG_VARIABLES = (
    "TETRARCH_ENGINE_ENGINE_ID",
    "TETRARCH_ENGINE_REDIS_URL",
    "TETRARCH_GATEWAY_HOME",
    "TETRARCH_GATEWAY_REDIS_URL",
)
"""Other names of what is passed to the children, which would win over it."""

USAGE_CODE = 2
"""A child's exit code for settings or a model that cannot be used: trying again is of no use."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve. `gateway_arguments` are the flags that were typed, `engine_arguments` the rest."""

    settings: GatewaySettings
    home: Home
    gateway_arguments: tuple[str, ...]
    engine_arguments: tuple[str, ...]
    settings_file: Path | None


async def serve(plan: Plan, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Serves until a signal; 0. 2: a part cannot start with these settings. 1: the supervisor itself broke.

    Raises BusError, HomeError or UnfitGateway.
    """
    plan.home.make()
    check_exposure(plan.settings, plan.home)
    lock = hold_lock(plan.home.lock, "tetrarch serve runs already:")
    listener = await _listen(plan.settings)
    name_holder(lock, f"process {os.getpid()}, {url_of(listener)}, home {plan.home.folder}")
    reader, writer = os.pipe()
    try:
        supervisor = Supervisor(plan, environ, say, listener, reader)
        return await supervisor.run()
    finally:
        listener.close()
        os.close(writer)
        os.close(reader)
        os.close(lock)


async def _listen(settings: GatewaySettings) -> socket.socket:
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return listen(settings.host, settings.port)
        except UnfitGateway:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


class Supervisor:
    """Three children and what happens when one ends."""

    def __init__(
        self,
        plan: Plan,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        listener: socket.socket,
        pipe: int,
    ) -> None:
        self._plan = plan
        self._say = unbreakable(say)
        self._url = url_of(listener)
        self._bus_url = plan.settings.redis_url or plan.home.bus_url
        self._engine_id = _engine_id(plan, environ)
        base = {
            **{name: value for name, value in environ.items() if name not in LONG_VARIABLES},
            SUPERVISOR_VARIABLE: str(pipe),
            LISTEN_VARIABLE: str(listener.fileno()),
            "TETRARCH_REDIS_URL": self._bus_url,
            "TETRARCH_HOME": str(plan.home.folder),
            "TETRARCH_ENGINE_ID": self._engine_id,
            "PYTHONUNBUFFERED": "1",
        }
        python = (sys.executable, "-m")
        bus = (*python, "gateway", "bus-guard", *plan.gateway_arguments)
        self._bus = self._child("bus", bus, base, (pipe,))
        engine = (*python, "workers", "engine", *plan.engine_arguments)
        bus_bytes = 0 if plan.settings.redis_url else plan.settings.bus_memory_bytes
        counted = {"TETRARCH_ENGINE_BUS_BYTES": str(bus_bytes)}  # for the engine's account of memory
        self._engine = self._child("engine", engine, base | counted, (pipe,))
        gateway = (*python, "gateway", "gateway", *plan.gateway_arguments)
        self._gateway = self._child("gateway", gateway, base, (pipe, listener.fileno()))
        self._gateway.is_talkative = self._bus.is_talkative = False
        self._stopping = asyncio.Event()
        self._is_ready = False
        self._last_incarnation = 0  # of our engine, before we started it
        self._code = 0
        self._keepers: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Starts, watches, stops."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal)
        try:
            if await self._start_bus():
                key = engine_incarnation_key(self._engine_id)
                self._last_incarnation = int(await self._on_bus(lambda client: client.get(key)) or 0)
                self._keep(self._engine)
                self._keep(self._gateway)
                await self._tell_progress()
                await self._stopping.wait()
        finally:
            await self._stop()
        return self._code

    def _child(
        self, name: str, arguments: Sequence[str], environ: Mapping[str, str], descriptors: tuple[int, ...]
    ) -> Child:
        log_file = self._plan.home.logs_folder / f"{name}.log"
        return Child(Command(name, arguments, environ, descriptors, log_file), self._say)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            for child in (self._gateway, self._engine):  # asked twice: no more patience
                child.kill()
        self._stopping.set()

    async def _start_bus(self) -> bool:
        if self._plan.settings.redis_url is not None:
            for doubt in await asyncio.to_thread(check_external, self._bus_url):
                self._say(f"bus: {doubt}")
            return True
        keeper = self._keep(self._bus)
        deadline = time.monotonic() + BUS_SECONDS
        while not self._stopping.is_set() and not keeper.done():
            if await self._on_bus(lambda client: client.ping()):
                return True
            if time.monotonic() > deadline:
                raise BusError(f"the bus did not start; see {self._bus.command.log_file}")
            await asyncio.sleep(0.05)
        return False

    def _keep(self, child: Child) -> asyncio.Task[None]:
        task = asyncio.create_task(self._keep_running(child), name=child.command.name)
        task.add_done_callback(self._on_keeper_end)
        self._keepers.append(task)
        return task

    async def _keep_running(self, child: Child) -> None:
        delay = FIRST_BACKOFF_SECONDS
        name = child.command.name
        while not self._stopping.is_set():
            started = time.monotonic()
            lease = await self._lease() if child is self._engine else None
            await child.start()
            code = await child.wait()
            if child is self._engine and code < 0:
                await self._forget_lease(unless=lease)
            if self._stopping.is_set():
                return
            if code == USAGE_CODE and not self._is_ready:
                self._fail(f"{name} cannot start; its words are above and in {child.command.log_file}", code)
                return
            if time.monotonic() - started > STEADY_SECONDS:
                delay = FIRST_BACKOFF_SECONDS
            self._say(f"{name} ended ({describe_exit(code)}); starting it again in {delay:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(2 * delay, MAX_BACKOFF_SECONDS)

    def _on_keeper_end(self, keeper: asyncio.Task[None]) -> None:
        """Nobody would start that child again: better to stop."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and not self._stopping.is_set():
            self._fail(f"{keeper.get_name()} is kept running no more ({error!r:.200}): stopping", 1)

    def _fail(self, words: str, code: int) -> None:
        self._say(words)
        self._code = code
        self._stopping.set()

    async def _lease(self) -> bytes | None:
        found: bytes | None = await self._on_bus(lambda client: client.get(engine_lease_key(self._engine_id)))
        return found

    async def _forget_lease(self, unless: bytes | None) -> None:
        """We saw it killed, so nobody need wait for its lease to run out.

        One that ends by itself gives it back. `unless`: what was there before, another machine's.
        """
        if await self._lease() != unless:
            await self._on_bus(lambda client: client.delete(engine_lease_key(self._engine_id)))

    async def _on_bus(self, command: Callable[[Redis], Any]) -> Any:
        client = Redis.from_url(self._bus_url, socket_timeout=2, socket_connect_timeout=2, protocol=2)
        try:
            async with asyncio.timeout(3):
                return await command(client)
        except (RedisError, OSError, TimeoutError):
            return None
        finally:
            await client.aclose()

    async def _tell_progress(self) -> None:
        """Says what is waited for until a call would be served."""
        self._say(f"starting {self._url}: loading the model")
        started, told = time.monotonic(), time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while not self._stopping.is_set():
                engine, status = await self._ready_engine(), await self._gateway_status(session)
                if engine is not None and status in (200, 401):
                    if status == 401:  # not loopback: it answers, and will have looked at the bus by then
                        await asyncio.sleep(2 * POLL_SECONDS)
                    self._is_ready, self._engine.is_talkative = True, False
                    self._tell_ready(engine, time.monotonic() - started, needs_token=status == 401)
                    return
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    self._say(f"still loading the model after {told - started:.0f} s")
                await asyncio.sleep(0.1)

    async def _ready_engine(self) -> EngineInfo | None:
        """Our own engine once it takes turns: a shared bus may know others, and those of earlier days."""
        found = await self._on_bus(lambda client: read_engine(client, self._engine_id))
        if found is None:
            return None
        info, stats, lease = found
        is_alive = lease == info.incarnation == stats.incarnation > self._last_incarnation
        return info if is_alive and stats.ready else None

    async def _gateway_status(self, session: aiohttp.ClientSession) -> int | None:
        try:
            async with session.get(f"{self._url}/ready") as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    def _tell_ready(self, engine: EngineInfo, seconds: float, *, needs_token: bool) -> None:
        token = "-H 'Authorization: Bearer TOKEN' " if needs_token else ""
        self._say(
            f"""\
ready after {seconds:.1f} s at {self._url}
  model    {engine.model_id}: {engine.num_workers} workers, context {engine.context_length} tokens
  try it   curl {self._url}/v1/chat/completions {token}-H 'Content-Type: application/json' \\
             -d '{{"messages": [{{"role": "user", "content": "Say hello."}}], "max_tokens": 40}}'
  metrics  {self._url}/metrics
  logs     {self._plan.home.logs_folder}
Ctrl-C stops it."""
        )

    async def _stop(self) -> None:
        self._stopping.set()
        for child in (self._gateway, self._engine, self._bus):
            name = child.command.name
            if not await child.stop(STOP_SECONDS[name]):
                self._say(f"{name} did not stop in {STOP_SECONDS[name]:.0f} s and was killed")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._say("stopped")


def _engine_id(plan: Plan, environ: Mapping[str, str]) -> str:
    """The name that the engine will have: we delete its lease when we see it killed."""
    arguments = plan.engine_arguments
    for index in reversed(range(len(arguments))):
        name, equals, value = arguments[index].partition("=")
        if name == "--engine-id":
            return value if equals else "".join(arguments[index + 1 : index + 2])
    for variable in ("TETRARCH_ENGINE_ENGINE_ID", "TETRARCH_ENGINE_ID"):
        if environ.get(variable):
            return environ[variable]
    if plan.settings_file is not None:
        with contextlib.suppress(OSError, ValueError):  # told by whoever loads it
            table = tomllib.loads(plan.settings_file.read_text(encoding="utf-8")).get("engine", {})
            if isinstance(table, dict) and table.get("engine_id"):
                return str(table["engine_id"])
    return machine_name()
