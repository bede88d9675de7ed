"""What the Responses API answers, as /openapi.json tells it. Types only: the teller makes the answers."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.http.shapes import AnswerExtras

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokens(Struct, frozen=True, kw_only=True):
    """Of the prompt."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(Struct, frozen=True, kw_only=True):
    """Of the answer."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Token counts of a whole response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseError(Struct, frozen=True, kw_only=True):
    """Why it failed. `type` is this server's kind of error."""

    code: str
    message: str
    type: str


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """What cut it short: `max_output_tokens` or `derailed`."""

    reason: str


class Response(Struct, frozen=True, kw_only=True):
    """The response object. What is not told here repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[dict[str, Any]]
    store: bool
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    tetrarch: AnswerExtras | UnsetType = UNSET


class ResponseEvent(Struct, frozen=True, kw_only=True):
    """The data of a server-sent event; further fields are its type's own."""

    type: str
    sequence_number: int


class ResponseDeleted(Struct, frozen=True, kw_only=True):
    """It cannot be read any more."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Struct, frozen=True, kw_only=True):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
