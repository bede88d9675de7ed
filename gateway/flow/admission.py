"""Who waits and who goes next: turns enter a line by class and are released to engines a few at a time.

Pure: knows run ids, classes, counts and the seconds of a given clock; knows no engine's cost (router.py,
rates.py) and no bus.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .classes import CLASSES, NORMAL, Classes, FlowClass, FlowHints, next_up
from .fairness import FairQueue, Seat

RELEASED_PER_WORKER = 2
"""An engine holds this many turns for each worker: enough to order them by what is cached, no more."""

PROMOTED = "promoted"
"""The one share of a class that all who came up into it by waiting have together: they never starve, and they
crowd out nobody whose class it is."""

MAX_QUEUES = 64

Refusal = Literal["queue_full", "all_full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One turn's place. Tickets of one line may go to the same engines."""

    run_id: str
    line: str
    prompt_tokens: int
    output_tokens: int  # expected
    tenant: str = ""
    tree: str = ""  # the session, of that tenant
    flow: FlowHints = NORMAL
    waited: float = 0.0  # seconds, before it came in


@dataclass(frozen=True, slots=True)
class Charge:
    """What a released ticket takes of its engine, as far as is known."""

    seconds: float  # of the engine's time
    pages: int  # of its pool, that it does not hold yet


@dataclass(slots=True, eq=False)
class Held:
    """A ticket in line, or at an engine."""

    ticket: Ticket
    since: float  # seconds of the clock: when its wait began
    flow_class: FlowClass  # that it counts as
    seat: Seat
    charge: Charge = Charge(0.0, 0)
    engine_id: str = ""
    has_expired: bool = False
    is_settled: bool = False

    @property
    def queue(self) -> tuple[str, FlowClass]:
        """Which queue it stands, or stood last, in."""
        return (self.ticket.line, self.flow_class)


class Admission:
    """Lines of waiting tickets, each with a queue for each class; and the tickets that engines hold."""

    def __init__(self, classes: Classes, max_waiting: int, clock: Callable[[], float]) -> None:
        self.classes = classes
        self._max_waiting = max_waiting
        self._clock = clock
        self._promote_seconds = {name: classes.promote_seconds(name) for name in CLASSES}
        self._num_reserved = dict.fromkeys(CLASSES, 0)
        self._queues: dict[tuple[str, FlowClass], FairQueue] = {}
        self._served_at: dict[tuple[str, FlowClass], float] = {}  # or when somebody began to wait there
        self._waiting: dict[FlowClass, OrderedDict[str, Held]] = {name: OrderedDict() for name in CLASSES}
        self._in_line: dict[str, Held] = {}
        self._released: dict[str, Held] = {}
        self._at_engine: dict[str, dict[str, Held]] = {}
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Tickets in all lines."""
        return len(self._in_line)

    def num_waiting_of(self, flow_class: FlowClass) -> int:
        """Those that came in with that class."""
        return len(self._waiting[flow_class])

    def is_waiting(self, run_id: str) -> bool:
        """Whether the ticket is in a line."""
        return run_id in self._in_line

    def num_before(self, run_id: str) -> int:
        """How many tickets of its line go before one that waits, as things stand."""
        held = self._in_line[run_id]
        line, flow_class = held.queue
        above = [self._queues.get((line, name)) for name in CLASSES[: CLASSES.index(flow_class)]]
        return sum(len(queue) for queue in above if queue) + self._queues[held.queue].num_before(
            run_id, held.seat
        )

    def all_waiting(self, line: str) -> list[Ticket]:
        """The tickets of a line."""
        return [held.ticket for held in self._in_line.values() if held.ticket.line == line]

    def refusal(self, flow_class: FlowClass, room: int) -> Refusal | None:
        """Why no further ticket of the class may come in. `room`: turns that engines could take at once."""
        limit = self.classes.rules(flow_class).max_waiting + room
        if len(self._waiting[flow_class]) + self._num_reserved[flow_class] >= limit:
            return "queue_full"
        is_full = len(self._in_line) + sum(self._num_reserved.values()) >= self._max_waiting + room
        return "all_full" if is_full else None

    def reserve(self, flow_class: FlowClass) -> None:
        """A place for a ticket that will `enter`."""
        self._num_reserved[flow_class] += 1

    def unreserve(self, flow_class: FlowClass) -> None:
        """Gives the reserved place back, just before `enter` or instead of it."""
        self._num_reserved[flow_class] -= 1

    def enter(self, ticket: Ticket) -> None:
        """Into the line; a ticket of the same run leaves first."""
        self.leave(ticket.run_id)
        now, flow = self._clock(), ticket.flow
        deadline = math.inf if flow.deadline is None else flow.deadline
        rank = (-float(flow.priority), deadline, next(self._numbers))
        seat = Seat(f"tenant {ticket.tenant}", ticket.tree, rank)
        held = Held(ticket, now - ticket.waited, flow.flow_class, seat)
        self._in_line[ticket.run_id] = held
        self._note_waiting(held)
        self._put_in(held)

    def lines(self) -> list[str]:
        """The lines in which someone waits."""
        return list(dict.fromkeys(line for (line, _), queue in self._queues.items() if queue))

    def first(self, line: str, flow_class: FlowClass) -> Ticket | None:
        """Who of that class goes next."""
        queue = self._queues.get((line, flow_class))
        run_id = queue.first() if queue else None
        return None if run_id is None else self._in_line[run_id].ticket

    def promote(self) -> list[Ticket]:
        """Lets the first of each queue that others were preferred to for long count as of the next class up,
        and returns those. Who waits behind calls of its own class is not promoted for that.
        """
        now = self._clock()
        passed_over = [
            key
            for key, served_at in self._served_at.items()
            if now - served_at >= self._promote_seconds[key[1]] and self._queues[key]
        ]
        return [self._promote(key, now) for key in passed_over]

    def expired(self) -> list[Ticket]:
        """Tickets that have waited longer than their class lets them; each is told once and stays until it
        leaves.
        """
        now, expired = self._clock(), []
        for flow_class, waiting in self._waiting.items():
            seconds = self.classes.rules(flow_class).timeout_seconds
            for held in waiting.values():
                if now - held.since < seconds:
                    break
                if not held.has_expired and not held.ticket.flow.has_own_limit:
                    held.has_expired = True
                    expired.append(held.ticket)
        return expired

    def release(self, run_id: str, engine_id: str, charge: Charge) -> float:
        """Out of the line, to an engine; the seconds that it waited."""
        held = self._in_line[run_id]
        self._queue(held.queue).charge(held.seat, charge.seconds)
        self._served_at[held.queue] = self._clock()
        self._forget_waiting(held)
        held.charge = charge
        self._released[run_id] = held
        self._put(held, engine_id)
        return self._clock() - held.since

    def move(self, run_id: str, engine_id: str) -> None:
        """A released ticket is sent once more, maybe to another engine."""
        held = self._released.get(run_id)
        if held is not None:
            del self._at_engine[held.engine_id][run_id]
            self._put(held, engine_id)

    def settle(self, run_id: str, seconds: float) -> None:
        """What a released ticket took in the end; its tree pays the difference or gets it back."""
        held = self._released.get(run_id)
        if held is not None:
            self._settle(held, seconds)

    def leave(self, run_id: str) -> bool:
        """Forgets a ticket wherever it is. True when it still waited in a line."""
        released = self._released.pop(run_id, None)
        if released is not None:
            self._settle(released, released.charge.seconds)
            del self._at_engine[released.engine_id][run_id]
            if not self._at_engine[released.engine_id]:
                del self._at_engine[released.engine_id]
        waiting = self._in_line.get(run_id)
        if waiting is not None:
            self._forget_waiting(waiting)
        return waiting is not None

    def sent_before(self, run_id: str) -> list[Ticket]:
        """The tickets that a released one's engine was sent before it, and still holds."""
        held = self._released.get(run_id)
        names = list(self._at_engine[held.engine_id]) if held is not None else [run_id]
        return [self._released[name].ticket for name in names[: names.index(run_id)]]

    def released(self, engine_id: str) -> list[Held]:
        """The tickets that an engine holds."""
        return list(self._at_engine.get(engine_id, {}).values())

    def pages(self, engine_id: str) -> int:
        """What those take of its pool, as far as is known."""
        return sum(held.charge.pages for held in self._at_engine.get(engine_id, {}).values())

    def room(self, engine_id: str, num_workers: int, line: str, flow_class: FlowClass) -> int:
        """How many more turns of the class the engine may hold. Places are kept for the classes above, and
        for those below while someone of theirs waits in that line.
        """
        places = RELEASED_PER_WORKER * num_workers
        held = self._at_engine.get(engine_id, {}).values()
        free = max(0, places - len(held))
        if not free:
            return 0
        owed = {name: self.classes.floor_places(name, places) for name in CLASSES}
        for one in held:
            owed[one.flow_class] -= 1
        others, is_above = 0, True
        for name in CLASSES:
            if name == flow_class:
                is_above = False
            elif owed[name] > 0 and (is_above or self._queues.get((line, name))):
                others += owed[name]
        return max(0, min(free, owed[flow_class]), free - others)

    def waiting(self, line: str, flow_class: FlowClass) -> list[Ticket]:
        """The tickets that came into a line with that class."""
        return [held.ticket for held in self._waiting[flow_class].values() if held.ticket.line == line]

    def _promote(self, key: tuple[str, FlowClass], now: float) -> Ticket:
        run_id = self._queues[key].first()
        assert run_id is not None  # the caller has seen that someone waits there
        held = self._in_line[run_id]
        self._queues[key].remove(run_id, held.seat)
        self._served_at[key] = now
        tree = f"{held.ticket.tenant}\0{held.ticket.tree}"
        held.flow_class, held.seat = next_up(held.flow_class), Seat(PROMOTED, tree, held.seat.rank)
        self._put_in(held)
        return held.ticket

    def _settle(self, held: Held, seconds: float) -> None:
        if not held.is_settled:
            self._queues[held.queue].settle(held.seat, held.charge.seconds, seconds)
            held.charge = Charge(seconds, held.charge.pages)
            held.is_settled = True

    def _put(self, held: Held, engine_id: str) -> None:
        held.engine_id = engine_id
        self._at_engine.setdefault(engine_id, {})[held.ticket.run_id] = held

    def _queue(self, key: tuple[str, FlowClass]) -> FairQueue:
        if key not in self._queues:
            if len(self._queues) >= MAX_QUEUES:
                used = {held.queue for held in self._released.values()}
                self._queues = {
                    known: queue for known, queue in self._queues.items() if queue or known in used
                }
                self._served_at = {known: self._served_at[known] for known in self._queues}
            self._queues[key] = FairQueue()
        return self._queues[key]

    def _put_in(self, held: Held) -> None:
        queue = self._queue(held.queue)
        if not queue:
            self._served_at[held.queue] = self._clock()
        queue.enter(held.ticket.run_id, held.seat)

    def _note_waiting(self, held: Held) -> None:
        """Who waits longest comes first: who has waited before it came in may pass others."""
        flow_class = held.ticket.flow.flow_class
        waiting = self._waiting[flow_class]
        is_last = not waiting or next(reversed(waiting.values())).since <= held.since
        waiting[held.ticket.run_id] = held
        if not is_last:
            self._waiting[flow_class] = OrderedDict(sorted(waiting.items(), key=lambda item: item[1].since))

    def _forget_waiting(self, held: Held) -> None:
        run_id = held.ticket.run_id
        self._queues[held.queue].remove(run_id, held.seat)
        del self._waiting[held.ticket.flow.flow_class][run_id]
        del self._in_line[run_id]
