"""What may go wrong between an orchestrator and its server, typed by what the orchestrator can do about it.

Pure: knows the shape of the server's errors, no connection.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.errors import KINDS, shorten

REMEDIES = {
    "unauthorized": "Give `token=` (on the command line --token or TETRARCH_TOKEN): "
    "`tetrarch token add NAME` makes one.",
    "forbidden": "Use a token with that scope: `tetrarch token add NAME --scopes ...`.",
    "rate_limited": "Wait for `retry_after` seconds, or use a token with more calls per minute.",
    "overloaded": "Wait for `retry_after` seconds, start less at once, or use a higher class.",
    "no_engine": "`tetrarch serve` starts an engine; GET /health says which there are.",
    "bus_unavailable": "Try again: the server looks for its bus by itself.",
    "run_not_found": "Runs are kept for a week where there is room (kept_bytes), and each is its token's "
    "own: check the id and the token.",
    "idempotency_conflict": "Send the same fields under this key, or choose a new key.",
    "run_gone": "Choose a new key to run it again.",
    "run_ended": "Start a new run, or fork this one.",
    "run_live": "Cancel the run first, or wait for its end.",
}
"""By the server's error kind. For others the server's own message says what to do."""

RETRYABLE_STATUS = frozenset({429, 502, 503, 504})


class TetrarchError(Exception):
    """Base of all that the client raises. `remedy`: what to do about it, "" where `message` says it.

    TetrarchError
      Unreachable       nobody answers at that address
      Refused           the server answered with an error: `kind` names it, `status` is HTTP's
        InvalidRequest    a field is wrong: `param` names it (400, 413, 415)
        AccessDenied      no token, or not this one (401, 403, 421)
        NotFound          no such run, session, model or path (404)
        Conflict          the run's state does not allow it, or a key is taken (409)
        Busy              it cannot now, `retry_after` seconds from now it may (429, 502, 503, 504)
        ServerFault       it failed, and would again (500 and the rest)
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class Unreachable(TetrarchError):
    """No connection, a broken one, or no answer in time; after all retries."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"{url} cannot be reached: {cause}.", "Is `tetrarch serve` running there?")
        self.url = url


class Refused(TetrarchError):
    """The server answered with an error."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        status: int,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, REMEDIES.get(kind, ""))
        self.kind = kind
        self.status = status
        self.param = param
        self.retry_after = retry_after  # seconds
        self.is_retryable = status in RETRYABLE_STATUS


class InvalidRequest(Refused):
    """A field is wrong."""


class AccessDenied(Refused):
    """No token, or one that may not do this."""


class NotFound(Refused):
    """There is no such thing."""


class Conflict(Refused):
    """What is there does not allow it."""


class Busy(Refused):
    """Not now."""


class ServerFault(Refused):
    """It failed."""


class _Error(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None
    param: str | None = None


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def refused(
    status: int, body: bytes, retry_after: str | None = None, should_retry: str | None = None
) -> Refused:
    """The error in an answer that is none; `should_retry` is the header x-should-retry."""
    seconds = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
    try:
        told = msgspec.json.decode(body, type=_Body).error
    except msgspec.MsgspecError:  # somebody between us and the server
        told = _Error(f"Status {status}: {shorten(body.decode(errors='replace'), 200) or 'an empty answer'}")
    error = _kind(status)(
        told.code or f"http_{status}", told.message, status=status, param=told.param, retry_after=seconds
    )
    if should_retry is not None:
        error.is_retryable = should_retry == "true"
    return error


def told_error(error: dict[str, Any], retry_after: float | None = None) -> Refused:
    """An error object that stands in a batch's answer or in a stream. `retry_after`: seconds."""
    kind = str(error.get("code") or "internal_error")
    traits = KINDS.get(kind, KINDS["internal_error"])
    given = refused(traits.status, msgspec.json.encode({"error": error}))
    given.is_retryable, given.retry_after = traits.retryable, retry_after
    return given


def _kind(status: int) -> type[Refused]:
    if status in RETRYABLE_STATUS:
        return Busy
    named = {401: AccessDenied, 403: AccessDenied, 421: AccessDenied, 404: NotFound, 409: Conflict}
    return named.get(status, InvalidRequest if 400 <= status < 500 else ServerFault)
