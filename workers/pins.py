"""Which kept prefixes are held against eviction, for whom and until when. Knows neither turns nor tokens.

Every pin has a deadline. They are given up soonest-to-lose first when a running turn needs the pages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import structlog

from kvcache.cache import Cache, Kept

from .errors import IntegrityError

log = structlog.get_logger(__name__)


class AgentKey(NamedTuple):
    """Names an agent: agents are unique within a tenant's session."""

    tenant: str
    session: str
    agent: str


class PinReason(IntEnum):
    """Why a prefix is held; the lowest are given up first."""

    TOOL = 0  # its agent waits for a tool
    JOIN = 1  # its agent's children still run
    PAUSE = 2  # its run was paused and may be sent on
    RETAIN = 3  # the caller asked for it


Holder = AgentKey | str
"""For whom a prefix is held: an agent, or the id of a paused run."""

_OF_AGENTS = (PinReason.TOOL, PinReason.JOIN, PinReason.RETAIN)


@dataclass(frozen=True, slots=True)
class Pin:
    """One held prefix; times on the engine's clock."""

    kept: Kept
    until: float
    back_at: float  # when its agent is expected
    agent: AgentKey | None = None  # whose run was paused; with PAUSE only


class Pins:
    """All pins of one engine, at most one for each agent and reason, and one for each paused run."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._pins: dict[tuple[PinReason, Holder], Pin] = {}
        self._num_held: Counter[Kept] = Counter()  # pins that hold it: the cache locks it once for all
        self.next_expiry = math.inf  # none runs out before
        self._expired_at = -math.inf

    def __len__(self) -> int:
        return len(self._pins)

    def put(self, reason: PinReason, holder: Holder, pin: Pin) -> bool:
        """Hold a prefix in place of the one held before. False: half the pool is pinned already."""
        self._release((reason, holder))
        if not self._cache.pin(pin.kept):
            return False
        self._pins[reason, holder] = pin
        self._num_held[pin.kept] += 1
        self.next_expiry = min(self.next_expiry, pin.until)
        return True

    def drop(self, key: AgentKey, *reasons: PinReason) -> None:
        """Let go of what is held for an agent, for these reasons or any; not of its paused runs' prefixes."""
        for reason in reasons or _OF_AGENTS:
            self._release((reason, key))

    def drop_run(self, run_id: str) -> None:
        """Let go of what is held for a paused run."""
        self._release((PinReason.PAUSE, run_id))

    def drop_runs_of(self, agents: Container[AgentKey]) -> None:
        """Let go of what is held for the paused runs of these agents."""
        for name, pin in list(self._pins.items()):
            if pin.agent is not None and pin.agent in agents:
                self._release(name)

    def prolong(self, run_id: str, until: float) -> None:
        """Hold a paused run's prefix until then, if it is held."""
        name = (PinReason.PAUSE, run_id)
        if name in self._pins:
            self._pins[name] = replace(self._pins[name], until=until)
            self.next_expiry = min(self.next_expiry, until)

    def expire(self, now: float) -> None:
        """Let go of what is past its deadline."""
        self._expired_at = now
        if now < self.next_expiry:
            return
        for name, pin in list(self._pins.items()):
            if pin.until <= now:
                self._release(name)
        self.next_expiry = min((pin.until for pin in self._pins.values()), default=math.inf)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a pin was past its deadline when `expire` last ran, or will be."""
        for (reason, _), pin in self._pins.items():
            if pin.until <= self._expired_at or pin.until < self.next_expiry:
                raise IntegrityError(
                    f"a pin ({reason.name}) until {pin.until:.0f} s stays: it is {self._expired_at:.0f} s "
                    f"now and pins are let go at {self.next_expiry:.0f} s"
                )

    def give_one(self, now: float) -> bool:
        """Let go of the one that is likely to be lost soonest anyway; False: there is none."""
        if not self._pins:
            return False
        self._release(min(self._pins, key=lambda name: (name[0], now - self._pins[name].back_at)))
        return True

    def clear(self) -> None:
        """Let go of everything."""
        for name in list(self._pins):
            self._release(name)
        self.next_expiry = math.inf

    def _release(self, name: tuple[PinReason, Holder]) -> None:
        pin = self._pins.pop(name, None)
        if pin is None:
            return
        self._num_held[pin.kept] -= 1
        if self._num_held[pin.kept]:
            return
        del self._num_held[pin.kept]
        try:
            self._cache.unpin(pin.kept)
        except Exception:  # nobody's turn: tried once more, as a pin that stays would lock its pages for ever
            log.exception("a pin was not released at once")
            self._cache.unpin(pin.kept)
