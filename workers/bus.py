"""The engine's side of the bus: one incarnation at a time, made of a lease, an inbox and an outbox.

Owns the connections and the order of start and stop. The engine thread calls it; it knows no model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from metrics.bus_rules import UnfitBus, check_url, doubts
from metrics.settings import mask

from .backlog import TurnKey
from .errors import BusError, SettingsError
from .inbox import BLOCK_SECONDS, Deliveries, Inbox
from .lease import Identity, Lease, next_incarnation, wait_until_free
from .messages import Cancel, EngineInfo, EngineStats, Failed, ToEngine, TokenizerBundle, inbox_key
from .outbox import Outbox
from .turn import TurnEvent

COMMAND_SECONDS = 2.0
FLUSH_SECONDS = 3.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Incarnation:
    number: int
    lease: Lease
    inbox: Inbox
    outbox: Outbox
    deliveries: Deliveries

    def wake(self) -> None:
        self.outbox.wake()
        self.deliveries.put(None)

    def abandon(self) -> None:
        self.inbox.close()
        self.outbox.abandon()
        self.lease.abandon()


class Bus:
    """Fills in `info`'s incarnation; calls `stats` with it once a second, from a thread of its own."""

    def __init__(
        self,
        url: str,
        info: EngineInfo,
        bundle: TokenizerBundle,
        stats: Callable[[int], EngineStats],
    ) -> None:
        self._url = url
        self._commands = connect(url, COMMAND_SECONDS)
        self._info = info
        self._bundle = bundle
        self._stats = stats
        self._stopping = threading.Event()
        self._broken = ""  # the thread that was the first to break
        self._current: _Incarnation | None = None
        self._previous_number = 0

    def begin(self) -> None:
        """Starts this process's first incarnation. Raises BusError: no bus, or the engine id is in use."""
        try:
            self._begin()
        except (RedisError, OSError) as error:
            raise _unusable(error) from error

    def begin_again(self) -> None:
        """After `is_lost`: forgets the old incarnation and starts another, as soon as the bus lets it.

        Returns early when stopping. Raises BusError when another process took over the engine id.
        """
        self._abandon()
        while not self._stopping.is_set():
            try:
                self._begin()
            except (RedisError, OSError) as error:
                log.warning("the bus does not answer yet", error=str(error))
                self._stopping.wait(0.5)
            else:
                return

    @property
    def is_lost(self) -> bool:
        """This incarnation is over for the gateways: drop its turns and begin again."""
        return self._current is not None and self._current.lease.is_lost

    def receive(self, seconds: float | None) -> list[ToEngine]:
        """All messages that are there; waits up to `seconds` (None: for ever) for the first, or a wake.

        Raises BusError when one of the bus's threads broke.
        """
        deliveries = self._living().deliveries
        messages = self._received(deliveries, seconds)
        if self._broken:
            raise BusError(f"the engine's {self._broken} thread broke; its log says why")
        return messages

    def _received(self, deliveries: Deliveries, seconds: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            first = deliveries.get(timeout=seconds) if seconds != 0 else deliveries.get_nowait()
            while True:
                if first is not None:
                    messages.append(first)
                first = deliveries.get_nowait()
        except queue.Empty:
            return messages

    def send(self, events: Iterable[TurnEvent]) -> None:
        """Hands events over; never waits for the bus."""
        outbox = self._living().outbox
        for told in events:
            outbox.post(TurnKey(told.run_id, told.attempt), told.event)

    def wait_for_room(self) -> None:
        """A step border's pause while too much is kept back for a lost bus."""
        outbox = self._living().outbox
        outbox.wait_for_room(lambda: self.is_lost or self._stopping.is_set() or bool(self._broken))

    def fail_open_turns(self, error: str, message: str) -> None:
        """Ends every turn that the engine will not end itself; each may be sent again."""
        outbox = self._living().outbox
        for key in outbox.open_turns():
            outbox.post(key, Failed(error=error, message=message, retryable=True))

    def stop(self) -> None:
        """From any thread: wakes whoever waits here; nothing waits any more."""
        self._stopping.set()
        if self._current is not None:
            self._current.wake()

    def close(self) -> None:
        """Writes what is left, gives the lease back, disconnects. Never raises for a lost bus."""
        current, self._current = self._current, None
        if current is not None:
            current.inbox.close()
            if not current.lease.is_lost and not current.outbox.close(FLUSH_SECONDS):
                log.warning("the last events could not be written")
            current.lease.close()
            current.abandon()
        self._commands.close()

    def _begin(self) -> None:
        engine_id = self._info.engine_id
        wait_until_free(self._commands, engine_id)
        number = next_incarnation(self._commands, engine_id, self._previous_number)
        self._previous_number = number
        self._commands.delete(inbox_key(engine_id))  # meant for incarnations that are gone
        info = msgspec.structs.replace(self._info, incarnation=number, created=int(time.time()))
        current = self._incarnation(info)
        current.lease.take()
        current.outbox.start()
        current.inbox.start()
        self._current = current
        log.info("on the bus", engine=engine_id, incarnation=number)

    def _incarnation(self, info: EngineInfo) -> _Incarnation:
        deliveries: Deliveries = queue.SimpleQueue()
        identity = Identity(info, self._bundle, lambda: self._stats(info.incarnation))

        def on_beat() -> None:
            outbox.wake()
            if lease.is_lost:
                deliveries.put(None)

        def on_refused(key: TurnKey) -> None:
            deliveries.put(Cancel(run_id=key.run_id, attempt=key.attempt))

        def on_broken(name: str) -> None:
            self._broken = self._broken or name
            outbox.wake()
            deliveries.put(None)

        lease = Lease(
            self._commands,
            identity,
            on_beat=on_beat,
            on_restart=lambda: outbox.replay(),
            on_broken=on_broken,
        )
        outbox = Outbox(
            self._commands,
            lambda on_connect: connect(self._url, COMMAND_SECONDS, on_connect=on_connect),
            info.engine_id,
            may_write=lease.is_fresh,
            on_refused=on_refused,
            on_broken=on_broken,
        )
        reads = connect(self._url, BLOCK_SECONDS + COMMAND_SECONDS)
        inbox = Inbox(reads, info, outbox, deliveries, on_broken=on_broken)
        return _Incarnation(info.incarnation, lease, inbox, outbox, deliveries)

    def _living(self) -> _Incarnation:
        if self._current is None:
            raise BusError("the bus was used before begin() or after close()")
        return self._current

    def _abandon(self) -> None:
        if self._current is not None:
            self._current.abandon()


def check_bus(url: str) -> list[str]:
    """What is doubtful about the bus, a line each. Raises BusError when nothing answers there, SettingsError
    when it may not be used.
    """
    try:
        check_url(url)
        with connect(url, COMMAND_SECONDS) as client:
            server = dict(client.info("server"))
            policy, appendonly = (_setting(client, name) for name in ("maxmemory-policy", "appendonly"))
        return doubts(str(server.get("redis_version", "0")), policy, appendonly)
    except (RedisError, OSError) as error:
        raise _unusable(error) from error
    except UnfitBus as error:
        raise SettingsError(str(error)) from error


def _setting(client: Redis, name: str) -> str | None:
    try:
        found = dict(client.config_get(name))
    except ResponseError:
        return None  # managed servers hide CONFIG
    return found.get(name)


def _unusable(error: Exception) -> BusError:
    return BusError(f"the bus cannot be used: {error}; is it running, and is its URL right?")


def connect(url: str, timeout_seconds: float, *, on_connect: Callable[[], None] | None = None) -> Redis:
    """A client that never retries: who sends knows what may be sent twice.

    `on_connect` is called at each connection before it is used; a RedisError from there closes it again.
    """
    options: dict[str, Any] = {} if url.startswith("unix:") else {"socket_keepalive": True}
    if on_connect is not None:
        hear = on_connect

        def greet(connection: Connection) -> None:
            connection.on_connect()  # type: ignore[no-untyped-call]
            hear()

        options["redis_connect_func"] = greet
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=COMMAND_SECONDS,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **options,
        )
    except ValueError as error:
        raise BusError(f"the bus's URL {mask(url)} is not usable: {error}") from error
