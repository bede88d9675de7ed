"""The gateway process: puts the room's parts together, serves until told to stop, and stops in order.

Owns the order of start and stop. Knows no endpoint and no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import uuid
from pathlib import Path

import msgspec
import structlog
from aiohttp import web

from gateway.bus import Bus, BusLost
from gateway.callers.tokens import TokenStore
from gateway.derail.watching import Watching
from gateway.flow.directory import Directory
from gateway.flow.places import Places
from gateway.http.app import Parts, build_app
from gateway.http.metrics_page import turn_observer
from gateway.runs.caretaker import Caretaker
from gateway.runs.runs import Runs
from gateway.settings import GatewaySettings
from gateway.store.store import store_in
from metrics.hosts import LOOPBACK_HOSTS
from metrics.instruments import Instruments

from .paths import Home
from .valkey import BusError, check_external, check_location

BUS_SECONDS = 20.0
"""How long a starting gateway waits for its bus: as long as one may take to read its data."""

GRACE_SECONDS = 5.0
"""How long open answers may go on after a stop was asked for."""

log = structlog.get_logger(__name__)


class UnfitGateway(Exception):
    """Settings that must not or cannot be served. The text is one line with the remedy."""


def tokens_file(settings: GatewaySettings, home: Home) -> Path:
    """Where access tokens are kept."""
    return settings.tokens_file or home.tokens_file


def check_exposure(settings: GatewaySettings, home: Home) -> None:
    """Refuses an address that others can reach while no token exists. Raises UnfitGateway."""
    if settings.host in LOOPBACK_HOSTS or TokenStore(tokens_file(settings, home)).tokens():
        return
    raise UnfitGateway(
        f"host {settings.host} can be reached from other machines and there is no access token: "
        f"make one with `tetrarch token add NAME`, or listen on 127.0.0.1"
    )


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises UnfitGateway: the port is taken, or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UnfitGateway(f"host {host} is no address: {error.strerror}; use --host 127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise UnfitGateway(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port, "
            f"or --port 0 for any free one"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The address as a client on this machine writes it."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def stop_signals() -> list[signal.Signals]:
    """What asks for a stop; a hang-up only where it is not ignored already (nohup)."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def in_force(settings: GatewaySettings, home: Home, bus_url: str, listener: socket.socket) -> GatewaySettings:
    """The settings with what was chosen for those left out, as /health reports them."""
    return msgspec.structs.replace(
        settings,
        port=listener.getsockname()[1],
        tokens_file=tokens_file(settings, home),
        redis_url=bus_url,
        home=home.folder,
    )


def kept_bytes(settings: GatewaySettings) -> int:
    """What may be kept of runs: at most half of a bus of our own."""
    if settings.redis_url is not None:
        return settings.kept_bytes
    return min(settings.kept_bytes, settings.bus_memory_bytes // 2)


async def run_gateway(
    settings: GatewaySettings, home: Home, bus_url: str, listener: socket.socket, supervisor: int | None
) -> int:
    """Serves until a signal, or until the supervisor is gone; then 0. 1 when there is no bus.

    Raises BusError when the bus may not be used.
    """
    check_location(bus_url)
    stopping = _stop_event(supervisor)
    bus = Bus(bus_url, f"g-{uuid.uuid4().hex[:12]}")
    if not await _connect(bus, stopping):
        return 1
    if supervisor is None:  # else `serve` has looked
        await _check_server(bus, bus_url)
    parts = _parts_of(settings, home, bus)
    directory, runs = parts.directory, parts.runs
    caretaker = Caretaker(bus, directory, runs)
    app = build_app(in_force(settings, home, bus_url, listener), parts)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await directory.start()
    await caretaker.start()
    await runner.setup()
    site = web.SockSite(runner, listener)
    await site.start()
    gc.freeze()  # what is there by now stays: looking through it again and again would hold calls for 0.1 s
    log.info("listening", url=url_of(listener))
    await stopping.wait()
    log.info("stopping", num_live=runs.num_live)
    await site.stop()
    await runs.stop(GRACE_SECONDS)
    await runner.cleanup()
    await caretaker.stop()
    await directory.stop()
    await bus.stop()
    return 0


def _parts_of(settings: GatewaySettings, home: Home, bus: Bus) -> Parts:
    directory = Directory(bus)
    instruments = Instruments()
    store = store_in(bus, kept_bytes(settings), instruments.store.evicted)
    places = Places(directory, settings.max_waiting, classes=settings.classes, watch=instruments.flow)
    runs = Runs(bus, directory, places=places, store=store)
    runs.on_turn_end.append(turn_observer(instruments))
    Watching(settings.derail, runs, directory, instruments.derail).begin()
    return Parts(
        runs,
        directory,
        TokenStore(tokens_file(settings, home)),
        instruments=instruments,
        store=store,
        is_bus_up=lambda: bus.available,
    )


async def _connect(bus: Bus, stopping: asyncio.Event) -> bool:
    deadline = asyncio.get_running_loop().time() + BUS_SECONDS
    while not stopping.is_set():
        try:
            await bus.start()
            return True
        except BusLost:
            if asyncio.get_running_loop().time() > deadline:
                log.error("no_bus", remedy="start it, or correct TETRARCH_REDIS_URL")
                break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), 0.2)
    return False


async def _check_server(bus: Bus, bus_url: str) -> None:
    try:
        for doubt in await asyncio.to_thread(check_external, bus_url):
            log.warning("doubtful_bus", problem=doubt)
    except BusError:
        await bus.stop()
        raise


def _stop_event(supervisor: int | None) -> asyncio.Event:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in stop_signals():
        loop.add_signal_handler(number, stopping.set)
    if supervisor is not None:

        def on_readable() -> None:
            if not os.read(supervisor, 1):  # nobody ever writes: this is its end
                loop.remove_reader(supervisor)
                stopping.set()

        loop.add_reader(supervisor, on_readable)
    return stopping
