"""What the lines tell to whoever counts: refusals, waits and promotions. Knows no metric."""

from __future__ import annotations

from typing import Protocol

from .classes import FlowClass


class FlowWatch(Protocol):
    """Hears of each change in the lines."""

    def waiting(self, flow_class: FlowClass, number: int) -> None:
        """So many calls of the class are in line now."""

    def released(self, flow_class: FlowClass, seconds: float) -> None:
        """A call of the class went to an engine after so long in line."""

    def promoted(self, flow_class: FlowClass) -> None:
        """A call of the class has waited so long that it counts as of the next one up."""

    def refused(self, flow_class: FlowClass, reason: str) -> None:
        """A call of the class was not taken (`queue_full`, `all_full`), or not kept (`queue_timeout`)."""


class Unwatched:
    """Nobody counts."""

    def waiting(self, flow_class: FlowClass, number: int) -> None:
        """Not counted."""

    def released(self, flow_class: FlowClass, seconds: float) -> None:
        """Not counted."""

    def promoted(self, flow_class: FlowClass) -> None:
        """Not counted."""

    def refused(self, flow_class: FlowClass, reason: str) -> None:
        """Not counted."""
