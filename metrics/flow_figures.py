"""What the gateway's lines show: who waits, for how long, who was refused. By class, of which there are four.

Takes plain words and numbers: knows no turns. The shape is that of gateway/flow/watch.py.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS = (
    0.01,
    0.03,
    0.1,
    0.3,
    1.0,
    3.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    14_400.0,
    86_400.0,
)


class FlowFigures:
    """Hears of each change in the lines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting = Gauge(
            "tetrarch_class_runs_waiting",
            "Calls in this gateway's lines by the class that they came in with",
            ["class"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tetrarch_class_queue_seconds",
            "Time in this gateway's line, from coming in to being sent to an engine",
            ["class"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._promoted = Counter(
            "tetrarch_class_promotions",
            "Calls that count as of the next class up because their own was passed over for long",
            ["class"],
            registry=registry,
        )
        self._refused = Counter(
            "tetrarch_class_refusals",
            "Calls that their class's line did not take (queue_full, all_full) or keep (queue_timeout)",
            ["class", "reason"],
            registry=registry,
        )

    def waiting(self, flow_class: str, number: int) -> None:
        """So many calls of the class are in line now."""
        self._waiting.labels(flow_class).set(number)

    def released(self, flow_class: str, seconds: float) -> None:
        """A call of the class went to an engine after so long in line."""
        self._seconds.labels(flow_class).observe(seconds)

    def promoted(self, flow_class: str) -> None:
        """A call of the class counts as of the next one up."""
        self._promoted.labels(flow_class).inc()

    def refused(self, flow_class: str, reason: str) -> None:
        """A call of the class was not taken, or not kept."""
        self._refused.labels(flow_class, reason).inc()
