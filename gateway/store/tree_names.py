"""Which tree the names of a call belong to, so that plain calls count in its budget as runs do.

Owns one key for each session and agent of a tree with a budget, and a list of these. Knows no run
and no budget's meaning.
"""

from __future__ import annotations

from typing import Any

import msgspec
from redis.asyncio.client import Pipeline

from gateway.bus import Bus

from .keys import WEEK_SECONDS, named_key
from .watched import watched


class NamedTree(msgspec.Struct, frozen=True, array_like=True):
    """A tree. `budget` is as it was noted."""

    root: str  # the run at its root
    since: float  # unix seconds: when that was accepted
    budget: bytes


class TreeNames:
    """Trees by tenant, session and agent; the newest tree of a name counts."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def note(
        self, names: tuple[str, str, str], tree: NamedTree, *, is_root: bool, in_place_only: bool = False
    ) -> None:
        """A run of (tenant, session, agent) is in that tree. Its session is too: of several trees in one, the
        one whose root came last. `in_place_only`: where another was noted. Safe to repeat; raises BusLost.
        """
        tenant, session, agent = names
        of_session, of_agent = _key(tenant, session, ""), _key(tenant, session, agent)
        pipeline, noted = self._bus.commands.pipeline(transaction=False), _encode(tree)
        if not in_place_only:
            pipeline.sadd(_names_key(tree.root), of_session, of_agent)  # another's, maybe: that is looked at
            pipeline.expire(_names_key(tree.root), WEEK_SECONDS)
        if is_root:
            pipeline.set(of_session, noted, ex=WEEK_SECONDS, xx=in_place_only)
        elif not in_place_only:
            pipeline.set(of_session, noted, ex=WEEK_SECONDS, nx=True)
        if agent:
            pipeline.set(of_agent, noted, ex=WEEK_SECONDS, xx=in_place_only)
        await self._bus.execute(pipeline)

    async def find(
        self, tenant: str, session: str, parent: str, agent: str
    ) -> tuple[NamedTree | None, NamedTree | None]:
        """The tree of the parent, else of the agent, else of the session; and the session's where that is
        newer than the agent's. Raises BusLost.
        """
        keys = [_key(tenant, session, name) for name in (parent, agent, "")]
        found = await self._bus.answered(self._bus.commands.mget(keys))
        of_parent, own, newest = (None if tree is None else _decode(tree) for tree in found)
        if parent and of_parent is not None:
            return of_parent, None
        if own is None or newest is None:
            return own or newest, None
        return own, newest if newest.since > own.since else None

    async def forget(self, root: str) -> None:
        """No name leads to that tree any more. Safe to repeat; raises BusLost."""
        members: Any = await self._bus.answered(self._bus.commands.smembers(_names_key(root)))
        names = [name.decode() for name in members]
        if not names:
            return

        async def decide(pipeline: Pipeline) -> None:
            found = await self._bus.answered(pipeline.mget(names))
            noted = [
                name for name, tree in zip(names, found, strict=True) if tree and _decode(tree).root == root
            ]
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.delete(_names_key(root), *noted)

        await watched(self._bus, names, decide)


def _names_key(root: str) -> str:
    return named_key("names-of", root)


def _key(tenant: str, session: str, agent: str) -> str:
    return named_key("tree-of", tenant, session, agent)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(NamedTree).decode
