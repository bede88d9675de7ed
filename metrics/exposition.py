"""The text that Prometheus scrapes. Knows no HTTP server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Text format 0.0.4: what every Prometheus reads."""


class _WithoutCreated(Collector):
    """The registry less its `_created` samples, which would nearly double the small families."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def render(registry: CollectorRegistry) -> bytes:
    """Every series of the registry in Prometheus's text format, UTF-8."""
    return generate_latest(_WithoutCreated(registry))
