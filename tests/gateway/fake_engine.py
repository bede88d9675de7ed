"""An engine that speaks the bus but runs no model: the test says what happens to each turn, and when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gateway.tasks import end_tasks
from workers.messages import (
    ENGINES_KEY,
    EVENT_FIELD,
    LEASE_SECONDS,
    Cancel,
    CancelAgents,
    Cancelled,
    Derailed,
    EngineInfo,
    EngineStats,
    Event,
    Finished,
    KVFacts,
    Note,
    Pause,
    Started,
    Submit,
    Timings,
    TokenizerBundle,
    Tokens,
    Usage,
    decode_to_engine,
    encode,
    engine_key,
    engine_lease_key,
    event_id,
    inbox_key,
    run_events_key,
    tokenizer_key,
)

DIGEST = "digest-1"
BUNDLE = TokenizerBundle(tokenizer_json=b"{}", chat_template="")


@dataclass
class Turn:
    """One Submit, and what was written about it."""

    submit: Submit
    sequence: int = 1
    has_begun: bool = False  # its script runs, so that what the test writes comes after
    is_cancelled: bool = False
    is_paused: bool = False
    is_refused: bool = False
    has_ended: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one writer: ids must come in order


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Waits for what other processes bring about. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


Script = Callable[["FakeEngine", Turn], Awaitable[None]]


async def answer_at_once(engine: FakeEngine, turn: Turn) -> None:
    """Three tokens, then the end."""
    await engine.write(turn, Started(worker=0, cached_tokens=0))
    for text in ("a", "b", "c"):
        await engine.write(turn, Tokens(token_ids=b"\1\0\0\0", text=text))
    await engine.finish(turn)


async def only_start(engine: FakeEngine, turn: Turn) -> None:
    """On a worker, without a token; the test goes on."""
    await engine.write(turn, Started(worker=0, cached_tokens=0))


async def one_token(engine: FakeEngine, turn: Turn) -> None:
    """One token; the test goes on."""
    await engine.write(turn, Started(worker=0, cached_tokens=0))
    await engine.write(turn, Tokens(token_ids=b"\1\0\0\0", text="a"))


async def wait_in_line(engine: FakeEngine, turn: Turn) -> None:
    """Nothing; the test goes on."""


class FakeEngine:
    """`async with` puts it on the bus; `turns` are those that it was sent, oldest first."""

    def __init__(
        self, url: str, script: Script = answer_at_once, *, engine_id: str = "e1", workers: int = 4
    ) -> None:
        self.turns: list[Turn] = []
        self.cancels: list[Cancel] = []
        self.pauses: list[Pause] = []
        self.agent_cancels: list[CancelAgents] = []
        self.script = script
        self.engine_id = engine_id
        self.bundle = BUNDLE
        self.incarnation = 1
        self._client = Redis.from_url(url, protocol=2)
        self._reader = Redis.from_url(url, protocol=2)
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []
        self._scripts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.die()
        await self._client.aclose()
        await self._reader.aclose()

    @property
    def info(self) -> EngineInfo:
        """As published."""
        return EngineInfo(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            model_id="model",
            digest=DIGEST,
            context_length=1000,
            num_workers=self._workers,
            vocab_size=100,
            kv=KVFacts(dtype="int8", bytes_per_token=1.0, page_tokens=64, num_pages=100, pool_bytes=6400),
            device="none",
            weights="none",
            blas="none",
            created=0,
        )

    async def begin(self, *, ready: bool = True) -> None:
        """Publishes a living incarnation and reads its inbox."""
        stats = EngineStats(incarnation=self.incarnation, ready=ready)
        fields: Any = {"info": encode(self.info), "stats": encode(stats)}
        await self._client.set(tokenizer_key(DIGEST), encode(self.bundle))
        await self._client.hset(engine_key(self.engine_id), mapping=fields)
        await self._client.sadd(ENGINES_KEY, self.engine_id)
        await self.renew()
        self._tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._read())]

    async def die(self, *, lease_stays: bool = False) -> None:
        """kill -9; without a lease when a supervisor has seen it."""
        await end_tasks([*self._tasks, *self._scripts])
        self._tasks = []
        if not lease_stays:
            with contextlib.suppress(Exception):  # the bus may be gone before us
                await self._client.delete(engine_lease_key(self.engine_id))

    async def restart(self) -> None:
        """A new incarnation."""
        self.incarnation += 1
        await self.begin()

    async def renew(self) -> None:
        """One beat."""
        milliseconds = int(LEASE_SECONDS * 1000)
        await self._client.set(engine_lease_key(self.engine_id), str(self.incarnation), px=milliseconds)

    async def write(self, turn: Turn, event: Event) -> bool:
        """One event; False when the bus refused it."""
        async with turn.lock:
            turn.sequence += 1
            key = run_events_key(turn.submit.run_id)
            fields: Any = {EVENT_FIELD: encode(event)}
            try:
                entry = event_id(turn.submit.attempt, turn.sequence)
                written = await self._client.xadd(key, fields, id=entry, nomkstream=True)
            except ResponseError:
                written = None
            turn.is_refused = written is None
            return written is not None

    async def finish(self, turn: Turn) -> bool:
        """The turn ends by itself."""
        turn.has_ended = True
        usage = Usage(prompt_tokens=3, completion_tokens=3)
        return await self.write(turn, Finished(reason="stop", usage=usage, timings=Timings(worker=0)))

    async def turn(self, number: int) -> Turn:
        """Waits for the Submit of that number, from 0."""
        await until(lambda: len(self.turns) > number and self.turns[number].has_begun)
        return self.turns[number]

    async def cancel_of(self, turn: Turn) -> None:
        """Waits until a Cancel for the turn has come."""
        await until(lambda: turn.is_cancelled)

    async def obey_cancel(self, turn: Turn) -> bool:
        """Ends the turn as cancelled."""
        turn.has_ended = True
        return await self.write(turn, Cancelled(usage=Usage(), timings=Timings()))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            with contextlib.suppress(Exception):  # the bus may be away for a while
                await self.renew()

    async def _read(self) -> None:
        position = "0"
        while True:
            try:
                answer: Any = await self._reader.xread({inbox_key(self.engine_id): position}, block=1000)
            except Exception:  # noqa: BLE001 - the bus may be away for a while
                await asyncio.sleep(0.05)
                continue
            for _, entries in answer or []:
                for entry, fields in entries:
                    position = entry.decode()
                    message = decode_to_engine(fields[EVENT_FIELD])
                    if isinstance(message, Submit) and self._is_new(message):
                        self.turns.append(Turn(message))
                        task = asyncio.create_task(self._run(self.turns[-1]))
                        self._scripts.add(task)
                        task.add_done_callback(self._scripts.discard)
                    elif isinstance(message, Cancel | Pause):
                        self._receive(message)
                    elif isinstance(message, Note):
                        await self._tell(message)
                    elif isinstance(message, CancelAgents):
                        self.agent_cancels.append(message)

    def _is_new(self, submit: Submit) -> bool:
        """Meant for this incarnation, and none that is open: as the real one looks at it."""
        key = (submit.run_id, submit.attempt)
        is_open = any((t.submit.run_id, t.submit.attempt) == key and not t.has_ended for t in self.turns)
        return submit.incarnation == self.incarnation and not is_open

    async def _run(self, turn: Turn) -> None:
        turn.has_begun = True
        await self.script(self, turn)

    async def _tell(self, note: Note) -> None:
        for turn in self.turns:
            here = (turn.submit.run_id, turn.submit.attempt) == (note.run_id, note.attempt)
            if here and not turn.has_ended:
                await self.write(turn, Derailed(what=note.what))

    def _receive(self, message: Cancel | Pause) -> None:
        if isinstance(message, Cancel):
            self.cancels.append(message)
        else:
            self.pauses.append(message)
        for turn in self.turns:
            if (turn.submit.run_id, turn.submit.attempt) == (message.run_id, message.attempt):
                turn.is_cancelled |= isinstance(message, Cancel)
                turn.is_paused |= isinstance(message, Pause)
