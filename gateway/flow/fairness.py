"""Who goes next inside one class: deficit round robin over shares (tenants), and inside each over its trees.

Pure: knows ids, keys and seconds; no turns, no time and no engine.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_SECONDS = 1e-6
"""Less is what sums leave of rounding."""

LEAST_FLOWS = 64
"""So many are kept before those that are owed and owe nothing are looked for."""

MAX_DEBTS = 1024
"""So many that wait for nothing are remembered for what they have had too much."""

Rank = tuple[float, float, int]
"""Order inside a tree, the smallest first; its last part is unique."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a ticket waits."""

    share: str
    tree: str
    rank: Rank


@dataclass(slots=True)
class _Flow:
    served: float  # seconds it has had, on the rotation's scale, and those under way
    number: int  # of its newest place in the order; older ones are void
    under_way: float = 0.0  # seconds of it that are not settled
    is_waiting: bool = False

    @property
    def is_active(self) -> bool:
        return self.is_waiting or self.under_way > 0


class Rotation:
    """Deficit round robin with quanta so small that rounds need not be walked: the flow that has been served
    least goes next, of equals the one that has waited for longest.

    What a flow takes over its due is owed, also while it does not wait; what it leaves is not saved up.
    `_passed` are the settled seconds that each could have had. Whoever comes begins there: before those
    that have many under way.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._order: list[tuple[float, int, str]] = []  # a heap with void places
        self._passed = 0.0
        self._num_active = 0
        self._numbers = itertools.count()
        self._max_flows = LEAST_FLOWS
        self._max_order = LEAST_FLOWS

    def __contains__(self, key: str) -> bool:
        return key in self._flows

    def first(self) -> str | None:
        """Whose turn it is."""
        while self._order:
            served, number, key = self._order[0]
            flow = self._flows.get(key)
            if flow is not None and flow.is_waiting and flow.number == number:
                self._passed = max(self._passed, served - flow.under_way)
                return key
            heapq.heappop(self._order)
        return None

    def goes_before(self, key: str, other: str) -> bool:
        """Whether one waiting flow goes before another one."""
        one, two = self._flows[key], self._flows[other]
        return (one.served, one.number) < (two.served, two.number)

    def enter(self, key: str) -> None:
        """The flow waits for its turn."""
        flow = self._known(key)
        if not flow.is_waiting:
            self._num_active += not flow.is_active
            flow.is_waiting = True
            flow.served = max(flow.served, self._passed)
            self._place(key, flow)

    def leave(self, key: str) -> None:
        """It waits no more."""
        flow = self._flows[key]
        was_active = flow.is_active
        flow.is_waiting = False
        self._num_active -= was_active and not flow.is_active

    def charge(self, key: str, seconds: float) -> None:
        """So many of its seconds are under way, as far as is known."""
        flow = self._known(key)
        was_active = flow.is_active
        flow.served += seconds
        flow.under_way += seconds
        self._num_active += flow.is_active and not was_active
        if flow.is_waiting:
            self._place(key, flow)

    def settle(self, key: str, charged: float, seconds: float) -> None:
        """Of those that were charged, so many were taken in the end."""
        flow = self._known(key)
        self._passed += seconds / max(self._num_active, 1)
        was_active = flow.is_active
        flow.served += seconds - charged
        flow.under_way -= charged
        if flow.under_way < LEAST_SECONDS:
            flow.under_way = 0.0
        self._num_active -= was_active and not flow.is_active
        if flow.is_waiting:
            self._place(key, flow)

    def _known(self, key: str) -> _Flow:
        if key not in self._flows:
            if len(self._flows) >= self._max_flows:
                self._forget()
            self._flows[key] = _Flow(self._passed, next(self._numbers))
        return self._flows[key]

    def _place(self, key: str, flow: _Flow) -> None:
        flow.number = next(self._numbers)
        heapq.heappush(self._order, (flow.served, flow.number, key))
        if len(self._order) > self._max_order:
            flows = [(flow.served, flow.number, key) for key, flow in self._flows.items() if flow.is_waiting]
            heapq.heapify(flows)
            self._order, self._max_order = flows, 2 * len(flows) + LEAST_FLOWS

    def _forget(self) -> None:
        debts = [
            key for key, flow in self._flows.items() if not flow.is_active and flow.served > self._passed
        ]
        kept = set(heapq.nlargest(MAX_DEBTS, debts, key=lambda key: self._flows[key].served))
        self._flows = {key: flow for key, flow in self._flows.items() if flow.is_active or key in kept}
        self._max_flows = 2 * len(self._flows) + LEAST_FLOWS


@dataclass(slots=True)
class _Share:
    """One tenant's trees and who waits in each, the next one first."""

    trees: Rotation = field(default_factory=Rotation)
    waiting: dict[str, list[tuple[Rank, str]]] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))


def _meanwhile(rotation: Rotation, own: str, before: int, lengths: Mapping[str, int]) -> int:
    """With those of the other flows that go while so many of one's own do; `lengths` of all that wait."""
    others = [(name, length) for name, length in lengths.items() if name != own]
    return before + sum(min(length, before + rotation.goes_before(name, own)) for name, length in others)


class FairQueue:
    """The waiting tickets of one class. Shares have the same seconds however many trees they have, and trees
    of a share however many tickets.
    """

    def __init__(self) -> None:
        self._shares = Rotation()
        self._by_share: dict[str, _Share] = {}
        self._num_waiting = 0
        self._max_shares = LEAST_FLOWS

    def __len__(self) -> int:
        return self._num_waiting

    def enter(self, run_id: str, seat: Seat) -> None:
        """Into its tree."""
        share = self._share(seat.share)
        waiting = share.waiting.setdefault(seat.tree, [])
        bisect.insort(waiting, (seat.rank, run_id))
        share.trees.enter(seat.tree)
        self._shares.enter(seat.share)
        self._num_waiting += 1

    def first(self) -> str | None:
        """The run id of the ticket that goes next."""
        name = self._shares.first()
        if name is None:
            return None
        share = self._by_share[name]
        tree = share.trees.first()
        return None if tree is None else share.waiting[tree][0][1]

    def num_before(self, run_id: str, seat: Seat) -> int:
        """How many go before a waiting ticket if all take as long and nobody else comes: its own tree's
        first, and of each other tree, and of each other share, as many as of its own meanwhile.
        """
        share = self._by_share[seat.share]
        waiting = share.waiting[seat.tree]
        before = bisect.bisect_left(waiting, (seat.rank, run_id))
        trees = {name: len(tickets) for name, tickets in share.waiting.items()}
        before = _meanwhile(share.trees, seat.tree, before, trees)
        shares = {name: one.num_waiting for name, one in self._by_share.items() if one.waiting}
        return _meanwhile(self._shares, seat.share, before, shares)

    def remove(self, run_id: str, seat: Seat) -> None:
        """Out of its tree."""
        share = self._by_share[seat.share]
        waiting = share.waiting[seat.tree]
        del waiting[bisect.bisect_left(waiting, (seat.rank, run_id))]
        self._num_waiting -= 1
        if not waiting:
            del share.waiting[seat.tree]
            share.trees.leave(seat.tree)
        if not share.waiting:
            self._shares.leave(seat.share)

    def charge(self, seat: Seat, seconds: float) -> None:
        """The seat's ticket is about to go, for so many seconds as far as is known."""
        self._shares.charge(seat.share, seconds)
        self._by_share[seat.share].trees.charge(seat.tree, seconds)

    def settle(self, seat: Seat, charged: float, seconds: float) -> None:
        """It took so many in the end."""
        self._shares.settle(seat.share, charged, seconds)
        self._share(seat.share).trees.settle(seat.tree, charged, seconds)

    def _share(self, name: str) -> _Share:
        if name not in self._by_share:
            if len(self._by_share) >= self._max_shares:
                kept = {n: share for n, share in self._by_share.items() if n in self._shares}
                self._by_share, self._max_shares = kept, 2 * len(kept) + LEAST_FLOWS
            self._by_share[name] = _Share()
        return self._by_share[name]
