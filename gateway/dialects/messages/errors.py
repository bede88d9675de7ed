"""Anthropic's error object and its error types, by HTTP status. Pure."""

from __future__ import annotations

from gateway.dialects.frames import Body
from gateway.errors import GatewayError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Others are `invalid_request_error` below 499 and `api_error` from there on.

An engine that is starting or gone (503) is told as overloaded: clients send such a call again, also when it
failed within a stream, where its status cannot be told. The status stays 503: 529 is Anthropic's own.
"""

CODES = ("thread_unsupported_request",)
"""Kinds that Anthropic's clients know as codes: on this one they send the whole conversation instead."""


def messages_error(error: GatewayError, request_id: str = "") -> Body:
    """The error as a body; as a stream's last event where there is no `request_id`."""
    default = "invalid_request_error" if error.status < 499 else "api_error"
    told: Body = {"type": TYPES.get(error.status, default), "message": error.message}
    if error.kind in CODES:
        told["details"] = {"error_code": error.kind}
    body: Body = {"type": "error", "error": told}
    return {**body, "request_id": request_id} if request_id else body
