"""POST /v1/sessions/{session}/cancel: ends a session's runs, or those of one agent and its descendants."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from workers.messages import CancelAgents

from .api import bad_field
from .errors import GatewayError
from .state import STATE
from .stream import TENANT_KEY, json_response


class CancelRequest(Struct, frozen=True):
    """The optional body."""

    agent: Annotated[str, Meta(min_length=1)] | None = None


async def post_cancel(request: web.Request) -> web.Response:
    """Tells how many runs were told to end. Safe to repeat; a call that comes later runs as usual.

    Runs that other gateways have in line are not reached, those on engines are.
    """
    state = request.app[STATE]
    tenant, session = request.get(TENANT_KEY, ""), request.match_info["session"]
    agent = _asked(await request.read()).agent or ""
    agents = state.kin.subtree(tenant, session, agent)
    root = CancelAgents(tenant=tenant, session=session, agent=agent)
    return json_response({"session": session, "num_cancelled": await state.runs.cancel_agents(root, agents)})


def _asked(body: bytes) -> CancelRequest:
    if not body:
        return CancelRequest()
    try:
        return msgspec.json.decode(body, type=CancelRequest)
    except msgspec.ValidationError:
        raise bad_field("agent", "not usable", remedy="the name of an agent, or absent for all") from None
    except (msgspec.DecodeError, RecursionError):
        raise GatewayError("invalid_json", "The body is not valid JSON: leave it out or send {}.") from None
