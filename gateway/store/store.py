"""All that a gateway keeps in the bus beside its runs' streams, under one bound in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.bus import Bus

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


def store_in(bus: Bus, kept_bytes: int = KEPT_BYTES) -> Store:
    """The store in a bus, which need not be there yet. `kept_bytes`: of all that is large."""
    return Store(
        bus=bus,
        idempotency=Idempotency(bus),
        results=ResultStore(bus, max_bytes=kept_bytes // 5),
        responses=ResponseStore(bus, max_bytes=kept_bytes * 3 // 20),
        ids=IdStore(bus, max_bytes=kept_bytes // 2),
        index=RunIndex(bus),
        session_log=SessionLog(bus, max_bytes=kept_bytes * 3 // 20),
        tree_usage=TreeUsage(bus),
        tree_names=TreeNames(bus),
        heartbeats=Heartbeats(bus),
    )
