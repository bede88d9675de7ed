"""GET /health: the process answers, with settings in force and measured facts. GET /ready: it would serve."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.flow.directory import EngineView
from metrics.settings import as_dict

from .state import STATE, State
from .stream import json_response


class GatewayHealth(Struct, frozen=True):
    """This process. `settings`: those in force, without secrets. `streams_followed`: streams of the bus that
    are read now, once for each reader; its own inbox is one.
    """

    settings: dict[str, Any]
    runs_live: int
    runs_waiting: int
    streams_followed: int


class Health(Struct, frozen=True, kw_only=True):
    """What is measured now. `engines`: what each tells of itself."""

    uptime_seconds: float
    bus: Literal["up", "lost"]
    gateway: GatewayHealth
    engines: list[dict[str, Any]]
    status: Literal["ok"] = "ok"


class Ready(Struct, frozen=True):
    """Whether a call would be served now, and why not."""

    ready: bool
    reasons: list[str]


async def get_health(request: web.Request) -> web.Response:
    """Always 200. Never waits for the bus or an engine."""
    state = request.app[STATE]
    return json_response(
        Health(
            uptime_seconds=round(time.monotonic() - state.started, 3),
            bus="up" if state.is_bus_up() else "lost",
            gateway=GatewayHealth(
                as_dict(state.settings),
                runs_live=state.runs.num_live,
                runs_waiting=state.runs.num_waiting,
                streams_followed=state.store.bus.num_followers,
            ),
            engines=[_engine(view) for view in state.directory.engines()],
        )
    )


async def get_ready(request: web.Request) -> web.Response:
    """200 when a call would be served now, else 503 with the reasons."""
    reasons = _reasons(request.app[STATE])
    return json_response(Ready(not reasons, reasons), status=503 if reasons else 200)


def _reasons(state: State) -> list[str]:
    reasons = [] if state.is_bus_up() else ["the message bus does not answer"]
    alive = [view for view in state.directory.engines() if view.alive]
    if not alive:
        reasons.append("no engine is alive")
    elif not any(view.stats.ready for view in alive):
        reasons += [f"engine {view.info.engine_id}: {view.stats.reason or 'not ready'}" for view in alive]
    return reasons


def _engine(view: EngineView) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(view.info)
    return {**body, "alive": view.alive, "stats": msgspec.to_builtins(view.stats)}
