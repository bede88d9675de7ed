"""What the gateway's store let go before its time. Kinds are few: so are the series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class StoreFigures:
    """Hears of what went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._evicted = Counter(
            "tetrarch_kept_evicted",
            "Values of a kind that went before their time because the kind's share of kept_bytes was full",
            ["kind"],
            registry=registry,
        )

    def evicted(self, kind: str, number: int) -> None:
        """So many of a kind (results, call-results, responses, ids, logs)."""
        self._evicted.labels(kind).inc(number)
