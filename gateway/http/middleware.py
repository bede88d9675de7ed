"""What every request passes: errors as JSON, the Host allow-list, access, the content type. In this order.

Knows no endpoint.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web

from gateway.callers.tokens import Token, TokenError
from gateway.dialects.table import dialect_of
from gateway.errors import GatewayError
from gateway.tasks import kind_and_place
from metrics.hosts import LOOPBACK_HOSTS

from .state import STATE
from .stream import RUN_KEY, STREAM_KEY, TENANT_KEY, SseStream, json_response

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_KEY = web.RequestKey("tetrarch_request", str)
FORWARDED_HEADERS = ("Forwarded", "X-Real-IP", "Via")

log = structlog.get_logger(__name__)


@web.middleware
async def tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes OpenAI's error object; what nobody foresaw becomes a numbered incident."""
    # A connection's requests may share one context: what this one binds to its log lines ends with it.
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=_request_id(request))
    try:
        return await handler(request)
    except GatewayError as error:
        return await _tell(request, error)
    except web.HTTPException as answer:
        return await _tell(request, _from_http(request, answer))
    except web.RequestPayloadError:
        message = "The body does not have the length or encoding that its headers tell."
        return await _tell(request, GatewayError("invalid_json", message))
    except Exception as error:  # the border of one request
        has_left = request.transport is None or request.transport.is_closing()
        if has_left and isinstance(error, ConnectionError):
            raise  # there is nobody to tell
        return await _tell(request, _incident(error))
    finally:
        structlog.contextvars.clear_contextvars()


@web.middleware
async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Only known names and the address that was called: a page that rebinds its name to it is turned away."""
    allowed = {name.lower() for name in request.app[STATE].settings.allowed_hosts}
    allowed |= LOOPBACK_HOSTS | {_end_address(request, "sockname")}
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or not host_name(hosts[0]) or host_name(hosts[0]) not in allowed:
        raise GatewayError(
            "host_not_allowed",
            "The Host header names no host that this server answers for: use its loopback address, "
            "or add the name to allowed_hosts.",
        )
    return await handler(request)


@web.middleware
async def check_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A valid token, or a call from this machine that nobody forwarded."""
    token = _token(request)
    if token is not None:
        request[TENANT_KEY] = token.name
    elif not is_local(request):
        raise GatewayError(
            "unauthorized",
            "A call from elsewhere needs a token: make one with `tetrarch token add NAME` and send it as "
            "'Authorization: Bearer TOKEN' or 'x-api-key: TOKEN'.",
        )
    return await handler(request)


@web.middleware
async def check_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Bodies are JSON (so that no web page can post one unasked) and not too large."""
    if request.method == "POST":
        if not re.fullmatch(r"application/([\w.-]+\+)?json", request.content_type):
            raise GatewayError(
                "unsupported_content_type", "Send the body as JSON, with 'Content-Type: application/json'."
            )
        limit = request.app[STATE].settings.body_limit_bytes
        if (request.content_length or 0) > limit:
            raise too_large(limit)
    return await handler(request)


MIDDLEWARES = (tell_errors, check_host, check_access, check_body)


async def name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer carries its request's id, and its run's if it has one."""
    response.headers["x-request-id"] = _request_id(request)
    if RUN_KEY in request:
        response.headers["x-tetrarch-run"] = request[RUN_KEY]
    response.headers["X-Content-Type-Options"] = "nosniff"


def too_large(limit: int) -> GatewayError:
    """The body is over the limit."""
    return GatewayError("body_too_large", f"The body is larger than this server takes: {limit} bytes.")


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
        peer = ipaddress.ip_address(_end_address(request, "peername"))
    except ValueError:
        return False
    return peer.is_loopback and host_name(request.headers.get("Host", "")) in LOOPBACK_HOSTS


def _end_address(request: web.Request, end: str) -> str:
    """The IP address of one end of the connection, IPv4 in its own form; empty where there is none."""
    name: Any = request.transport.get_extra_info(end) if request.transport is not None else None
    address = str(name[0]) if isinstance(name, tuple) else ""
    return address.removeprefix("::ffff:")


def _token(request: web.Request) -> Token | None:
    secret = _secret(request)
    try:
        return request.app[STATE].tokens.find(secret) if secret else None
    except TokenError as error:
        log.error("token_file_unreadable", problem=error.message)
        return None


def _secret(request: web.Request) -> str:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return request.headers.get("x-api-key", "").strip()


def _request_id(request: web.Request) -> str:
    if REQUEST_KEY not in request:
        given = request.headers.get("x-request-id", "")
        is_clean = re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII)
        request[REQUEST_KEY] = given if is_clean else f"req-{uuid.uuid4().hex}"
    return request[REQUEST_KEY]


async def _tell(request: web.Request, error: GatewayError) -> web.StreamResponse:
    stream: SseStream | None = request.get(STREAM_KEY)
    if stream is not None:
        try:
            await stream.fail(error)
            await stream.response.write_eof()
        except ConnectionError:
            pass  # the client left as well
        return stream.response
    body = dialect_of(request.path).error(error, _request_id(request))
    response = json_response(body, status=error.status)
    response.headers["x-should-retry"] = "true" if error.retryable else "false"  # OpenAI's clients obey it
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        response.force_close()
    return response


def _from_http(request: web.Request, answer: web.HTTPException) -> GatewayError:
    match answer:
        case web.HTTPNotFound():
            message = (
                f"There is no {request.path[:100]} here. See GET /v1/models and POST /v1/chat/completions."
            )
            return GatewayError("not_found", message)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(answer.allowed_methods))
            message = f"{request.path[:100]} takes {allowed}, not {request.method[:20]}."
            return GatewayError("method_not_allowed", message)
        case web.HTTPRequestEntityTooLarge():
            return too_large(request.app[STATE].settings.body_limit_bytes)
    error = GatewayError("invalid_request", answer.reason)
    error.status, error.type = (
        answer.status,
        "invalid_request_error" if answer.status < 500 else "server_error",
    )
    return error


def _incident(error: Exception) -> GatewayError:
    """Logged by place and type only: an exception's text may hold a prompt."""
    number = uuid.uuid4().hex[:12]
    log.error("incident", incident=number, **kind_and_place(error))
    return GatewayError(
        "internal_error", f"Something went wrong here (incident {number}); the log names the place."
    )
