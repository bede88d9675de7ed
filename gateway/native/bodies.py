"""The native API's answers: how runs, lists and trees are shown. Types only."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from gateway.derail.body import DerailBody
from gateway.runs.outcomes import Status
from gateway.runs.told import AskedCall

from .structs import BudgetBody


class RunUsage(Struct, frozen=True, kw_only=True):
    """Token counts, summed over turns."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # the part of the prompts that was not computed
    completion_tokens: int = 0  # reasoning included
    reasoning_tokens: int | None = None  # None: not known before the end
    total_tokens: int = 0


class RunTimings(Struct, frozen=True, kw_only=True):
    """Summed over turns, in milliseconds."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class ResultBody(Struct, frozen=True, kw_only=True):
    """What an ended run came to."""

    text: str
    reasoning: str
    json: Any  # the answer's value where a schema was asked for and it fits; else null
    problem: str | None  # why it does not fit
    tool_calls: tuple[AskedCall, ...]
    finish_reason: str | None
    partial: bool
    truncated: bool  # it was too large to be kept whole
    dropped: bool = False  # who cancelled it did not want what it had said


class RunErrorBody(Struct, frozen=True, kw_only=True):
    """Why it did not complete."""

    code: str
    message: str
    retryable: bool


class InputBody(Struct, frozen=True, kw_only=True):
    """What it waits for: the results of these calls, or text where there are none."""

    calls: tuple[AskedCall, ...]


class ForkedFrom(Struct, frozen=True, kw_only=True):
    """Where it began."""

    run: str
    tokens: int
    dropped_call: str | None = None  # the tool call that the parent had not ended: it is not in the prompt


class CheckpointBody(Struct, frozen=True, kw_only=True):
    """A point where a fork costs nothing of what the run has computed, as long as the engine keeps that."""

    name: str
    token: int  # so many of the run's tokens are before it


class Links(Struct, frozen=True, kw_only=True):
    """Paths on this server."""

    self_: str = field(name="self")
    events: str
    tree: str | None


class RunBody(Struct, frozen=True, kw_only=True):
    """A run. The same run read twice in the same state gives the same bytes."""

    id: str
    object: Literal["run"] = "run"
    kind: str
    status: Status
    session: str
    agent: str
    parent: str
    parent_run: str | None
    fork: ForkedFrom | None
    flow_class: str = field(name="class")
    priority: int
    label: str
    metadata: dict[str, str]
    model: str
    created: int  # unix seconds
    started: float | None  # of the first turn, once the run has ended
    ended: float | None
    deadline: float | None
    turn: int
    checkpoints: tuple[CheckpointBody, ...]  # in the order of their tokens
    usage: RunUsage
    timings: RunTimings
    budget: BudgetBody
    tree_budget: BudgetBody
    result: ResultBody | None
    error: RunErrorBody | None
    derail: DerailBody | None
    input_required: InputBody | None
    links: Links


class RunLine(Struct, frozen=True, kw_only=True):
    """A run in a list; its status may be a moment old."""

    id: str
    object: Literal["run"] = "run"
    kind: str
    status: str
    session: str
    agent: str
    parent: str
    parent_run: str | None
    flow_class: str = field(name="class")
    label: str
    model: str
    created: float
    usage: RunUsage


class RunList(Struct, frozen=True, kw_only=True):
    """A page, newest first. `next`: give it as `before` for those behind; null: there are none."""

    object: Literal["list"] = "list"
    data: list[RunLine]
    next: str | None


class CreatedBody(Struct, frozen=True, kw_only=True):
    """The new run, or the one that an Idempotency-Key has made before (`replayed`)."""

    id: str
    object: Literal["run"] = "run"
    status: str
    session: str
    agent: str
    replayed: bool
    links: Links
    parent_tokens: int | None = None  # of a fork: the prompt's first tokens that are the parent's
    cached_tokens: int | None = None
    recomputed_tokens: int | None = None
    dropped_call: str | None = None  # the tool call that the parent had not ended: it is not in the prompt


class BatchItem(Struct, frozen=True, kw_only=True):
    """What became of one run of a batch: the run, or the error that a call of its own would have had."""

    status: int  # as HTTP's
    run: CreatedBody | None = None
    error: dict[str, Any] | None = None
    retry_after: int | None = None  # seconds, as the header Retry-After would have told


class BatchBody(Struct, frozen=True, kw_only=True):
    """For each run of the batch, in its order, what became of it."""

    object: Literal["batch"] = "batch"
    data: list[BatchItem]
    num_accepted: int


class VerbBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a verb was taken. Fields that do not belong to the verb are absent."""

    id: str
    status: str
    mode: str | None = None
    num_runs: int | None = None
    hold_ms: int | None = None
    cached_tokens: int | None = None
    recomputed_tokens: int | None = None
    applied: str | None = None
    turn: int | None = None
    due_ms: int | None = None


class WaitBody(Struct, frozen=True, kw_only=True):
    """Those that are done, as they are now, in the order of the call; the ids of the others."""

    object: Literal["wait"] = "wait"
    timed_out: bool
    done: list[RunBody]
    pending: list[str]


class TreeAgent(Struct, frozen=True, kw_only=True):
    """An agent with its runs, oldest first, and the agents it has called. Usage is the whole subtree's."""

    agent: str
    parent: str
    status: str  # of its newest run
    runs: list[RunLine]
    usage: RunUsage
    num_live: int  # in the whole subtree
    children: list[TreeAgent]


class TreeBody(Struct, frozen=True, kw_only=True):
    """A session's agents from its roots down."""

    object: Literal["tree"] = "tree"
    session: str
    num_runs: int
    num_live: int
    usage: RunUsage
    agents: list[TreeAgent]
