"""What a turn's way through the gateway's lines costs: into a line of a thousand, and out to an engine.

python -m bench.flow [--waiting 1000] [--trees 50]
"""

from __future__ import annotations

import argparse
import sys
import time

from gateway.flow.admission import Admission, Charge, Ticket
from gateway.flow.classes import CLASSES, Classes, FlowHints

ROUNDS = 20_000
WORKERS = 4


def ticket(number: int, trees: int) -> Ticket:
    """One of many trees and a few tenants, in any class."""
    return Ticket(
        run_id=f"r{number}",
        line="m",
        prompt_tokens=4000,
        output_tokens=100,
        tenant=f"tenant {number % 3}",
        tree=f"tree {number % trees}",
        flow=FlowHints(flow_class=CLASSES[number % 4], priority=number % 5),
    )


def microseconds(waiting: int, trees: int) -> float:
    """CPU for one turn: entered, promotion looked for, chosen, released, settled and gone."""
    admission = Admission(Classes(), 10 * waiting, time.monotonic)
    for number in range(waiting):
        admission.enter(ticket(number, trees))
    tickets = [ticket(number, trees) for number in range(waiting, waiting + ROUNDS)]
    began = time.process_time()
    for one in tickets:
        admission.enter(one)
        admission.promote()
        for name in CLASSES:
            first = admission.first("m", name)
            if first is not None and admission.room("e", WORKERS, "m", name):
                admission.release(first.run_id, "e", Charge(3.0, 64))
                break
        held = admission.released("e")
        if len(held) == 2 * WORKERS - 1:
            admission.settle(held[0].ticket.run_id, 2.0)
            admission.leave(held[0].ticket.run_id)
    return 1e6 * (time.process_time() - began) / ROUNDS


def main() -> None:
    """Prints microseconds per turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--trees", type=int, default=50)
    given = parser.parse_args()
    cost = microseconds(given.waiting, given.trees)
    sys.stdout.write(f"{given.waiting} waiting in {given.trees} trees: {cost:.1f} us a turn\n")


if __name__ == "__main__":
    main()
