"""Who waits and who goes next: turns enter a line and are released to engines a few at a time.

Knows run ids, agents and counts; knows no engine's cost (router.py), no time and no bus.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors import Overloaded

RELEASED_PER_WORKER = 2
"""An engine holds this many turns for each worker: enough to order them by what is cached, no more."""

ANSWER_TOKENS = 256
"""What an answer is taken to cost when `max_tokens` allows more."""

DEFAULT_PREFILL_TOKENS_PER_SECOND = 200.0
DEFAULT_DECODE_TOKENS_PER_SECOND = 20.0
"""Rates of an engine that has not measured its own yet."""

MAX_RETRY_AFTER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """One turn's place. Tickets of one line may go to the same engines."""

    run_id: str
    line: str
    agent: str
    prompt_tokens: int
    max_tokens: int


class Admission:
    """Lines of waiting tickets, fair between agents by turns, and the tickets that engines hold."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_reserved = 0
        self._lines: dict[str, dict[str, deque[Ticket]]] = {}  # line -> agent, next one first -> its tickets
        self._waiting: dict[str, Ticket] = {}
        self._released: dict[str, tuple[str, Ticket]] = {}  # run id -> engine id, ticket

    @property
    def num_waiting(self) -> int:
        """Tickets in all lines."""
        return len(self._waiting)

    def is_waiting(self, run_id: str) -> bool:
        """Whether the ticket is in a line."""
        return run_id in self._waiting

    def reserve(self, *, room: int, retry_after_seconds: float) -> None:
        """A place for a ticket that will `enter`. `room`: turns the engines could take at once.

        Raises Overloaded when as many wait as may.
        """
        if len(self._waiting) + self._num_reserved >= self._max_waiting + room:
            raise Overloaded(retry_after_seconds)
        self._num_reserved += 1

    def unreserve(self) -> None:
        """Gives the reserved place back, just before `enter` or instead of it."""
        self._num_reserved -= 1

    def enter(self, ticket: Ticket) -> None:
        """To the end of its agent's part of the line."""
        agents = self._lines.setdefault(ticket.line, {})
        agents.setdefault(ticket.agent, deque()).append(ticket)
        self._waiting[ticket.run_id] = ticket

    def lines(self) -> list[str]:
        """The lines in which someone waits."""
        return list(self._lines)

    def first(self, line: str) -> Ticket | None:
        """Who goes next."""
        for tickets in self._lines.get(line, {}).values():
            return tickets[0]
        return None

    def release(self, ticket: Ticket, engine_id: str) -> None:
        """Out of the line, to an engine; the agent's other tickets go behind those of the other agents."""
        self._take_out(ticket)
        agents = self._lines.get(ticket.line, {})
        if ticket.agent in agents:
            agents[ticket.agent] = agents.pop(ticket.agent)
        self._released[ticket.run_id] = (engine_id, ticket)

    def move(self, run_id: str, engine_id: str) -> None:
        """A released ticket is sent once more, maybe to another engine."""
        if run_id in self._released:
            self._released[run_id] = (engine_id, self._released[run_id][1])

    def leave(self, run_id: str) -> bool:
        """Forgets a ticket wherever it is. True when it still waited in a line."""
        self._released.pop(run_id, None)
        ticket = self._waiting.get(run_id)
        if ticket is not None:
            self._take_out(ticket)
        return ticket is not None

    def released(self, engine_id: str) -> list[Ticket]:
        """The tickets that an engine holds."""
        return [ticket for holder, ticket in self._released.values() if holder == engine_id]

    def room(self, engine_id: str, num_workers: int) -> int:
        """How many more turns the engine may hold."""
        return max(0, RELEASED_PER_WORKER * num_workers - len(self.released(engine_id)))

    def waiting(self, line: str) -> list[Ticket]:
        """The tickets of a line, in no order."""
        return [ticket for tickets in self._lines.get(line, {}).values() for ticket in tickets]

    def _take_out(self, ticket: Ticket) -> None:
        del self._waiting[ticket.run_id]
        agents = self._lines[ticket.line]
        agents[ticket.agent].remove(ticket)
        if not agents[ticket.agent]:
            del agents[ticket.agent]
        if not agents:
            del self._lines[ticket.line]


def retry_after_seconds(
    waiting: Iterable[Ticket], prefill_tokens_per_second: float, decode_tokens_per_second: float
) -> float:
    """When half of what waits will have been computed at these rates (of all engines together), 1 to 120 s.

    Prompts count in full: what the cache will spare is the margin.
    """
    prefill = sum(ticket.prompt_tokens for ticket in waiting)
    decode = sum(min(ticket.max_tokens, ANSWER_TOKENS) for ticket in waiting)
    seconds = prefill / (prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_SECOND)
    seconds += decode / (decode_tokens_per_second or DEFAULT_DECODE_TOKENS_PER_SECOND)
    return float(math.ceil(min(max(seconds / 2, 1.0), MAX_RETRY_AFTER_SECONDS)))
