"""POST /v1/sessions/{session}/cancel: ends a session's runs, or those of one agent and its descendants."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.callers.hints import clean
from gateway.errors import GatewayError, InvalidField
from workers.messages import CancelAgents

from .access import tenant_of
from .fields import bad_field
from .state import STATE
from .stream import json_response


class CancelRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The optional body. A misspelt field must not end the whole session."""

    agent: str | None = None


class SessionCancelled(Struct, frozen=True):
    """How many runs were told to end."""

    session: str
    num_cancelled: int


async def post_cancel(request: web.Request) -> web.Response:
    """Tells how many runs were told to end. Safe to repeat; a call that comes later runs as usual.

    Runs of all gateways are reached, those in line too.
    """
    state = request.app[STATE]
    tenant = tenant_of(request)
    session = _name("session", request.match_info["session"])
    asked = _asked(await request.read())
    agent = "" if asked.agent is None else _name("agent", asked.agent)
    agents = state.kin.subtree(tenant, session, agent)
    root = CancelAgents(tenant=tenant, session=session, agent=agent)
    return json_response(SessionCancelled(session, await state.runs.cancel_agents(root, agents)))


def _name(field: str, given: str) -> str:
    """As the calls that gave it carry it on."""
    name = clean(given)
    if not name:
        raise bad_field(field, given)
    return name


def _asked(body: bytes) -> CancelRequest:
    if not body:
        return CancelRequest()
    try:
        return msgspec.json.decode(body, type=CancelRequest)
    except msgspec.ValidationError:
        message = "The body may hold one field, 'agent': the name of an agent. Leave it out to end them all."
        raise InvalidField("agent", message) from None
    except (msgspec.DecodeError, RecursionError):
        raise GatewayError("invalid_json", "The body is not valid JSON: leave it out or send {}.") from None
