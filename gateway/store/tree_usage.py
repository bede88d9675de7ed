"""What all runs of one tree have used together, and what of its output is promised to running turns.

Owns the counters: each turn counts once, however often it is told. Knows no budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.asyncio.client import Pipeline

from gateway.bus import Bus

from .keys import DAY_SECONDS, WEEK_SECONDS, named_key, run_key
from .watched import watched


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens and tool calls. `output_tokens` holds the thinking ones too."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    thinking_tokens: int = 0
    tool_calls: int = 0


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
        """Counts one turn's use and ends its promise; the tree's new total. Turns of a run come in order.

        Exactly once: a repeat, also by another gateway, only reads. Raises BusLost.
        """
        marker = run_key(run_id, "counted")
        counts = [(name, getattr(used, name)) for name in FIELDS]

        async def decide(pipeline: Pipeline) -> None:
            counted: Any = await self._bus.answered(pipeline.get(marker))
            if counted is not None and int(counted) >= turn:
                return
            pipeline.multi()  # type: ignore[no-untyped-call]
            for name, value in counts:
                pipeline.hincrby(_used_key(tree), name, value)
            pipeline.expire(_used_key(tree), WEEK_SECONDS)
            pipeline.hdel(_promised_key(tree), run_id)
            pipeline.set(marker, turn, ex=DAY_SECONDS)

        await watched(self._bus, [marker], decide)
        return await self.total(tree)

    async def promise(self, tree: str, run_id: str, output_tokens: int, limit: int) -> int:
        """How many of the wanted output tokens the tree's limit leaves this run's next turn, and sets them
        aside until `add` or `forget`. A repeat replaces the run's earlier promise. Raises BusLost.
        """
        promised_key, used_key = _promised_key(tree), _used_key(tree)

        async def decide(pipeline: Pipeline) -> int:
            promised: Any = await self._bus.answered(pipeline.hgetall(promised_key))
            total: Any = await self._bus.answered(pipeline.hget(used_key, "output_tokens"))
            others = sum(int(value) for name, value in promised.items() if name != run_id.encode())
            granted = max(0, min(output_tokens, limit - int(total or 0) - others))
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.hset(promised_key, run_id, str(granted))
            pipeline.expire(promised_key, WEEK_SECONDS)
            return granted

        return await watched(self._bus, [promised_key, used_key], decide)

    async def forget(self, tree: str, run_id: str) -> None:
        """The run's promise is off: its turn did not come to be. Safe to repeat; raises BusLost."""
        await self._bus.answered(self._bus.commands.hdel(_promised_key(tree), run_id))


def _used_key(tree: str) -> str:
    return named_key("tree-used", tree)


def _promised_key(tree: str) -> str:
    return named_key("tree-promised", tree)
