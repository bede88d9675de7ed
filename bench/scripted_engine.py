"""An engine without a model for the gateway's benchmarks: it says what it was told, step by step.

Four turns make a step together, as in a real engine: their events go to the bus in one pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis

from gateway.tasks import end_tasks
from gateway.text.tokenizer import pack_token_ids
from workers.messages import (
    ENGINES_KEY,
    EVENT_FIELD,
    EngineInfo,
    EngineStats,
    Event,
    Finished,
    KVFacts,
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

ENGINE, DIGEST, MODEL = "bench", "bench-digest", "scripted"
CONTEXT = 262_144
WORKERS = 512
LEASE_SECONDS = 30
"""Long: making texts may hold up this process."""

STAMP = "@"
"""What a stamped piece begins with: the nanoseconds of `time.monotonic_ns` at which it was written."""

Piece = tuple[int, str]
"""A token and its text."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a turn says, so many tokens an event; without pieces it gets a worker and is silent for ever."""

    pieces: Sequence[Piece] = ()
    step_seconds: float = 0.0
    num_together: int = 1
    is_stamped: bool = False  # each event's text is the moment of its writing, whatever the pieces read


@dataclass(slots=True)
class _Turn:
    submit: Submit
    script: Script
    sequence: int = 1
    num_said: int = 0

    def next(self) -> Event:
        """The event of its next step."""
        if self.sequence == 1:
            return Started(worker=0, cached_tokens=0)
        if not self.is_over:
            pieces = self.script.pieces[self.num_said : self.num_said + self.script.num_together]
            self.num_said += len(pieces)
            text = "".join(text for _, text in pieces)
            if self.script.is_stamped:
                text = f" {STAMP}{time.monotonic_ns()}"
            return Tokens(token_ids=pack_token_ids([token for token, _ in pieces]), text=text)
        num_prompt = len(self.submit.token_ids) // 4
        usage = Usage(prompt_tokens=num_prompt, completion_tokens=self.num_said)
        return Finished(reason="stop", usage=usage, timings=Timings(worker=0))

    @property
    def is_over(self) -> bool:
        """Whether all was said."""
        return self.num_said == len(self.script.pieces)


class ScriptedEngine:
    """`async with` puts it on the bus. `scripts` chooses what a turn says."""

    def __init__(
        self,
        url: str,
        bundle: TokenizerBundle,
        scripts: Callable[[Submit], Script],
        *,
        num_together: int = 4,
    ) -> None:
        self._bundle = bundle
        self._scripts = scripts
        self._num_together = num_together
        self._client = Redis.from_url(url, protocol=2)
        self._reader = Redis.from_url(url, protocol=2)
        self._tasks: list[asyncio.Task[None]] = []
        self._groups: list[list[_Turn]] = []

    async def __aenter__(self) -> Self:
        fields: Any = {"info": encode(_info()), "stats": encode(EngineStats(incarnation=1, ready=True))}
        await self._client.set(tokenizer_key(DIGEST), encode(self._bundle))
        await self._client.hset(engine_key(ENGINE), mapping=fields)
        await self._client.sadd(ENGINES_KEY, ENGINE)
        self._tasks += [asyncio.create_task(self._renew()), asyncio.create_task(self._read())]
        await asyncio.sleep(1.2)  # the gateway has looked for engines
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks(self._tasks)
        await self._client.aclose()
        await self._reader.aclose()

    async def _renew(self) -> None:
        while True:
            await self._client.set(engine_lease_key(ENGINE), "1", ex=LEASE_SECONDS)
            await asyncio.sleep(1)

    async def _read(self) -> None:
        position = "0"
        while True:
            answer: Any = await self._reader.xread({inbox_key(ENGINE): position}, block=1000)
            for _, entries in answer or []:
                for entry, fields in entries:
                    position = entry.decode()
                    message = decode_to_engine(fields[EVENT_FIELD])
                    if isinstance(message, Submit):
                        self._take(_Turn(message, self._scripts(message)))

    def _take(self, turn: _Turn) -> None:
        group = next((group for group in self._groups if 0 < len(group) < self._num_together), None)
        if group is not None and turn.script.pieces:
            group.append(turn)
            return
        self._groups.append([turn])
        self._tasks.append(asyncio.create_task(self._run(self._groups[-1])))

    async def _run(self, group: list[_Turn]) -> None:
        due = time.monotonic()
        while group:
            pipeline = self._client.pipeline(transaction=False)
            for turn in [*group]:
                is_last = turn.sequence > 1 and turn.is_over
                event = turn.next()
                turn.sequence += 1
                fields: Any = {EVENT_FIELD: encode(event)}
                entry = event_id(turn.submit.attempt, turn.sequence)
                pipeline.xadd(run_events_key(turn.submit.run_id), fields, id=entry, nomkstream=True)
                if is_last or not turn.script.pieces:
                    group.remove(turn)
            with contextlib.suppress(Exception):  # an entry behind a verdict is refused
                await pipeline.execute()
            due += max((turn.script.step_seconds for turn in group), default=0.0)
            await asyncio.sleep(max(0.0, due - time.monotonic()))


def pieces_of(tokenizer: Any, text: str, num_tokens: int) -> list[Piece]:
    """Tokens that read a text, one by one, as long as each is whole characters."""
    ids = itertools.islice(tokenizer.encode(text, add_special_tokens=False).ids, num_tokens)
    pieces = [(token, str(tokenizer.decode([token], skip_special_tokens=False))) for token in ids]
    return [piece for piece in pieces if "\ufffd" not in piece[1]]


def _info() -> EngineInfo:
    return EngineInfo(
        engine_id=ENGINE,
        incarnation=1,
        model_id=MODEL,
        digest=DIGEST,
        context_length=CONTEXT,
        num_workers=WORKERS,
        vocab_size=49_152,
        kv=KVFacts(
            dtype="script", bytes_per_token=1.0, page_tokens=64, num_pages=1 << 20, pool_bytes=1 << 26
        ),
        device="none",
        weights="script",
        blas="none",
        created=0,
    )
