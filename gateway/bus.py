"""The gateway's side of the bus: commands with a deadline, idempotent appends, one reader for all followers.

Owns connections and stream positions. Knows entries, not what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError

from workers.messages import EVENT_FIELD, KEY_PREFIX, LEASE_SECONDS, RUN_END_ID, gateway_lease_key

from .errors import InvalidField, shorten
from .follower import QUEUE_ENTRIES as QUEUE_ENTRIES
from .follower import BusLost as BusLost
from .follower import Entry as Entry
from .follower import Follower as Follower
from .follower import StreamGone as StreamGone
from .following import Positions
from .runs.event_ids import id_pair
from .tasks import Tasks, repeat

COMMAND_SECONDS = 2.0
BLOCK_SECONDS = 5.0
PAGE_ENTRIES = 64
"""One XRANGE brings as many at most: taking them in holds the event loop for some milliseconds."""

WATCH_TRIES = 16
"""How often a watched write begins again: each time something else was added, or the connection failed."""

REFUSALS = ("equal or smaller", "exhausted the last possible ID")
"""How the store says that an id is not larger than the stream's last: the second when that is RUN_END_ID."""

LOST = (RedisConnectionError, RedisTimeoutError, OSError, TimeoutError, OutOfMemoryError, ReadOnlyError)
"""What makes a bus useless to us: it does not answer, or it takes nothing more."""

_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")

log = structlog.get_logger(__name__)


class Bus:
    """All of one gateway's traffic with the bus. `available` follows what the last look at it showed."""

    def __init__(self, url: str, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.commands = _client(url, COMMAND_SECONDS)
        self._reader = _client(url, None)
        self._wake_key = f"{KEY_PREFIX}gateway:{gateway_id}:wake"
        self._followers: dict[str, list[Follower]] = {}
        self._positions = Positions(QUEUE_ENTRIES, BLOCK_SECONDS)
        self._positions.set(self._wake_key, "0-0")
        self._wake_needed = asyncio.Event()
        self._reader_works = asyncio.Event()
        self._commands_work = False
        self._returned = asyncio.Event()
        self._tasks = Tasks()

    @property
    def available(self) -> bool:
        """Whether the bus answers; while False new calls are refused and open ones wait."""
        return self._commands_work and self._reader_works.is_set()

    @property
    def num_followers(self) -> int:
        """Readers of streams that have not been closed."""
        return sum(map(len, self._followers.values()))

    async def start(self) -> None:
        """Connects and takes the gateway's lease. Raises BusLost."""
        await self._renew_lease()
        for step, seconds in ((self._read, 0.0), (self._wake, 0.0), (self._renew, LEASE_SECONDS / 3)):
            self._tasks.spawn(repeat(step, seconds=seconds, where=f"bus.{step.__name__}"))
        await self._reader_works.wait()

    async def stop(self) -> None:
        """Gives the lease back and disconnects."""
        await self._tasks.end()
        with contextlib.suppress(BusLost):
            await self.answered(self.commands.delete(gateway_lease_key(self.gateway_id), self._wake_key))
        await self.commands.aclose()
        await self._reader.aclose()

    async def wait_available(self) -> None:
        """Returns when the bus answers (again)."""
        while not self.available:
            self._returned.clear()
            await self._returned.wait()

    # Commands. All raise BusLost when the bus does not answer in time; none is repeated unless it says so.

    async def answered(self, command: Any) -> Any:
        """The answer of one redis command, its connection errors turned into BusLost."""
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task is not None else 0
        try:
            answer = await command
        except LOST as error:
            self._note_commands(works=False)
            raise BusLost from error
        except ResponseError as error:
            if "MISCONF" not in str(error):  # its disk is full: it takes nothing until that is over
                raise
            self._note_commands(works=False)
            raise BusLost from error
        if task is not None and task.cancelling() > num_cancels:
            raise asyncio.CancelledError  # Python 3.11's wait_for, which redis sends by, lost it
        return answer

    async def execute(self, pipeline: Pipeline) -> list[Any]:
        """The answers of a pipeline, in order."""
        answers: list[Any] = await self.answered(pipeline.execute())
        return answers

    async def get(self, key: str) -> bytes | None:
        """A string's value."""
        value: bytes | None = await self.answered(self.commands.get(key))
        return value

    async def hold(self, key: str, seconds: float) -> bool:
        """Writes this gateway's id under a key for so long; False while another gateway's stands there."""
        pipeline = self.commands.pipeline(transaction=True)
        pipeline.set(key, self.gateway_id, nx=True, px=int(seconds * 1000))
        pipeline.get(key)
        _, holder = await self.execute(pipeline)
        if holder != self.gateway_id.encode():
            return False
        await self.answered(self.commands.pexpire(key, int(seconds * 1000)))
        return True

    async def read(self, key: str, after: str, count: int | None = None) -> list[Entry]:
        """Entries of a stream after an id, so many at most; none when it does not exist."""
        entries: list[Entry] = []
        async for page in self.pages(key, after, count):
            entries += page
        return entries

    async def pages(
        self, key: str, after: str, count: int | None = None
    ) -> AsyncGenerator[list[Entry], None]:
        """The same, some at a time: who makes something of them does not hold up all others."""
        left = sys.maxsize if count is None else count
        while left > 0 and after != RUN_END_ID:  # behind the largest id there is the store does not look
            most = min(left, PAGE_ENTRIES)
            found = await self.answered(self.commands.xrange(key, min=f"({after}", count=most))
            if found:
                page = _entries(found)
                left, after = left - len(page), page[-1].id
                yield page
            if len(found) < most:
                return

    async def firsts(self, keys: Sequence[str]) -> dict[str, list[Entry]]:
        """The first entry of each stream that has one."""
        pipeline = self.commands.pipeline(transaction=False)
        for key in keys:
            pipeline.xrange(key, count=1)
        found = await self.execute(pipeline) if keys else []
        return {key: _entries(entries) for key, entries in zip(keys, found, strict=True) if entries}

    async def append(self, key: str, entry_id: str, message: bytes, *, create: bool = False) -> bool:
        """Writes an entry under an explicit id; repeated on a lost connection, which the id makes harmless.

        True when the stream holds this very entry now; False when the store refused the id, or the stream
        is not there and `create` is False.
        """
        for attempt in range(3):
            try:
                return await self._append_once(key, entry_id, message, create=create)
            except BusLost:
                if attempt == 2:
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError

    async def _append_once(self, key: str, entry_id: str, message: bytes, *, create: bool) -> bool:
        fields: dict[Any, Any] = {EVENT_FIELD: message}
        command = self.commands.xadd(key, fields, id=entry_id, nomkstream=not create)
        try:
            return await self.answered(command) is not None
        except ResponseError as error:
            if not any(words in str(error) for words in REFUSALS):
                raise
        found = await self.answered(self.commands.xrange(key, min=entry_id, max=entry_id))
        return [entry.message for entry in _entries(found)] == [message]

    async def append_watched(
        self,
        key: str,
        after: str,
        decide: Callable[[list[Entry]], Entry | None],
        *,
        quiet: tuple[str, str] | None = None,
    ) -> bool:
        """Writes what `decide` makes of the entries after an id, only if nothing was added meanwhile.

        `decide` is called again for what was. `quiet`: another stream and an id behind which it must hold
        nothing. False when it does, or when `decide` decided for None. Raises BusLost.
        """
        choice: Entry | None = None
        keys = [key] if quiet is None else [key, quiet[0]]
        async with self.commands.pipeline(transaction=True) as pipeline:
            for _ in range(WATCH_TRIES):
                try:
                    await self.answered(pipeline.watch(*keys))
                    if quiet is not None and await self.answered(
                        pipeline.xrange(quiet[0], min=f"({quiet[1]}", count=1)
                    ):
                        return False
                    entries = _entries(await self.answered(pipeline.xrange(key, min=f"({after}")))
                    if choice is not None and choice in entries:
                        return True  # written, but the answer was lost
                    choice = decide(entries)
                    if choice is None:
                        return False
                    pipeline.multi()  # type: ignore[no-untyped-call]
                    pipeline.xadd(key, {EVENT_FIELD: choice.message}, id=choice.id, nomkstream=True)
                    return (await self.execute(pipeline))[0] is not None
                except WatchError:
                    # Something was added; or the connection failed while it watched, which redis-py tells
                    # in the same way: then the next watch raises BusLost unless the bus is back.
                    continue
        raise BusLost

    async def send(self, inbox: str, message: bytes) -> None:
        """Adds to an engine's inbox, once: after BusLost it may or may not be there."""
        await self.answered(self.commands.xadd(inbox, {EVENT_FIELD: message}))

    # Following.

    def follow(self, key: str, after: str) -> Follower:
        """A follower of a stream's entries after an id. The stream should exist. Raises InvalidField for what
        is no id: in the one command that reads all streams the store would refuse them all.
        """
        after = _checked(after)
        follower = Follower(self, key, after)
        if key not in self._followers:
            follower.behind = False  # the shared reader begins just where this follower does
            self._followers[key] = []
            self._positions.set(key, after)
            self._wake_needed.set()
        self._followers[key].append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """See Follower.close."""
        followers = self._followers.get(follower.key, [])
        if follower in followers:
            followers.remove(follower)
        if not followers and follower.key in self._followers:
            del self._followers[follower.key]
            self._positions.remove(follower.key)

    async def _read(self) -> None:
        try:
            if not self._reader_works.is_set():
                await self._look_for_gone_streams()
                self._reader_works.set()
                self._returned.set()
            await self._read_once()
        except (*LOST, RedisError) as error:
            if self._reader_works.is_set():
                log.warning("bus_lost", error=str(error))
            self._reader_works.clear()
            await self._reader.connection_pool.disconnect()
            await asyncio.sleep(0.2)

    async def _read_once(self) -> None:
        asked = dict(self._positions)
        for raw_key, found in await self._answer_of(self._positions.command()):
            key = raw_key.decode()
            if self._positions.get(key) == asked[key]:  # it is still followed, and from where it was
                entries = [Entry(entry_id.decode(), _message(fields)) for entry_id, fields in found]
                self._positions.set(key, entries[-1].id)
                for follower in self._followers.get(key, ()):
                    follower.push(entries)

    async def _answer_of(self, command: bytes) -> Any:
        """What the reader's connection is answered, as the protocol has it."""
        pool = self._reader.connection_pool
        async with asyncio.timeout(BLOCK_SECONDS + COMMAND_SECONDS):
            connection = await pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.send_packed_command(command)
                return await connection.read_response() or []
            finally:
                await pool.release(connection)

    async def _look_for_gone_streams(self) -> None:
        keys = list(self._followers)
        pipeline = self._reader.pipeline(transaction=False)
        pipeline.ping()
        for key in keys:
            pipeline.exists(key)
        async with asyncio.timeout(COMMAND_SECONDS):
            _, *found = await pipeline.execute()
        for key, exists in zip(keys, found, strict=True):
            for follower in [] if exists else self._followers.get(key, []):
                follower.tell_gone()

    async def _wake(self) -> None:
        """Makes the blocked XREAD return when its list of streams has grown."""
        await self._wake_needed.wait()
        self._wake_needed.clear()
        with contextlib.suppress(BusLost):  # then the reader starts afresh anyway
            await self.answered(self.commands.xadd(self._wake_key, {b"w": b""}, maxlen=1, approximate=False))

    async def _renew(self) -> None:
        with contextlib.suppress(BusLost):
            await self._renew_lease()

    async def _renew_lease(self) -> None:
        pipeline = self.commands.pipeline(transaction=False)
        pipeline.set(gateway_lease_key(self.gateway_id), b"1", px=int(LEASE_SECONDS * 1000))
        pipeline.expire(self._wake_key, 60)
        await self.execute(pipeline)
        self._note_commands(works=True)

    def _note_commands(self, *, works: bool) -> None:
        if works and not self._commands_work:
            self._returned.set()
        self._commands_work = works


def _checked(entry_id: str) -> str:
    if not _ENTRY_ID.fullmatch(entry_id) or max(id_pair(entry_id)) >= 2**64:
        raise InvalidField("after", f"'{shorten(entry_id)}' is no id of a stream's entry, such as 1-12.")
    return entry_id


def _entries(found: Any) -> list[Entry]:
    return [Entry(entry_id.decode(), fields.get(EVENT_FIELD, b"")) for entry_id, fields in found]


def _message(fields: list[bytes]) -> bytes:
    return fields[1] if fields[0] == EVENT_FIELD else b""  # names and values in turn


def _client(url: str, seconds: float | None) -> Redis:
    """No retries inside the library: it would repeat what must not be, and outlast the promised deadline."""
    return Redis.from_url(
        url,
        socket_timeout=seconds,
        socket_connect_timeout=COMMAND_SECONDS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        max_connections=1024,
    )
