"""Notes each control verb in the audit log, as its route names it; refused ones too. Knows no endpoint."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from aiohttp import web

from gateway.audit import AuditLine
from gateway.callers.hints import clean
from gateway.errors import GatewayError

from .access import access_of, end_address
from .request_ids import request_id
from .route import Call, Route, route_of
from .state import STATE
from .stream import LEFT, RUN_KEY, has_left


@web.middleware
async def audit_verbs(request: web.Request, handler: Call) -> web.StreamResponse:
    """One line for each request to a route with a verb, once it is answered."""
    route, audit = route_of(request), request.app[STATE].audit
    if route is None or not route.verb or audit is None:
        return await handler(request)
    status, kind = 500, "internal_error"
    try:
        response = await handler(request)
        status, kind = response.status, ""
        return response
    except GatewayError as error:
        status, kind = error.status, error.kind
        raise
    except web.HTTPException as error:
        status, kind = error.status, "http_error"
        raise
    except asyncio.CancelledError:
        status, kind = LEFT, "client_left"
        raise
    except ConnectionError as error:
        if has_left(request, error):
            status, kind = LEFT, "client_left"
        raise
    finally:
        audit.note(_line(request, route, status, kind))


def _line(request: web.Request, route: Route, status: int, kind: str) -> AuditLine:
    ids = {name: clean(value) for name, value in request.match_info.items()}
    if RUN_KEY in request:
        ids["run"] = request[RUN_KEY]
    if "tenant" in request.query:
        ids["tenant"] = clean(request.query["tenant"])
    return AuditLine(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        verb=route.verb,
        method=request.method,
        path=route.path,
        ids=ids,
        token=access_of(request).name,
        peer=end_address(request, "peername"),
        status=status,
        error=kind,
        request_id=request_id(request),
    )
