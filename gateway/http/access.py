"""Who may call: the names this server answers to, pages of other origins, tokens with their scopes and rates.

Knows no endpoint: what a route asks for is in its row.
"""

from __future__ import annotations

import ipaddress
import re
import time
from typing import Any

import structlog
from aiohttp import web

from gateway.callers.scopes import LOCAL, Access, namespace_of
from gateway.callers.tokens import Token, TokenError
from gateway.errors import GatewayError, RateLimited, shorten
from metrics.hosts import LOOPBACK_HOSTS

from .route import Call, Parameter, route_of
from .state import STATE, State

FORWARDED_HEADERS = ("Forwarded", "X-Real-IP", "Via")

TENANT = Parameter(
    "tenant", "For admins: another token's or group's name, or 'local' for calls without a token."
)

ACCESS_KEY = web.RequestKey("tetrarch_access", Access)

log = structlog.get_logger(__name__)


def access_of(request: web.Request) -> Access:
    """Who calls. Nobody, as long as `check_access` has not let the request in."""
    return request[ACCESS_KEY] if ACCESS_KEY in request else Access()


def tenant_of(request: web.Request) -> str:
    """Whose sessions and lists are asked for: the caller's own, or those that `?tenant=` names. Raises
    GatewayError `forbidden` for another's without the scope admin.
    """
    access, told = access_of(request), request.query.get("tenant")
    if told is None:
        return access.tenant
    tenant = "" if told == LOCAL else told
    if not access.sees(tenant):
        message = f"'tenant' is '{shorten(told)}': for another than its own a call needs the scope 'admin'."
        raise GatewayError("forbidden", message, param="tenant")
    return tenant


@web.middleware
async def check_host(request: web.Request, handler: Call) -> web.StreamResponse:
    """Only known names and the address that was called: a page that rebinds its name to it is turned away."""
    allowed = {name.lower() for name in request.app[STATE].settings.allowed_hosts}
    allowed |= LOOPBACK_HOSTS | {end_address(request, "sockname")}
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or not host_name(hosts[0]) or host_name(hosts[0]) not in allowed:
        raise GatewayError(
            "host_not_allowed",
            "The Host header names no host that this server answers for: use its loopback address, "
            "or add the name to allowed_hosts.",
        )
    return await handler(request)


@web.middleware
async def check_origin(request: web.Request, handler: Call) -> web.StreamResponse:
    """Only this server's own pages may call or open a WebSocket: with both, browsers tell a page's origin."""
    allowed = {origin.lower() for origin in request.app[STATE].settings.allowed_origins}
    host = request.headers.get("Host", "").strip().lower()
    for origin in request.headers.getall("Origin", []):
        given = origin.strip().lower()
        if given not in allowed and given not in (f"http://{host}", f"https://{host}"):
            raise GatewayError(
                "origin_not_allowed",
                "This request comes from a web page of another origin: only pages of this server may call "
                "it. Call it from a program, or add the page's origin to allowed_origins.",
            )
    return await handler(request)


@web.middleware
async def check_access(request: web.Request, handler: Call) -> web.StreamResponse:
    """A valid token, or a call from this machine without one that nobody forwarded; and the route's scope."""
    state, route = request.app[STATE], route_of(request)
    token = _token(request)
    if token is not None:
        access = _access_by_token(token, state)
    elif is_local(request):
        scopes = frozenset(state.settings.local_scopes)
        access = Access(namespace=namespace_of("", state.settings.shared_prefixes), scopes=scopes)
    else:
        raise GatewayError(
            "unauthorized",
            "A call from elsewhere needs a token: make one with `tetrarch token add NAME` and send it as "
            "'Authorization: Bearer TOKEN' or 'x-api-key: TOKEN'.",
        )
    request[ACCESS_KEY] = access
    if token is not None and (route is None or route.is_limited):
        _check_rate(token, state)
    if route is not None and not access.may(route.scope):
        whose = f"The token '{access.name}'" if token is not None else "A call without a token"
        remedy = f"send a token that has it: `tetrarch token add NAME --scopes {route.scope}`"
        raise GatewayError("forbidden", f"{whose} lacks the scope '{route.scope}': {remedy}.")
    return await handler(request)


def host_name(host: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` is `::1`."""
    found = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([^:\[\]]+)(?::\d+)?", host.strip())
    return (found[1] or found[2]).lower() if found else ""


def is_local(request: web.Request) -> bool:
    """Peer and Host are loopback and no proxy was between."""
    forwarded = any(name in request.headers for name in FORWARDED_HEADERS)
    if forwarded or any(name.lower().startswith("x-forwarded-") for name in request.headers):
        return False
    try:
        peer = ipaddress.ip_address(end_address(request, "peername"))
    except ValueError:
        return False
    return peer.is_loopback and host_name(request.headers.get("Host", "")) in LOOPBACK_HOSTS


def end_address(request: web.Request, end: str) -> str:
    """The IP address of one end of the connection, IPv4 in its own form; empty where there is none."""
    name: Any = request.transport.get_extra_info(end) if request.transport is not None else None
    address = str(name[0]) if isinstance(name, tuple) else ""
    return address.removeprefix("::ffff:")


def _access_by_token(token: Token, state: State) -> Access:
    return Access(
        name=token.name,
        tenant=token.tenant,
        namespace=namespace_of(token.tenant, state.settings.shared_prefixes),
        scopes=frozenset(token.scopes),
        flow_class=token.flow_class,
    )


def _check_rate(token: Token, state: State) -> None:
    limit = token.calls_per_minute
    if limit is None:
        limit = state.settings.calls_per_minute
    if limit:
        seconds = state.rates.take(token.name, limit, time.monotonic())
        if seconds:
            raise RateLimited(token.name, limit, seconds)


def _token(request: web.Request) -> Token | None:
    """The caller's, if it has one. Raises GatewayError for one that is wrong, from this machine too. While
    there are no tokens none is wrong: many clients send something where nothing is needed.
    """
    secret, tokens = _secret(request), request.app[STATE].tokens
    if not secret:
        return None
    try:
        token = tokens.find(secret)
        is_wrong = token is None and bool(tokens.tokens())
    except TokenError as error:
        log.error("token_file_unreadable", problem=error.message)
        return None
    if is_wrong:
        raise GatewayError(
            "unauthorized",
            "The token that was sent is none of this server's: it is mistyped or revoked. See `tetrarch "
            "token list`, make one with `tetrarch token add NAME`, or call from this machine without one.",
        )
    return token


def _secret(request: web.Request) -> str:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return request.headers.get("x-api-key", "").strip()
