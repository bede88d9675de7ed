"""The proof that this incarnation of an engine is the living one, and its once-a-second report.

A plain thread, so that it beats while the engine thread is inside a long step. Knows nothing of turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError

from .errors import EngineIdInUse
from .messages import (
    ENGINES_KEY,
    LEASE_SECONDS,
    EngineInfo,
    EngineStats,
    TokenizerBundle,
    encode,
    engine_incarnation_key,
    engine_key,
    engine_lease_key,
    tokenizer_key,
)
from .threads import watched_thread

BEAT_SECONDS = 1.0
SUSPENDED_SECONDS = LEASE_SECONDS + 5.0
"""A longer gap between two beats than a beat and its commands' timeouts explain: the machine slept."""

TOKENIZER_SECONDS = 24 * 3600
"""A tokenizer that no living engine uses leaves the bus after this long."""

_LEASE_MILLISECONDS = int(LEASE_SECONDS * 1000)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What one incarnation shows of itself: once `info` and `bundle`, each second `stats`."""

    info: EngineInfo
    bundle: TokenizerBundle
    stats: Callable[[], EngineStats]

    @property
    def engine_id(self) -> str:
        """Part of every key."""
        return self.info.engine_id

    @property
    def incarnation(self) -> int:
        """The lease's value."""
        return self.info.incarnation


def wait_until_free(client: Redis, engine_id: str) -> None:
    """Lets a dead predecessor's lease run out. Raises EngineIdInUse when a living one keeps renewing it."""
    left = before = int(client.pttl(engine_lease_key(engine_id)))
    while left > 0:
        if left > before:
            raise _in_use(engine_id)
        time.sleep(0.1)
        left, before = int(client.pttl(engine_lease_key(engine_id))), left


def next_incarnation(client: Redis, engine_id: str, previous: int) -> int:
    """A number that this engine never had, even when the bus came back empty."""
    key = engine_incarnation_key(engine_id)
    number = int(client.incr(key))
    return number if number > previous else int(client.incrby(key, previous + 1 - number))


class Lease:
    """Taken once, then renewed until it is lost or given back. `on_beat` is called after each renewal.

    `on_restart` hears that the bus's server is another process than before, which may have forgotten the
    last seconds; `on_broken`, that the thread ended by an error of its own.
    """

    def __init__(
        self,
        client: Redis,
        identity: Identity,
        *,
        on_beat: Callable[[], None],
        on_restart: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._client = client
        self._identity = identity
        self._on_beat = on_beat
        self._on_restart = on_restart
        self._key = engine_lease_key(identity.engine_id)
        self._value = str(identity.incarnation).encode()
        self._renewed = _Instant.now()
        self._bus_failed = False
        self._server = ""  # the run id of its process
        self._has_restarted = False  # and nobody was told yet
        self._closed = threading.Event()
        self._thread = watched_thread("lease", self._run, on_broken)
        self.is_lost = False

    def take(self) -> None:
        """Publishes the identity, takes the lease and renews it from now on. Raises EngineIdInUse."""
        self._server = self._server_now()
        if not self._taken():
            raise _in_use(self._identity.engine_id)
        self._thread.start()

    def is_fresh(self) -> bool:
        """The lease cannot have expired yet: events may be written."""
        return not self.is_lost and self._renewed.age() < LEASE_SECONDS

    def close(self) -> None:
        """Stops renewing and, if it is ours, gives the lease back. Never raises."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=3.0)
        if not self.is_lost:
            try:
                self._report()
                self._change_ours(lambda pipeline: pipeline.delete(self._key))
            except (RedisError, OSError):
                log.warning("the lease could not be given back; it expires by itself")
            except Exception:  # a broken report must not hide why the engine ends
                log.exception("the lease could not be given back; it expires by itself")

    def abandon(self) -> None:
        """Stops renewing without a word to the bus."""
        self._closed.set()

    def _run(self) -> None:
        last = _Instant.now()
        while not self._closed.wait(0.2 if self._bus_failed else BEAT_SECONDS):
            suspended = last.age() > SUSPENDED_SECONDS
            last = _Instant.now()
            try:
                self._look_for_restart()
                self._beat(suspended=suspended)
            except (RedisError, OSError) as error:
                if not self._bus_failed:
                    log.warning("the bus does not answer; events are kept back", error=str(error))
                self._bus_failed = True
                continue
            if self._has_restarted and not self.is_lost:
                self._on_restart()
            self._has_restarted = False
            self._on_beat()
            if self.is_lost:
                return

    def _look_for_restart(self) -> None:
        """A restart between two beats breaks no command: a client connects again without a word."""
        server = self._server_now()
        if server != self._server:
            log.warning("the bus has restarted")
            self._server = server
            self._bus_failed = self._has_restarted = True

    def _server_now(self) -> str:
        return str(dict(self._client.info("server")).get("run_id", ""))

    def _beat(self, *, suspended: bool) -> None:
        started = _Instant.now()
        if self._change_ours(lambda pipeline: pipeline.pexpire(self._key, _LEASE_MILLISECONDS)):
            self._renewed = started
            self._report()
            if self._bus_failed:
                self._publish()  # the bus may have forgotten its last seconds
                log.info("the bus answers again")
        elif suspended or not self._bus_failed or not self._is_newest() or not self._taken():
            self.is_lost = True
            log.warning("lease lost", incarnation=self._identity.incarnation, suspended=suspended)
        else:
            log.info("the bus answers again; the lease had run out and was taken again")
        self._bus_failed = False

    def _change_ours(self, change: Callable[[Pipeline], object]) -> bool:
        """Changes the lease in one transaction with the check that it is ours; False: it is not.

        Raises RedisError when that is not known. WatchError is one: redis-py raises it when the lease
        changed, and likewise when the connection failed while it watched. The next beat sees which it was.
        """
        with self._client.pipeline() as pipeline:
            pipeline.watch(self._key)  # type: ignore[no-untyped-call]
            if pipeline.get(self._key) != self._value:
                return False
            pipeline.multi()
            change(pipeline)
            return bool(pipeline.execute()[0])  # 0: it expired in between

    def _taken(self) -> bool:
        """Takes a free lease. Everything that a gateway reads of us is there before it."""
        if self._client.exists(self._key):
            return False
        self._publish()
        started = _Instant.now()
        if not self._client.set(self._key, self._value, nx=True, px=_LEASE_MILLISECONDS):
            return False
        self._renewed = started
        return True

    def _is_newest(self) -> bool:
        return bool(self._client.get(engine_incarnation_key(self._identity.engine_id)) == self._value)

    def _publish(self) -> None:
        info = self._identity.info
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.set(tokenizer_key(info.digest), encode(self._identity.bundle), ex=TOKENIZER_SECONDS)
            pipeline.hset(
                engine_key(info.engine_id),
                mapping={"info": encode(info), "stats": encode(self._identity.stats())},
            )
            pipeline.sadd(ENGINES_KEY, info.engine_id)
            pipeline.execute()

    def _report(self) -> None:
        info = self._identity.info
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.hset(engine_key(info.engine_id), "stats", encode(self._identity.stats()))
            pipeline.sadd(ENGINES_KEY, info.engine_id)  # a gateway drops those that were away for a day
            pipeline.expire(tokenizer_key(info.digest), TOKENIZER_SECONDS)
            pipeline.execute()


def _in_use(engine_id: str) -> EngineIdInUse:
    return EngineIdInUse(
        f"engine id {engine_id!r} is in use on this bus by another process: "
        "stop that one, or choose another name with --engine-id"
    )


@dataclass(frozen=True, slots=True)
class _Instant:
    """A moment on two clocks: a sleeping machine stops the monotonic one on some systems."""

    monotonic: float
    wall: float

    @classmethod
    def now(cls) -> _Instant:
        return cls(time.monotonic(), time.time())

    def age(self) -> float:
        """Seconds since then, on the clock that moved more."""
        return max(time.monotonic() - self.monotonic, time.time() - self.wall)
