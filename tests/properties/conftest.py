"""Hypothesis profiles: the same examples each time in CI, fresh ones with TETRARCH_SOAK set (`make soak`)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=100, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=3000,
    stateful_step_count=100,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.load_profile("soak" if os.environ.get("TETRARCH_SOAK") else "ci")
