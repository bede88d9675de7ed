"""The four classes of calls, what is set for each, and what a call tells of its place in line.

Pure: knows names and bounds; who goes next is fairness.py's and admission.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

FlowClass = Literal["system", "interactive", "default", "bulk"]
CLASSES: tuple[FlowClass, ...] = get_args(FlowClass)
"""The highest first: it goes before those behind it, up to what is kept for them."""

MAX_PRIORITY = 1000
MAX_KEPT_AHEAD = 0.5
"""What may be kept for higher classes of an engine's places, two for each worker, so that one class alone can
still have a turn on every worker."""

Floor = Annotated[
    float,
    Meta(ge=0, le=0.5, description="Share of an engine's places (two for each worker) kept for the class."),
]
QueueSize = Annotated[
    int, Meta(ge=1, le=100_000, description="Calls of the class that may wait; more get 429.")
]
QueueSeconds = Annotated[
    float,
    Meta(gt=0, le=7 * 86_400, description="Longest wait in line, in seconds; then the call ends with 503."),
]
PromoteSeconds = Annotated[
    float,
    Meta(
        gt=0,
        le=7 * 86_400,
        description="When calls of the class wait and none was taken for so many seconds, the next one "
        "counts as of the next class up.",
    ),
]


class ClassRules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for one class."""

    floor: Floor
    max_waiting: QueueSize
    timeout_seconds: QueueSeconds


class SystemRules(ClassRules, frozen=True, kw_only=True):
    """The server's own and its operator's calls. Nothing reaches this class by waiting."""

    floor: Floor = 0.125
    max_waiting: QueueSize = 64
    timeout_seconds: QueueSeconds = 300.0


class InteractiveRules(ClassRules, frozen=True, kw_only=True):
    """Somebody sits before the answer."""

    floor: Floor = 0.125
    max_waiting: QueueSize = 128
    timeout_seconds: QueueSeconds = 600.0


class DefaultRules(ClassRules, frozen=True, kw_only=True):
    """Calls that tell no class: an orchestrator's sub-agents."""

    floor: Floor = 0.25
    max_waiting: QueueSize = 512
    timeout_seconds: QueueSeconds = 3600.0
    promote_seconds: PromoteSeconds = 60.0


class BulkRules(ClassRules, frozen=True, kw_only=True):
    """What may take all night."""

    floor: Floor = 0.125
    max_waiting: QueueSize = 1024
    timeout_seconds: QueueSeconds = 86_400.0
    promote_seconds: PromoteSeconds = 120.0


class Classes(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of all classes."""

    system: SystemRules = SystemRules()
    interactive: InteractiveRules = InteractiveRules()
    default: DefaultRules = DefaultRules()
    bulk: BulkRules = BulkRules()

    def __post_init__(self) -> None:
        kept = self.system.floor + self.interactive.floor + self.default.floor
        if kept > MAX_KEPT_AHEAD:
            raise ValueError(
                f"the floors of system, interactive and default add up to {kept:g}, so that workers idle "
                f"when only bulk calls wait: make it {MAX_KEPT_AHEAD:g} at most"
            )

    def rules(self, flow_class: FlowClass) -> ClassRules:
        """What holds for that class."""
        rules: ClassRules = getattr(self, flow_class)
        return rules

    def promote_seconds(self, flow_class: FlowClass) -> float:
        """How long others may pass the class over before its next call counts as of the next one up."""
        rules = self.rules(flow_class)
        return rules.promote_seconds if isinstance(rules, DefaultRules | BulkRules) else math.inf

    def floor_places(self, flow_class: FlowClass, num_places: int) -> int:
        """How many of an engine's places are kept for that class: whole ones only."""
        return int(self.rules(flow_class).floor * num_places)


def next_up(flow_class: FlowClass) -> FlowClass:
    """The class before this one."""
    return CLASSES[max(0, CLASSES.index(flow_class) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowHints:
    """What a call tells of its place in line."""

    flow_class: FlowClass = "default"
    priority: int = 0  # the higher goes first, among the calls of its own tree only
    expected_output_tokens: int | None = None  # None: not told
    deadline: float | None = None  # unix seconds; of equal priority the earliest goes first
    has_own_limit: bool = False  # it has told how long it may wait: its class's timeout does not count


NORMAL = FlowHints()
