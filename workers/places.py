"""Which workers are free and which one a turn gets. Knows agents by name and nothing of what they run."""

from __future__ import annotations

from .pins import AgentKey

_MAX_AGENTS = 4096
"""Agents whose last worker is remembered."""


class Places:
    """The free workers of one engine, the one that has been free for longest first."""

    def __init__(self, num_workers: int) -> None:
        self._free = list(range(num_workers))
        self._last: dict[AgentKey, int] = {}  # the least recent first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, key: AgentKey | None) -> int:
        """The agent's last worker if that is free, else the one that has been free for longest."""
        last = None if key is None else self._last.pop(key, None)
        worker = last if last is not None and last in self._free else self._free[0]
        self._free.remove(worker)
        if key is not None:
            self._last[key] = worker
            if len(self._last) > _MAX_AGENTS:
                del self._last[next(iter(self._last))]
        return worker

    def give_back(self, worker: int) -> None:
        """The worker is free from now on."""
        self._free.append(worker)
