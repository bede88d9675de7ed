"""The body of POST /v1/responses: parsed at the door. Knows fields, not what items and tools become."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from gateway.http.api import AtLeastOne, CommonRequest
from gateway.http.fields import REMEDIES, bad_field, convert

NOT_STORED = "absent: this server keeps no conversations or prompt templates; send 'input' instead"

RESPONSES_REMEDIES = {
    **REMEDIES,
    "input": "a string or a list of items",
    "content": "a string or a list of parts such as {'type': 'input_text', 'text': ...}",
    "role": "'user', 'assistant', 'system' or 'developer'",
    "instructions": "a string",
    "background": "true or false",
    "store": "true or false; true with background",
    "previous_response_id": "the id of a stored response: a string",
    "conversation": NOT_STORED,
    "prompt": NOT_STORED,
    "context_management": "absent: this server does not compact conversations",
    "tools": "a list of tools such as {'type': 'function', 'name': ..., 'parameters': {...}}",
    "tool_choice": "'auto', 'none', 'required', a function or custom tool of 'tools', or allowed_tools",
    "max_output_tokens": "a whole number from 1",
    "max_tool_calls": "a whole number from 1",
    "top_logprobs": "a whole number from 0 to 20",
    "text": "an object such as {'format': {'type': 'text'}}",
    "format": "an object with a 'type': 'text', 'json_object' or 'json_schema'",
    "verbosity": "'low', 'medium' or 'high'",
    "reasoning": "an object such as {'effort': 'medium', 'summary': 'auto'}",
    "effort": "a string such as 'medium'",
    "include": "a list of strings",
    "truncation": "'auto' or 'disabled'",
    "safety_identifier": "a string",
    "service_tier": "a string",
    "call_id": "the id of a function call: a string",
    "name": "a string",
    "namespace": "a string",
    "arguments": "JSON text",
    "output": "a string or a list of parts",
    "summary": "in 'reasoning' a string, in an item a list of {'type': 'summary_text', 'text': ...}",
    "encrypted_content": "a string that came from this server",
    "id": "a string",
    "type": "a type that this server knows",
    "description": "a string",
    "parameters": "a JSON schema: an object",
    "strict": "true or false",
}


class TextOptions(Struct, frozen=True, kw_only=True):
    """`format` is checked where the schema is."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True):
    """Both are words that a model's template or this server may know; others do no harm."""

    effort: str | None = None
    summary: str | None = None

    @property
    def shows_summary(self) -> bool:
        """Whether reasoning is told as a summary, and not as text of its own."""
        return self.summary not in (None, "", "none")


class ResponsesRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/responses. What only hosted tools could use is taken and has no effect."""

    input: str | list[dict[str, Any]] = field(default_factory=list)
    instructions: str | None = None
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: AtLeastOne | None = None
    max_tool_calls: AtLeastOne | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[str] = field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    safety_identifier: str | None = None
    service_tier: str | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    @property
    def shows_logprobs(self) -> bool:
        """Whether tokens' probabilities are asked for."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in self.include


def check_body(fields: dict[str, Any]) -> ResponsesRequest:
    """A body's fields as a request. Raises InvalidField naming the first bad one."""
    request = convert(fields, ResponsesRequest, remedies=RESPONSES_REMEDIES)
    for name in ("conversation", "prompt", "context_management"):
        if getattr(request, name):
            raise bad_field(name, fields[name], remedies=RESPONSES_REMEDIES)
    if request.background and not request.store:
        raise bad_field("store", request.store, remedies=RESPONSES_REMEDIES)
    return request
