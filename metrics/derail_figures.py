"""What the gateway's detectors found and what was done about it. Kinds are few: so are the series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from .engine_figures import OTHER

KINDS = frozenset(
    {"token_cycle", "tool_flood", "tool_repeat", "tool_cycle", "text_loop", "stall", "empty", "schema"}
)


class DerailFigures:
    """Hears of each finding once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._found = Counter(
            "tetrarch_derail",
            "Times that a run was seen to go astray, and what was done: report, steer or stop",
            ["kind", "action"],
            registry=registry,
        )

    def found(self, kind: str, action: str) -> None:
        """A run went astray, and that was done about it."""
        self._found.labels(kind if kind in KINDS else OTHER, action).inc()
