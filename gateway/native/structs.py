"""The native API's requests: what a run is asked for, and its verbs. Parsed at the door, trusted inside.

Unlike the compatible APIs, an unknown field is refused: a misspelt budget must not be a run without one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from gateway.flow.classes import MAX_PRIORITY, FlowClass
from gateway.http.api import ChatMessage, ChatRequest
from gateway.http.fields import REMEDIES as CHAT_REMEDIES
from gateway.runs.spec import Checkpoint, OnDerail, OnEnd, Orphan
from workers.messages import MAX_HOLD_SECONDS, Retain

MAX_BATCH = 64
MAX_WAITED = 256
MAX_LISTED = 500
MAX_WAIT_MS = 600_000
WEEK_MS = 7 * 86_400_000
MAX_TEXT_CHARS = 1 << 20
MAX_LABEL_CHARS = 200
MAX_METADATA = 16
MAX_METADATA_CHARS = 512

Tokens = Annotated[int, Meta(ge=1, le=2**31)]
Milliseconds = Annotated[int, Meta(ge=1, le=WEEK_MS)]
MAX_HOLD_MS = int(MAX_HOLD_SECONDS * 1000)
HoldMilliseconds = Annotated[int, Meta(ge=1, le=MAX_HOLD_MS)]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]
RunId = Annotated[str, Meta(pattern=r"^run-[0-9a-f]{32}$")]


class BudgetBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits; absent: none. Tokens are summed over turns, of a tree over its runs. When one is used up, the
    run ends as failed (`budget_exceeded`) and keeps what it had said.
    """

    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None  # thinking included
    thinking_tokens: Tokens | None = None
    wall_ms: Milliseconds | None = None  # since the run was accepted, pauses included
    tool_calls: Annotated[int, Meta(ge=0, le=2**31)] | None = None


class ForkAt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one: after the end of a turn (from 1), after so many tokens, the first prompt's included, or at
    a checkpoint that the run shows. At `system` a child has no messages of its parent, at `prompt` no answer.
    """

    turn: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    token: Tokens | None = None
    checkpoint: Checkpoint | None = None


class ForkBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Begin with what another run has: nothing of it is computed again where it is still kept."""

    run: RunId
    at: Literal["now"] | ForkAt = "now"


class RunRequest(ChatRequest, frozen=True, kw_only=True):
    """POST /v1/runs: a chat request, and what shall become of it. `input` is short for one user message."""

    messages: list[ChatMessage] | None = None  # type: ignore[assignment]
    input: Text | None = None
    session: str | None = None
    agent: str | None = None  # absent: the run is an agent of its own
    parent: str | None = None  # the agent that calls this one
    parent_run: RunId | None = None  # the run that calls this one; its session and agent are taken from it
    fork: ForkBody | None = None
    flow_class: FlowClass | None = field(name="class", default=None)
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    budget: BudgetBody = BudgetBody()
    tree_budget: BudgetBody | None = None  # of this run and all below it; for a root only
    deadline_ms: Milliseconds | None = None  # from now; then it ends as expired
    queue_ttl_ms: Milliseconds | None = None  # the longest a turn may wait for a worker
    expected_output_tokens: Tokens | None = None
    heartbeat_ms: Annotated[int, Meta(ge=100, le=WEEK_MS)] | None = None  # the longest silence of the caller
    orphan: Orphan = "cancel"  # what then becomes of it
    hold_ms: HoldMilliseconds | None = None  # how long a paused run's pages are kept
    on_end: OnEnd = "complete"
    derail: OnDerail = "stop"
    unattended: bool | None = None  # nobody watches: what detectors find critical ends it
    retain: Retain | None = None
    final: bool | None = None
    expects: str | None = None
    label: Annotated[str, Meta(max_length=MAX_LABEL_CHARS)] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=64)],
                Annotated[str, Meta(max_length=MAX_METADATA_CHARS)],
            ],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    result_schema: dict[str, Any] | None = None  # JSON schema that the answer must fit


CHAT_ONLY = ("stream", "stream_options", "tetrarch", "user", "prompt_cache_key", "n")
"""Fields of a chat request that mean nothing here, so that they are refused."""


class ForkRequest(RunRequest, frozen=True, kw_only=True):
    """POST /v1/runs/{id}/fork: a run's fields without `fork`; its messages go on behind the parent's."""

    at: Literal["now"] | ForkAt = "now"


class BatchRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Up to 64 runs. `all_or_nothing`: when one is refused, none goes on."""

    runs: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_BATCH)]
    all_or_nothing: bool = False


class CancelRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`graceful` ends it behind its present turn. `tree`: all that descends from it, too. Without
    `keep_partial` only the counts of a run that ends by this are kept, not what it had said, nor a response
    that it was; its events are there for the usual hour.
    """

    mode: Literal["graceful", "now"] = "now"
    tree: bool = False
    keep_partial: bool = True


class PauseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long what it computed is kept; the run itself stays paused until it is resumed."""

    hold_ms: HoldMilliseconds | None = None


class EmptyRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to say."""


class SteerRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's text: at once, behind the present turn, or in a turn of its own behind those that wait."""

    text: Text
    when: Literal["now", "next_turn", "queue"] = "now"


class OutputBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call's result."""

    call_id: Annotated[str, Meta(min_length=1, max_length=200)]
    output: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


class RespondRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of all calls that a run waits for, each once; or text where it waits for none."""

    outputs: list[OutputBody] = []
    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] | None = None


class WaitRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Waits until one or all of these runs have ended, or (`settled`) wait for input."""

    ids: Annotated[list[RunId], Meta(min_length=1, max_length=MAX_WAITED)]
    mode: Literal["any", "all"] = "all"
    until: Literal["settled", "ended"] = "settled"
    timeout_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] = 30_000


REMEDIES = {
    **CHAT_REMEDIES,
    "input": f"a string of 1 to {MAX_TEXT_CHARS} characters, instead of messages",
    "parent_run": "a run's id: run- and 32 hex digits",
    "fork": "an object {'run': id, 'at': 'now', {'turn': n}, {'token': n} or {'checkpoint': name}}",
    "run": "a run's id: run- and 32 hex digits",
    "ids": f"a list of 1 to {MAX_WAITED} run ids",
    "at": "'now', {'turn': n} or {'token': n}, counted from 1, or {'checkpoint': name}",
    "checkpoint": "'system', 'prompt', 'turn' or 'pause'",
    "turn": "a turn's number from 1",
    "token": "a number of tokens from 1",
    "budget": "an object with any of prompt_tokens, output_tokens, thinking_tokens, wall_ms, tool_calls",
    "tree_budget": "an object with any of prompt_tokens, output_tokens, thinking_tokens, wall_ms, tool_calls",
    "prompt_tokens": "a whole number from 1",
    "output_tokens": "a whole number from 1",
    "thinking_tokens": "a whole number from 1",
    "wall_ms": f"milliseconds from 1 to {WEEK_MS} (a week)",
    "tool_calls": "a whole number from 0, or of a message a list of calls",
    "deadline_ms": f"milliseconds from now, 1 to {WEEK_MS} (a week)",
    "queue_ttl_ms": f"milliseconds from 1 to {WEEK_MS} (a week)",
    "heartbeat_ms": f"milliseconds from 100 to {WEEK_MS} (a week)",
    "hold_ms": f"milliseconds from 1 to {MAX_HOLD_MS} (a day)",
    "orphan": "'cancel', 'continue' or 'pause'",
    "on_end": "'complete' or 'await_input'",
    "derail": "'stop' or 'report'",
    "unattended": "true or false",
    "label": f"a string of at most {MAX_LABEL_CHARS} characters",
    "metadata": f"an object of at most {MAX_METADATA} strings of at most {MAX_METADATA_CHARS} characters",
    "result_schema": "a JSON schema: an object",
    "runs": f"a list of 1 to {MAX_BATCH} runs",
    "all_or_nothing": "true or false",
    "tree": "true or false",
    "keep_partial": "true or false",
    "text": f"a string of 1 to {MAX_TEXT_CHARS} characters",
    "when": "'now', 'next_turn' or 'queue'",
    "outputs": "a list of {'call_id': ..., 'output': text}",
    "call_id": "the id of a call in input_required",
    "output": f"a string of at most {MAX_TEXT_CHARS} characters",
    "timeout_ms": f"milliseconds from 0 to {MAX_WAIT_MS}",
    "until": "'settled' or 'ended'",
}
"""What each field must be, for errors. `mode` differs by verb and is added there."""
