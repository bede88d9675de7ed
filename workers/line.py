"""Who is next: the turns that wait inside the engine, and the order in which they get workers.

Turns that lost their worker come first; then those whose agent's prefix is resident, then the least uncached
work, growing older; an agent that is not expected waits until the working sets of the others leave room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import structlog

from kvcache.cache import Cache, Resident

from .agents import Agents, answer_tokens
from .pace import Pace
from .sharing import InFlight
from .turn import Turn

log = structlog.get_logger(__name__)

MAX_YIELDS = 2
"""Times that a prefill makes room for shorter ones."""

_RIVAL_SHARE = 0.25
_RIVAL_TOKENS = 2000
"""A prefill makes room for one that has less than this share of its work left, and so many tokens less."""


@dataclass(frozen=True, slots=True)
class LineRules:
    """How the line is ordered. `arrival` is first come, first served, and nobody is held or makes room."""

    order: Literal["agents", "arrival"] = "agents"
    max_hold_seconds: float = 300.0  # for room in the pool
    max_pass_seconds: float = 120.0  # while others pass
    hot_share: float = 0.8  # of the pool: up to it agents are let in
    full_share: float = 0.95  # of the pool: beyond it the agents that were let in last have to wait
    shared_share: float = 0.5  # of a first prompt: it takes little room where so much of it is there
    resident_share: float = 0.9  # of what an agent had: enough of it is there to go on at once


class Standing(IntEnum):
    """The lowest is served first."""

    OVERDUE = 0
    RESIDENT = 1
    READY = 2
    HELD = 3  # for room in the pool


@dataclass(slots=True)
class Waiter:
    """A turn in line, and what the tree held of its prompt when that was last looked up."""

    turn: Turn
    resident: Resident | None = None
    version: tuple[int, ...] = ()  # of the tree at that time


class Line:
    """The waiting turns of one engine."""

    def __init__(self, cache: Cache, agents: Agents, pace: Pace, rules: LineRules | None = None) -> None:
        self.rules = rules or LineRules()
        self._cache = cache
        self._agents = agents
        self._pace = pace
        self._returned: deque[Turn] = deque()  # lost their workers, the next one first
        self._waiters: dict[int, Waiter] = {}  # by number of arrival
        self._num_changes = 0
        pages = cache.stats().num_pages
        self._hot_tokens = int(self.rules.hot_share * pages * cache.page_tokens)
        self._full_tokens = int(self.rules.full_share * pages * cache.page_tokens)

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiters)

    def __iter__(self) -> Iterator[Turn]:
        yield from self._returned
        for waiter in self._waiters.values():
            yield waiter.turn

    def __contains__(self, turn: Turn) -> bool:
        return turn.number in self._waiters or turn in self._returned

    def add(self, turn: Turn) -> None:
        """A new turn waits."""
        self._waiters[turn.number] = Waiter(turn)

    def put_back(self, turn: Turn) -> None:
        """A turn lost its worker: it is the next."""
        self._returned.appendleft(turn)

    def remove(self, turn: Turn) -> None:
        """The turn waits no more."""
        if self._waiters.pop(turn.number, None) is None:
            self._returned.remove(turn)

    def changed(self) -> None:
        """Prefixes were kept or let go: what was looked up before may be wrong."""
        self._num_changes += 1

    def choose(self, now: float, is_ready: Callable[[Turn], bool]) -> Turn | None:
        """Who shall have the free worker; None: nobody, or the one who should cannot yet."""
        if self._returned:
            turn = self._returned[0]
            return turn if is_ready(turn) else None
        if self.rules.order == "arrival":
            return next((w.turn for w in self._waiters.values() if is_ready(w.turn)), None)
        best: Waiter | None = None
        least: tuple[float, ...] = ()
        for waiter in self._waiters.values():
            if not is_ready(waiter.turn):
                continue
            standing = self._standing(waiter, now)
            rank = (standing, -self._ratio(waiter, now))
            if standing is not Standing.HELD and (best is None or rank < least):
                best, least = waiter, rank
        return None if best is None else best.turn

    def rival(
        self, prefilling: Turn, flight: InFlight, now: float, is_ready: Callable[[Turn], bool]
    ) -> Turn | None:
        """A waiting turn that the running prefill should make room for."""
        if self.rules.order == "arrival" or self._returned or prefilling.num_yielded >= MAX_YIELDS:
            return None
        assert prefilling.path is not None
        num_left = prefilling.num_tokens - prefilling.path.num_tokens
        if num_left <= _RIVAL_TOKENS:
            return None
        for waiter in self._waiters.values():
            turn = waiter.turn
            num_rival = turn.num_tokens - self._look(waiter).num_cached
            is_shorter = num_rival < _RIVAL_SHARE * num_left and num_rival <= num_left - _RIVAL_TOKENS
            if is_shorter and is_ready(turn) and self._is_resident(waiter) and not flight.serves(turn, now):
                return turn
        return None

    def next_change(self, now: float) -> float:
        """When a turn that is held now may go at the latest, were nothing to happen before."""
        release = min(
            (w.turn.received_at + self.rules.max_hold_seconds for w in self._waiters.values()),
            default=float("inf"),
        )
        return max(min(release, self._agents.next_cooling(now)), now)

    def _standing(self, waiter: Waiter, now: float) -> Standing:
        turn = waiter.turn
        if now >= turn.received_at + self.rules.max_hold_seconds:
            return Standing.OVERDUE
        if not self._has_room(waiter, now):
            return Standing.HELD
        if now >= turn.received_at + self.rules.max_pass_seconds:
            return Standing.OVERDUE
        return Standing.RESIDENT if self._is_resident(waiter) else Standing.READY

    def _has_room(self, waiter: Waiter, now: float) -> bool:
        """Whether the pool can hold the turn's agent besides those that are at work or expected back.

        One that was let in keeps its room until the pool is full; then the senior ones stay, and it waits
        until there is as much room as a new one needs. Without that distance all would lose what they have.
        """
        turn = waiter.turn
        agent = self._agents.of(turn)
        if agent is None or agent.num_running:
            return True
        num_shared = agent.num_shared if agent.num_tokens else self._look(waiter).num_matched
        if not agent.num_tokens and num_shared > self.rules.shared_share * len(turn.prompt):
            return True
        num_needed = turn.num_tokens + answer_tokens(turn) - num_shared
        if self._agents.is_hot(turn, now):
            if self._agents.senior_tokens(agent, now) + num_needed <= self._full_tokens:
                return True
            self._agents.cool(agent)
        others = self._agents.hot_tokens(agent, now)
        return not others or others + num_needed <= self._hot_tokens

    def _is_resident(self, waiter: Waiter) -> bool:
        agent = self._agents.of(waiter.turn)
        if agent is None or not agent.num_tokens:
            return False
        num_had = min(agent.num_tokens, waiter.turn.num_tokens)
        return self._look(waiter).num_cached >= self.rules.resident_share * num_had

    def _ratio(self, waiter: Waiter, now: float) -> float:
        """Highest response ratio next: short work first, and long work once it has waited for long."""
        num_cached = self._look(waiter).num_cached
        service = self._pace.prefill_seconds(waiter.turn.num_tokens - num_cached, num_cached)
        return (now - waiter.turn.received_at + service) / max(service, 1e-6)

    def _look(self, waiter: Waiter) -> Resident:
        stats = self._cache.stats()
        version = (self._num_changes, stats.num_evicted // 64, stats.num_states_evicted // 4)
        if waiter.resident is None or waiter.version != version:
            turn = waiter.turn
            waiter.version = version
            try:
                tokens = turn.tokens(0, turn.num_tokens)
                waiter.resident = self._cache.probe(turn.namespace, tokens, max_match=len(tokens))
            except Exception:  # only its place in the line depends on it
                log.exception("a prompt was not looked up", run=turn.run_id, attempt=turn.attempt)
                waiter.resident = Resident(0, 0)
        return waiter.resident
