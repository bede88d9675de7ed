"""One engine behind the real lines, with a clock of its own: who gets its seconds, and how long they wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gateway.flow.admission import Admission, Charge, Ticket
from gateway.flow.classes import CLASSES, Classes, FlowClass, FlowHints


@dataclass(eq=False)
class Tree:
    """A session that keeps so many calls open; `pause` seconds pass between an answer and its next call."""

    name: str
    flow_class: FlowClass
    calls: int
    seconds: Callable[[int], float]  # what its nth call takes of the engine
    tenant: str = ""
    pause: float = 0.0
    guess: float = 1.0  # what is expected of a call, over what it takes
    served: float = 0.0
    waits: list[float] = field(default_factory=list)  # from the call to a worker
    numbers: Iterator[int] = field(default_factory=itertools.count)


@dataclass(eq=False)
class Call:
    """One call under way."""

    run_id: str
    tree: Tree
    asked_at: float
    left: float
    seconds: float


@dataclass(eq=False)
class Engine:
    """Shares its seconds between the turns on its workers; others wait in the order in which they came."""

    trees: list[Tree]
    workers: int = 4
    classes: Classes = field(default_factory=Classes)
    now: float = 0.0
    line: list[Call] = field(default_factory=list)
    running: list[Call] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    coming: list[tuple[float, Tree]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(self.classes, 100_000, lambda: self.now)

    def run(self, seconds: float) -> None:
        """So long from the start."""
        self.coming = [(0.0, tree) for tree in self.trees for _ in range(tree.calls)]
        while self.now < seconds:
            self._let_in()
            self._release()
            self._step()

    def _let_in(self) -> None:
        due = [tree for at, tree in self.coming if at <= self.now]
        self.coming = [(at, tree) for at, tree in self.coming if at > self.now]
        for tree in due:
            number = next(tree.numbers)
            seconds = tree.seconds(number)
            call = Call(f"{tree.name}-{number}", tree, self.now, seconds, seconds)
            self.calls[call.run_id] = call
            flow = FlowHints(flow_class=tree.flow_class)
            self.admission.enter(
                Ticket(
                    run_id=call.run_id,
                    line="m",
                    prompt_tokens=1,
                    output_tokens=1,
                    tenant=tree.tenant,
                    tree=tree.name,
                    flow=flow,
                )
            )

    def _release(self) -> None:
        self.admission.promote()
        while (ticket := self._next()) is not None:
            call = self.calls[ticket.run_id]
            self.admission.release(call.run_id, "e", Charge(call.seconds * call.tree.guess, 1))
            self.line.append(call)
        while self.line and len(self.running) < self.workers:
            call = self.line.pop(0)
            call.tree.waits.append(self.now - call.asked_at)
            self.running.append(call)

    def _next(self) -> Ticket | None:
        for flow_class in CLASSES:
            if self.admission.room("e", self.workers, "m", flow_class):
                ticket = self.admission.first("m", flow_class)
                if ticket is not None:
                    return ticket
        return None

    def _step(self) -> None:
        comes = min((at for at, _ in self.coming), default=self.now + 3600.0)
        seconds = comes - self.now
        if self.running:
            seconds = min(seconds, min(call.left for call in self.running) * len(self.running))
        self.now += seconds
        for call in list(self.running):
            share = seconds / len(self.running)
            call.left -= share
            call.tree.served += share
        for call in [call for call in self.running if call.left < 1e-9]:
            self.running.remove(call)
            self.admission.settle(call.run_id, call.seconds)
            self.admission.leave(call.run_id)
            del self.calls[call.run_id]
            self.coming.append((self.now + call.tree.pause, call.tree))
