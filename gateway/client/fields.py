"""What a run may be asked for, as Python callers write it. Types only.

The wire's own shape, with limits and defaults, is gateway/native/structs.py's RunRequest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from gateway.flow.classes import FlowClass
from gateway.native.structs import BudgetBody as Budget
from gateway.native.structs import ForkAt
from gateway.runs.spec import OnDerail, OnEnd, Orphan
from workers.messages import Retain

Messages = Sequence[Mapping[str, Any]]
"""In OpenAI's shape."""


class RunFields(TypedDict, total=False):
    """All optional but one of `input` and `messages`. Durations are milliseconds."""

    input: str  # short for one user message
    messages: Messages
    model: str
    session: str  # whose tree and event stream it is in
    agent: str  # its name there; runs of one agent share its cache
    parent: str  # the agent that calls it
    parent_run: str  # the run that calls it; session and parent are then known
    flow_class: FlowClass  # "class" on the wire
    priority: int
    budget: Budget | Mapping[str, int]  # of this run
    tree_budget: Budget | Mapping[str, int]  # of a root and all below it
    deadline_ms: int  # from now; then it ends as expired
    queue_ttl_ms: int  # the longest a turn may wait for a worker
    expected_output_tokens: int
    heartbeat_ms: int  # see RunHandle.heartbeats
    orphan: Orphan
    hold_ms: int
    on_end: OnEnd
    derail: OnDerail
    unattended: bool  # nobody watches: what goes badly astray is stopped
    retain: Retain
    final: bool
    expects: str
    label: str
    metadata: Mapping[str, str]
    result_schema: Mapping[str, Any]  # a JSON schema that the answer must fit
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    response_format: Mapping[str, Any]
    max_tokens: int
    max_completion_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    logprobs: bool
    top_logprobs: int
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    reasoning_effort: str  # a word that the template may know
    chat_template_kwargs: Mapping[str, Any]


At = Literal["now"] | ForkAt | Mapping[str, int | str]
"""Where a fork leaves its parent: now, behind a turn `{"turn": n}` or a token
`{"token": n}`, or at a checkpoint that the run shows, `{"checkpoint": name}`.
"""


def encode_body(fields: Mapping[str, Any]) -> bytes:
    """JSON of a request's fields, under the wire's names; those that are None are left out."""
    return msgspec.json.encode(wire_fields(fields))


def wire_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A run's fields under the wire's names."""
    return {
        "class" if name == "flow_class" else name: value
        for name, value in fields.items()
        if value is not None
    }


__all__ = ["At", "Budget", "ForkAt", "Messages", "RunFields", "encode_body", "wire_fields"]
