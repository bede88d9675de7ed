"""Hypothesis profiles: the same examples each time in CI, fresh ones with TETRARCH_SOAK set (`make soak`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

_IS_SOAK = bool(os.environ.get("TETRARCH_SOAK"))
_SOAK_SECONDS = 3600
_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=100,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],  # explaining a failure takes minutes
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=3000,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.load_profile("soak" if _IS_SOAK else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A soak outlives the timeout of an ordinary test."""
    for item in items:
        if _IS_SOAK and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_SOAK_SECONDS))
