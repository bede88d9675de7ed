"""Everything here runs in a network namespace that has loopback alone: see the Makefile's test-clients."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.conftest import ValkeyServer

from .agents import Workplace
from .stand import Stand, standing

IS_ALONE = [name for _, name in socket.if_nameindex()] == ["lo"]

Serve = Callable[[float], AbstractAsyncContextManager[Stand]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real agents are never run where they could reach anything."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(240))
            if not IS_ALONE:
                item.add_marker(
                    pytest.mark.skip(reason="this network is not loopback alone: make test-clients")
                )


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """An agent's folders."""
    return Workplace.at(tmp_path)


@pytest.fixture
async def serve(own_valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts a server by its prefill rate, in tokens a second."""
    yield lambda prefill_rate: standing(own_valkey, tmp_path, prefill_rate)
