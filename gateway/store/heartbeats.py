"""Which runs' orchestrators have been heard of lately.

Owns one expiring key for each run. Knows no policy for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.bus import Bus

from .keys import run_key


class Heartbeats:
    """Beats, seen by all gateways."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def beat(self, run_id: str, milliseconds: int) -> None:
        """The run's orchestrator lives, and will be heard again within so long. Raises BusLost."""
        await self._bus.answered(self._bus.commands.set(run_key(run_id, "heartbeat"), b"1", px=milliseconds))

    async def beating(self, run_ids: Sequence[str]) -> frozenset[str]:
        """Those of these runs whose last beat still counts. Raises BusLost."""
        if not run_ids:
            return frozenset()
        values = await self._bus.answered(
            self._bus.commands.mget([run_key(run_id, "heartbeat") for run_id in run_ids])
        )
        return frozenset(run_id for run_id, value in zip(run_ids, values, strict=True) if value is not None)
