"""What all runs of one tree have used together, and what of its output is promised to running turns.

Owns the counters: each turn counts once, however often it is told. Knows no budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
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


FIELDS = ("prompt_tokens", "output_tokens", "thinking_tokens", "tool_calls")


class TreeUsage:
    """Counters of trees, named by their root run's id."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def total(self, tree: str) -> Used:
        """What the tree has used so far. Raises BusLost."""
        values = await self._bus.answered(self._bus.commands.hmget(_used_key(tree), list(FIELDS)))
        return Used(*(int(value or 0) for value in values))

    async def add(self, tree: str, run_id: str, turn: int, used: Used) -> Used:
        """Counts what a turn has used in all by now and ends its promise; the tree's new total. A run's turns
        come in order.

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
            pipeline.hdel(_promised_key(tree), run_id)
            pipeline.set(marker, _encode(_Counted(turn, _most(used, before))), ex=WEEK_SECONDS)

        await watched(self._bus, [marker], decide)
        return await self.total(tree)

    async def promise(self, tree: str, run_id: str, output_tokens: int, limit: int) -> bool:
        """Sets further output tokens of a run's turn aside until `add` or `forget`, in place of what it was
        promised before; False where the tree's limit does not leave it so many. Raises BusLost.
        """
        promised_key, used_key = _promised_key(tree), _used_key(tree)

        async def decide(pipeline: Pipeline) -> bool:
            promised: Any = await self._bus.answered(pipeline.hgetall(promised_key))
            total: Any = await self._bus.answered(pipeline.hget(used_key, "output_tokens"))
            others = sum(int(value) for name, value in promised.items() if name != run_id.encode())
            if int(total or 0) + others + output_tokens > limit:
                return False
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(promised_key, run_id, str(output_tokens))
            pipeline.expire(promised_key, WEEK_SECONDS)
            return True

        return await watched(self._bus, [promised_key, used_key], decide)

    async def promised(self, tree: str, run_id: str) -> int | None:
        """What is set aside for a run. Raises BusLost."""
        value = await self._bus.answered(self._bus.commands.hget(_promised_key(tree), run_id))
        return None if value is None else int(value)

    async def forget(self, tree: str, run_id: str) -> None:
        """The run's promise is off: its turn did not come to be. Safe to repeat; raises BusLost."""
        await self._bus.answered(self._bus.commands.hdel(_promised_key(tree), run_id))


def _counted(marker: bytes | None) -> _Counted:
    return _Counted(0, Used()) if marker is None else _decode(marker)


def _most(one: Used, other: Used) -> Used:
    return Used(*(max(getattr(one, name), getattr(other, name)) for name in FIELDS))


def _used_key(tree: str) -> str:
    return named_key("tree-used", tree)


def _promised_key(tree: str) -> str:
    return named_key("tree-promised", tree)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Counted).decode
