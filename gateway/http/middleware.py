"""What every request passes: errors as JSON, the audit, access, the content type. In this order.

Knows no endpoint.
"""

from __future__ import annotations

import re
import uuid

import structlog
from aiohttp import hdrs, web

from gateway.dialects.table import dialect_of
from gateway.errors import GatewayError
from gateway.tasks import kind_and_place

from .access import check_access, check_host, check_origin
from .auditing import audit_verbs
from .request_ids import request_id
from .route import Call
from .state import STATE
from .stream import LEFT, RUN_KEY, STREAM_KEY, SseStream, has_left, json_response

log = structlog.get_logger(__name__)


@web.middleware
async def tell_errors(request: web.Request, handler: Call) -> web.StreamResponse:
    """Every failure becomes its API's error object; what nobody foresaw becomes a numbered incident."""
    # A connection's requests may share one context: what this one binds to its log lines ends with it.
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id(request))
    try:
        return await handler(request)
    except GatewayError as error:
        return await _tell(request, error)
    except web.HTTPException as answer:
        response = await _tell(request, _from_http(request, answer))
        if hdrs.ALLOW in answer.headers:
            response.headers[hdrs.ALLOW] = answer.headers[hdrs.ALLOW]
        return response
    except web.RequestPayloadError:
        message = "The body does not have the length or encoding that its headers tell."
        return await _tell(request, GatewayError("invalid_json", message))
    except Exception as error:  # noqa: BLE001 - the border of one request
        if has_left(request, error):
            return _untold(request)
        return await _tell(request, _incident(error))
    finally:
        structlog.contextvars.clear_contextvars()


@web.middleware
async def check_body(request: web.Request, handler: Call) -> web.StreamResponse:
    """Bodies are JSON (so that no web page can post one unasked) and not too large."""
    if request.method not in ("GET", "HEAD") and request.can_read_body:
        if not re.fullmatch(r"application/([\w.-]+\+)?json", request.content_type):
            raise GatewayError(
                "unsupported_content_type", "Send the body as JSON, with 'Content-Type: application/json'."
            )
        limit = request.app[STATE].settings.body_limit_bytes
        if (request.content_length or 0) > limit:
            raise too_large(limit)
    return await handler(request)


MIDDLEWARES = (tell_errors, audit_verbs, check_host, check_origin, check_access, check_body)


async def name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer carries its request's id, and its run's if it has one."""
    response.headers["x-request-id"] = response.headers["request-id"] = request_id(request)
    if RUN_KEY in request:
        response.headers["x-tetrarch-run"] = request[RUN_KEY]
    response.headers["X-Content-Type-Options"] = "nosniff"


def too_large(limit: int) -> GatewayError:
    """The body is over the limit."""
    return GatewayError("body_too_large", f"The body is larger than this server takes: {limit} bytes.")


async def _tell(request: web.Request, error: GatewayError) -> web.StreamResponse:
    stream: SseStream | None = request.get(STREAM_KEY)
    if stream is not None:
        try:
            await stream.fail(error)
            await stream.response.write_eof()
        except ConnectionError:
            pass  # the client left as well
        return stream.response
    dialect = dialect_of(request.path, request.headers.get("anthropic-version"))
    body = dialect.error(error, request_id(request))
    response = json_response(body, status=error.status)
    response.headers["x-should-retry"] = "true" if error.retryable else "false"  # OpenAI's clients obey it
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        response.force_close()
    return response


def _untold(request: web.Request) -> web.StreamResponse:
    """There is nobody to tell. What a handler raises the server logs as its own fault; that an answer cannot
    be sent it takes as it is.
    """
    stream: SseStream | None = request.get(STREAM_KEY)
    return stream.response if stream is not None else web.Response(status=LEFT)


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
