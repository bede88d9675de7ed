"""All that a gateway keeps in the bus beside its runs' streams, under one bound in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.bus import Bus

from .evictions import Evictions
from .heartbeats import Heartbeats
from .idempotency import Idempotency
from .ids import IdStore
from .index import RunIndex
from .responses import ResponseStore
from .results import ResultStore
from .session_log import SessionLog
from .tree_names import TreeNames
from .tree_usage import TreeUsage

KEPT_BYTES = 128 << 20
"""Half of the usual memory of a bus of our own; the other half is for live streams and what is short."""


@dataclass(frozen=True, slots=True)
class Store:
    """One of each kind."""

    bus: Bus
    idempotency: Idempotency
    results: ResultStore
    responses: ResponseStore
    ids: IdStore
    index: RunIndex
    session_log: SessionLog
    tree_usage: TreeUsage
    tree_names: TreeNames
    heartbeats: Heartbeats


def store_in(
    bus: Bus,
    kept_bytes: int = KEPT_BYTES,
    count_evicted: Callable[[str, int], None] = lambda kind, number: None,
) -> Store:
    """The store in a bus, which need not be there yet. `kept_bytes`: of all that is large; of runs' results
    the largest part, since their callers were told that these are kept.
    """
    evictions = Evictions(count_evicted)
    part = kept_bytes // 40
    return Store(
        bus=bus,
        idempotency=Idempotency(bus),
        results=ResultStore(bus, max_bytes=12 * part, max_call_bytes=2 * part, evictions=evictions),
        responses=ResponseStore(bus, max_bytes=5 * part, evictions=evictions),
        ids=IdStore(bus, max_bytes=16 * part, evictions=evictions),
        index=RunIndex(bus),
        session_log=SessionLog(bus, max_bytes=5 * part, evictions=evictions),
        tree_usage=TreeUsage(bus),
        tree_names=TreeNames(bus),
        heartbeats=Heartbeats(bus),
    )
