"""Which engines there are, how they are doing and which of them live: polled from the bus twice a second.

Owns the judgement that an engine is lost. Knows no run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gateway.bus import Bus, BusLost
from gateway.errors import NoEngine, UnknownModel
from gateway.tasks import Border, Tasks, repeat
from workers.messages import (
    ENGINES_KEY,
    LEASE_SECONDS,
    EngineInfo,
    EngineStats,
    TokenizerBundle,
    decode_info,
    decode_stats,
    decode_tokenizer,
    engine_key,
    engine_lease_key,
    tokenizer_key,
)

POLL_SECONDS = 0.5
GRACE_SECONDS = LEASE_SECONDS + 1.0
"""After the bus or this process slept, a missing lease proves nothing until engines had time to renew it."""

FORGET_SECONDS = 24 * 3600.0
"""An engine that has been away for so long leaves the bus's list; it comes back with its next start."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as last seen. `alive`: its lease holds the incarnation that `info` describes."""

    info: EngineInfo
    stats: EngineStats
    alive: bool
    tokenizer: TokenizerBundle


async def read_engine(client: Redis, engine_id: str) -> tuple[EngineInfo, EngineStats, int | None] | None:
    """What the bus holds of one engine, with its lease's incarnation; None: nothing that is readable."""
    fields: Any = await client.hmget(engine_key(engine_id), ["info", "stats"])
    lease: Any = await client.get(engine_lease_key(engine_id))
    if None in fields:
        return None
    try:
        return decode_info(fields[0]), decode_stats(fields[1]), _incarnation_of(lease)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


class Directory:
    """The engines of this bus. `on_poll` functions are called after each look, also one without news."""

    def __init__(self, bus: Bus, *, forget_seconds: float = FORGET_SECONDS) -> None:
        self.on_poll: list[Callable[[], None]] = []
        self._bus = bus
        self._forget_seconds = forget_seconds
        self._views: dict[str, EngineView] = {}
        self._leases: dict[str, int | None] = {}
        self._away_since: dict[str, float] = {}  # monotonic, of those without a lease
        self._unreadable: set[str] = set()
        self._tokenizers: dict[str, TokenizerBundle] = {}
        self._polled_at: float | None = None
        self._trusted_from = 0.0  # monotonic; before it a missing lease proves nothing
        self._tasks = Tasks()
        self._border = Border("on_poll")

    async def start(self) -> None:
        """Looks once, then keeps looking."""
        await self.refresh()
        self._tasks.spawn(repeat(self._poll, seconds=POLL_SECONDS, where="directory"))

    async def stop(self) -> None:
        """Stops looking."""
        await self._tasks.end()

    def engines(self) -> list[EngineView]:
        """All engines that this bus knows, dead ones too, by id."""
        return [self._views[engine_id] for engine_id in sorted(self._views)]

    def find(self, model: str) -> EngineView:
        """A living engine that serves `model`. Raises UnknownModel or NoEngine."""
        alive = [view for view in self.engines() if view.alive]
        serving = [view for view in alive if view.info.model_id == model]
        if serving:
            return min(serving, key=lambda view: (not view.stats.ready, view.stats.num_running))
        if any(view.info.model_id == model for view in self._views.values()) or not alive:
            raise NoEngine(
                "No engine is running now. It may be starting or restarting: try again in a few seconds."
            )
        raise UnknownModel(model, sorted({view.info.model_id for view in alive}))

    def like(self, engine: EngineView) -> list[EngineView]:
        """Living engines that take the same prompts: same model and tokenizer."""
        wanted = (engine.info.model_id, engine.info.digest)
        return [v for v in self.engines() if v.alive and (v.info.model_id, v.info.digest) == wanted]

    def is_lost(self, engine_id: str | None, incarnation: int | None) -> bool:
        """Whether that incarnation will certainly say no more. False while in doubt."""
        lease = self._leases.get(engine_id or "")
        if lease is not None:
            return lease != incarnation
        return self._polled_at is not None and time.monotonic() >= self._trusted_from

    async def refresh(self) -> None:
        """One look at every engine."""
        known = set(self._leases)
        while True:
            seen = await self._look(sorted(known))
            if seen <= known:
                break
            known |= seen
        now = time.monotonic()
        await self._forget_long_dead(now)
        if self._polled_at is None or now - self._polled_at > LEASE_SECONDS / 2:
            self._trusted_from = now + GRACE_SECONDS
        self._polled_at = now

    async def _forget_long_dead(self, now: float) -> None:
        for engine_id, lease in list(self._leases.items()):
            if lease is not None:
                self._away_since.pop(engine_id, None)
            elif now - self._away_since.setdefault(engine_id, now) > self._forget_seconds:
                await self._bus.answered(self._bus.commands.srem(ENGINES_KEY, engine_id))
                log.info("engine_forgotten", engine=engine_id)
                for known in (self._leases, self._views, self._away_since):
                    known.pop(engine_id, None)
                self._unreadable.discard(engine_id)

    async def _look(self, engine_ids: list[str]) -> set[str]:
        pipeline = self._bus.commands.pipeline(transaction=False)
        pipeline.smembers(ENGINES_KEY)
        for engine_id in engine_ids:
            pipeline.hmget(engine_key(engine_id), ["info", "stats"])
            pipeline.get(engine_lease_key(engine_id))
        names, *answers = await self._bus.answered(pipeline.execute(raise_on_error=False))
        for index, engine_id in enumerate(engine_ids):
            self._leases[engine_id] = _incarnation_of(answers[2 * index + 1])
            await self._read(engine_id, answers[2 * index])
        return {name.decode(errors="replace") for name in names}

    async def _read(self, engine_id: str, answer: list[bytes | None] | ResponseError) -> None:
        """One engine's view from its hash; what cannot be read is no engine that this gateway could use."""
        try:
            if isinstance(answer, ResponseError):  # its key holds something else
                raise answer
            await self._note(engine_id, answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, ResponseError) as error:
            if engine_id not in self._unreadable:
                remedy = "upgrade the older one of gateway and engine"
                log.error("engine_unreadable", engine=engine_id, error=type(error).__name__, remedy=remedy)
            self._unreadable.add(engine_id)
            self._views.pop(engine_id, None)
        else:
            self._unreadable.discard(engine_id)

    async def _note(self, engine_id: str, fields: list[bytes | None]) -> None:
        if fields[0] is None:
            return
        info = decode_info(fields[0])
        tokenizer = await self._tokenizer(info.digest)
        if tokenizer is None:
            return
        stats = decode_stats(fields[1]) if fields[1] is not None else None
        if stats is None or stats.incarnation != info.incarnation:
            stats = EngineStats(incarnation=info.incarnation, ready=False, reason="starting")
        alive = self._leases[engine_id] == info.incarnation
        before = self._views.get(engine_id)
        if before is None or before.alive != alive or before.info.incarnation != info.incarnation:
            log.info("engine_seen", engine=engine_id, incarnation=info.incarnation, alive=alive)
        self._views[engine_id] = EngineView(info, stats, alive, tokenizer)

    async def _tokenizer(self, digest: str) -> TokenizerBundle | None:
        if digest not in self._tokenizers:
            encoded: Any = await self._bus.get(tokenizer_key(digest))
            if encoded is None:
                return None
            used = {view.info.digest for view in self._views.values()}
            self._tokenizers = {key: self._tokenizers[key] for key in used if key in self._tokenizers}
            self._tokenizers[digest] = decode_tokenizer(encoded)
        return self._tokenizers[digest]

    async def _poll(self) -> None:
        try:
            await self.refresh()
        except BusLost:
            return
        for listener in self.on_poll:
            with self._border:
                listener()


def _incarnation_of(lease: bytes | ResponseError | None) -> int | None:
    """The living incarnation; None also for what is no number, which no engine of ours wrote."""
    return int(lease) if isinstance(lease, bytes) and lease.isdigit() else None
