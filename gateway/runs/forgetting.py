"""What is let go of a run: at its end; and when its caller deletes it, all under its id, and the response
that it was.

What others go on from stays: children's ids are based on records that no name leads to any more.
"""

from __future__ import annotations

from gateway.dialects.responses.ids import response_id
from gateway.store.keys import grave_key, run_key
from gateway.store.store import Store
from workers.messages import RUNS_LIVE_KEY, run_events_key

from .events import run_commands_key

EXPIRE_SECONDS = 3600
"""How long an ended run's events can still be read."""


async def clear(store: Store, run_id: str) -> None:
    """An ended run leaves the list of live ones, and its events will go; it is forgotten at once if it was
    deleted while it lived. Safe to repeat; raises BusLost.
    """
    pipeline = store.bus.commands.pipeline(transaction=False)
    pipeline.srem(RUNS_LIVE_KEY, run_id)
    pipeline.expire(run_events_key(run_id), EXPIRE_SECONDS)
    pipeline.expire(run_commands_key(run_id), EXPIRE_SECONDS)
    pipeline.exists(grave_key(run_id))
    *_, is_deleted = await store.bus.execute(pipeline)
    if is_deleted:
        await forget(store, run_id)


async def forget(store: Store, run_id: str) -> None:
    """Of a run that has ended. Safe to repeat, and what tells of the run goes last; raises BusLost."""
    await store.idempotency.bury(run_id)
    await store.tree_names.forget(run_id)
    await store.ids.remove(run_id)
    for note in await store.index.get([run_id]):
        await store.index.remove(note)
    await store.results.remove(run_id)
    await store.responses.delete(response_id(run_id))
    pipeline = store.bus.commands.pipeline(transaction=True)
    told = (run_key(run_id, "note"), run_key(run_id, "mirrored"))  # by now perhaps of its end alone
    pipeline.delete(run_events_key(run_id), run_commands_key(run_id), *told)
    pipeline.srem(RUNS_LIVE_KEY, run_id)
    await store.bus.execute(pipeline)
