"""What all runs of one tree have used together, and what of the rest is promised to running turns.

Owns the counters: each turn counts once, however often it is told. Knows no budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
from redis.asyncio.client import Pipeline

from gateway.bus import Bus

from .keys import WEEK_SECONDS, named_key, run_key
from .watched import watched


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens and tool calls. `output_tokens` holds the thinking ones too."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    thinking_tokens: int = 0
    tool_calls: int = 0


class _Counted(msgspec.Struct, frozen=True, array_like=True):
    """What is counted of a run's last turn."""

    turn: int
    used: Used


@dataclass(frozen=True, slots=True)
class Most:
    """What a tree may have of that which is promised; None: any number."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None


FIELDS = ("prompt_tokens", "output_tokens", "thinking_tokens", "tool_calls")


class TreeUsage:
    """Counters of trees, named by their root run's id."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def total(self, tree: str) -> Used:
        """What the tree has used so far. Raises BusLost."""
        return _used(await self._bus.answered(self._bus.commands.hmget(_used_key(tree), list(FIELDS))))

    async def add(self, tree: str, run_id: str, turn: int, used: Used, *, ends_promise: bool = True) -> Used:
        """Counts what a turn has used in all by now and ends its promise; the tree's new total. A run's turns
        come in order. A turn that keeps its promise may not tell of what is promised.

        Exactly once: what is counted already, also by another gateway, is not added. Raises BusLost.
        """
        marker = run_key(run_id, "counted")

        async def decide(pipeline: Pipeline) -> None:
            counted = _counted(await self._bus.answered(pipeline.get(marker)))
            if counted.turn > turn:
                return
            before = counted.used if counted.turn == turn else Used()
            pipeline.multi()  # type: ignore[no-untyped-call]
            for name in FIELDS:
                pipeline.hincrby(_used_key(tree), name, max(getattr(used, name) - getattr(before, name), 0))
            pipeline.expire(_used_key(tree), WEEK_SECONDS)
            if ends_promise:
                pipeline.hdel(_promised_key(tree), run_id)
            pipeline.set(marker, _encode(_Counted(turn, _most(used, before))), ex=WEEK_SECONDS)

        await watched(self._bus, [marker], decide)
        return await self.total(tree)

    async def promise(self, tree: str, run_id: str, turn: int, needed: Used, most: Most) -> bool:
        """Sets a turn's prompt and further output tokens aside until `add` or `forget`, in place of what its
        run was promised before; False where the tree's limits do not leave it so many. A prompt that is
        counted already needs no more. Raises BusLost.
        """
        promised_key, used_key, marker = _promised_key(tree), _used_key(tree), run_key(run_id, "counted")

        async def decide(pipeline: Pipeline) -> bool:
            promises: Any = await self._bus.answered(pipeline.hgetall(promised_key))
            used = _used(await self._bus.answered(pipeline.hmget(used_key, list(FIELDS))))
            counted = _counted(await self._bus.answered(pipeline.get(marker)))
            before = counted.used.prompt_tokens if counted.turn == turn else 0
            mine = replace(needed, prompt_tokens=max(needed.prompt_tokens - before, 0))
            others = [_decode_used(value) for name, value in promises.items() if name != run_id.encode()]
            for name in ("prompt_tokens", "output_tokens"):
                limit = getattr(most, name)
                if limit is not None and sum(getattr(one, name) for one in (used, mine, *others)) > limit:
                    return False
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(promised_key, run_id, _encode(mine))
            pipeline.expire(promised_key, WEEK_SECONDS)
            return True

        return await watched(self._bus, [promised_key, used_key, marker], decide)

    async def promised(self, tree: str, run_id: str) -> Used | None:
        """What is set aside for a run. Raises BusLost."""
        value = await self._bus.answered(self._bus.commands.hget(_promised_key(tree), run_id))
        return None if value is None else _decode_used(value)

    async def forget(self, tree: str, run_id: str) -> None:
        """The run's promise is off: its turn did not come to be. Safe to repeat; raises BusLost."""
        await self._bus.answered(self._bus.commands.hdel(_promised_key(tree), run_id))


def _used(values: list[bytes | None]) -> Used:
    return Used(*(int(value or 0) for value in values))


def _counted(marker: bytes | None) -> _Counted:
    return _Counted(0, Used()) if marker is None else _decode(marker)


def _most(one: Used, other: Used) -> Used:
    return Used(*(max(getattr(one, name), getattr(other, name)) for name in FIELDS))


def _used_key(tree: str) -> str:
    return named_key("tree-used", tree)


def _promised_key(tree: str) -> str:
    return named_key("tree-promises", tree)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Counted).decode
_decode_used = msgspec.msgpack.Decoder(Used).decode
