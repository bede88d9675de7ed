"""Who shares prefixes: a tenant's own turns, and those of tenants that were given one namespace."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import fake_submit
from workers.messages import CancelAgents

from .engine_bench import Bench, prompt_of


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        ({"tenant": "a", "namespace": "team"}, {"tenant": "b", "namespace": "team"}, True),
        ({"tenant": "a", "namespace": "team"}, {"tenant": "b"}, False),
        ({"tenant": "a", "namespace": "team"}, {"tenant": "team"}, False),
        ({"tenant": "a", "namespace": "team"}, {"tenant": "a"}, False),
        ({"tenant": "a"}, {"tenant": "a"}, True),
        ({"tenant": "a", "namespace": "b"}, {"tenant": "a", "namespace": "c"}, False),
    ],
)
def test_prefixes_are_shared_within_a_namespace(
    first: dict[str, Any], second: dict[str, Any], is_shared: bool
) -> None:
    bench = Bench()
    bench.engine.submit(fake_submit("first", prompt_of(40), **first))
    bench.run()
    bench.engine.submit(fake_submit("second", prompt_of(40), **second))
    bench.run()
    assert (bench.end("second").usage.cached_tokens > 0) == is_shared


def test_agents_of_one_namespace_are_still_cancelled_by_tenant() -> None:
    bench = Bench()
    for tenant in ("a", "b"):
        names: dict[str, Any] = {"tenant": tenant, "namespace": "team", "session": "s", "agent": "x"}
        bench.engine.submit(fake_submit(tenant, prompt_of(40), max_tokens=20, **names))
    bench.engine.cancel_agents(CancelAgents(tenant="a", session="s"))
    bench.run()
    assert type(bench.end("a")).__name__ == "Cancelled"
    assert type(bench.end("b")).__name__ == "Finished"
