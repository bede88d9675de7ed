"""The gateway's errors: what went wrong in words a caller can act on, and how HTTP says it.

Knows the OpenAI error shape; knows neither aiohttp nor the bus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one kind of error is told: HTTP status, OpenAI `type`, whether the same call may work later."""

    status: int
    type: str
    retryable: bool = False


INVALID = "invalid_request_error"
SERVER = "server_error"

KINDS: dict[str, ErrorKind] = {
    # asked for wrongly
    "invalid_field": ErrorKind(400, INVALID),
    "invalid_json": ErrorKind(400, INVALID),
    "template_error": ErrorKind(400, INVALID),
    "invalid_request": ErrorKind(400, INVALID),  # as engines, and aiohttp, find it
    "context_length_exceeded": ErrorKind(400, INVALID),
    "context_exceeded": ErrorKind(400, INVALID),  # as engines find it
    "thread_unsupported_request": ErrorKind(400, INVALID),
    "unauthorized": ErrorKind(401, "authentication_error"),
    "forbidden": ErrorKind(403, "permission_error"),
    "origin_not_allowed": ErrorKind(403, "permission_error"),
    "not_found": ErrorKind(404, INVALID),
    "model_not_found": ErrorKind(404, INVALID),
    "run_not_found": ErrorKind(404, INVALID),
    "response_not_found": ErrorKind(404, INVALID),
    "previous_response_not_found": ErrorKind(400, INVALID),
    "method_not_allowed": ErrorKind(405, INVALID),
    "idempotency_conflict": ErrorKind(409, INVALID),
    "run_gone": ErrorKind(409, INVALID),
    "run_ended": ErrorKind(409, INVALID),
    "run_live": ErrorKind(409, INVALID),
    "no_input_required": ErrorKind(409, INVALID),
    "cannot_continue": ErrorKind(409, INVALID),
    "ids_gone": ErrorKind(409, INVALID),
    "body_too_large": ErrorKind(413, INVALID),
    "unsupported_content_type": ErrorKind(415, INVALID),
    "host_not_allowed": ErrorKind(421, INVALID),
    # cannot now
    "rate_limited": ErrorKind(429, "rate_limit_error", retryable=True),
    "budget_exceeded": ErrorKind(429, "insufficient_quota"),  # until its tree's budget is another
    "overloaded": ErrorKind(429, "rate_limit_error", retryable=True),
    "queue_timeout": ErrorKind(503, SERVER, retryable=True),
    "no_engine": ErrorKind(503, SERVER, retryable=True),
    "bus_unavailable": ErrorKind(503, SERVER, retryable=True),
    "engine_lost": ErrorKind(503, SERVER, retryable=True),
    "run_lost": ErrorKind(503, SERVER, retryable=True),
    "gap": ErrorKind(503, SERVER, retryable=True),
    # ours
    "cancelled": ErrorKind(499, SERVER),
    "internal_error": ErrorKind(500, SERVER),
    # ours, and another try would end the same
    "broken_template": ErrorKind(500, SERVER),
    "grammar_error": ErrorKind(400, INVALID),  # the gateway checks most schemas before
    "grammar_dead_end": ErrorKind(500, SERVER),
    "row_fault": ErrorKind(500, SERVER),
    "out_of_pages": ErrorKind(500, SERVER),
    "upgrade_engine": ErrorKind(500, SERVER),
    "upgrade_gateway": ErrorKind(500, SERVER),
}
"""One table: kind (also the metric label and OpenAI `code`) -> status, type, retryability."""

UNKNOWN_KIND = ErrorKind(500, SERVER)


class GatewayError(Exception):
    """Base of all errors that a caller may see. `message` never holds prompt text.

    GatewayError
      InvalidField      a known field of the body has a bad type or value (400)
      UnknownModel      no engine serves that model (404)
      RunNotFound       no such run, or its events have expired (404)
      Conflict          the run is in a state that does not allow it, or a key is taken (409)
      BudgetSpent       the tree that a call belongs to has no room for it (429, not to be sent again)
      RateLimited       the token's calls per minute are used up (429, Retry-After)
      Overloaded        too many wait (429, Retry-After)
      NoEngine          no living engine can take the call now (503)
      TurnFailed        the turn ended in `Failed` or `Cancelled`
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        traits = KINDS.get(kind, UNKNOWN_KIND)
        self.kind = kind
        self.status = traits.status
        self.type = traits.type
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds
        self.retryable = traits.retryable if retryable is None else retryable

    @property
    def retry_after_seconds(self) -> int | None:
        """As the header Retry-After tells it; None: it does not."""
        return None if self.retry_after is None else max(1, math.ceil(self.retry_after))

    def body(self) -> dict[str, Any]:
        """The OpenAI error object, as every endpoint and every failed stream sends it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.kind}
        return {"error": error}


class InvalidField(GatewayError):
    """A known field of the body has a bad type or value."""

    def __init__(self, param: str | None, message: str, *, kind: str = "invalid_field") -> None:
        super().__init__(kind, message, param=param)


def context_exceeded(param: str, num_prompt_tokens: str, context_length: int) -> InvalidField:
    """The prompt leaves no room for an answer; both numbers are named."""
    return InvalidField(
        param,
        f"The prompt has {num_prompt_tokens} tokens, but the context of this model is {context_length} "
        "tokens, prompt and answer together. Shorten the prompt.",
        kind="context_length_exceeded",
    )


class UnknownModel(GatewayError):
    """No engine on this bus serves the model."""

    def __init__(self, model: str, known: list[str]) -> None:
        available = ", ".join(known) or "none now"
        super().__init__(
            "model_not_found",
            f"The model '{shorten(model)}' does not exist here. Available: {available}.",
            param="model",
        )


class RunNotFound(GatewayError):
    """The run never was, or its events have expired."""

    def __init__(self, run_id: str) -> None:
        super().__init__("run_not_found", f"There is no run '{shorten(run_id)}', or its events have expired.")


class Conflict(GatewayError):
    """What is there already does not allow it; the same call would be refused again."""


class BudgetSpent(GatewayError):
    """The budget of the tree that a call belongs to leaves no room for it."""

    def __init__(self, root: str, name: str, limit: int, used: int) -> None:
        super().__init__(
            "budget_exceeded",
            f"By its parent, agent or session this call belongs to the tree of {root}, whose budget has no "
            f"room for it: {name} is {limit}, of which {used} are used. Start a run with a larger "
            "tree_budget, or call under other names.",
        )


class RateLimited(GatewayError):
    """The token's calls per minute are used up."""

    def __init__(self, token: str, calls_per_minute: int, retry_after_seconds: float) -> None:
        super().__init__(
            "rate_limited",
            f"The token '{token}' may make {calls_per_minute} calls a minute. Try again in "
            f"{max(1, math.ceil(retry_after_seconds))} s.",
            retry_after=retry_after_seconds,
        )


class Overloaded(GatewayError):
    """Too many calls wait already."""

    def __init__(self, retry_after_seconds: float, message: str | None = None) -> None:
        seconds = max(1, round(retry_after_seconds))
        super().__init__(
            "overloaded",
            message or f"Too many calls are waiting. Try again in {seconds} s.",
            retry_after=seconds,
        )


class NoEngine(GatewayError):
    """No living engine can take the call; `kind` is bus_unavailable when the bus itself is away."""

    def __init__(self, message: str, *, kind: str = "no_engine", retry_after: float | None = 2) -> None:
        super().__init__(kind, message, retry_after=retry_after)


class StillWaiting(NoEngine):
    """What was asked for is under way and will come: asked for again, it is waited for and not done twice."""


class TurnFailed(GatewayError):
    """A turn ended in `Failed` or `Cancelled`; kind, message and retryability are the event's own."""

    def __init__(
        self, kind: str, message: str, *, retryable: bool | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(kind, message, retryable=retryable)
        if self.retryable:
            self.retry_after = 1 if retry_after is None else retry_after
            self.status = 503
        elif self.status == 503:
            self.status = 500


def shorten(value: object, limit: int = 60) -> str:
    """A value as an error message may show it: one line of UTF-8, at most `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text[: 4 * limit].encode(errors="replace").decode().split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
