"""What a run was asked for, as its Accepted event carries it: names, limits and what shall become of it.

Types only: knows neither time nor the bus.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from gateway.flow.classes import FlowClass
from workers.messages import Retain

Kind = Literal["call", "run"]
"""A call has one answer, and ends with its client unless it is in the background. A run is detached, and may
ask its caller for the results of tools.
"""

Orphan = Literal["cancel", "continue", "pause"]
OnEnd = Literal["complete", "await_input"]
OnDerail = Literal["stop", "report"]

Checkpoint = Literal["system", "prompt", "turn", "pause"]
"""Where an engine keeps what it computed: at the end of system text and tools, before the present turn's
answer opens, at the end of the last turn that has ended, and where the present one was paused last.
"""

CHECKPOINTS: tuple[Checkpoint, ...] = ("system", "prompt", "turn", "pause")


class Budget(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one run or of a whole tree; None: no limit. Tokens are summed over turns."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None  # thinking included
    thinking_tokens: int | None = None
    wall_ms: int | None = None  # since the run was accepted, pauses included
    tool_calls: int | None = None


class ForkPoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a child leaves its parent; at most one of the three is given, none means now."""

    run: str  # the parent's id
    turn: int | None = None  # after the end of this turn, from 1
    token: int | None = None  # after so many tokens of the parent, its first prompt's included
    checkpoint: Checkpoint | None = None
    num_tokens: int = 0  # as resolved: so many ids of the parent begin the child's prompt
    dropped_call: str | None = None  # likewise: the open tool call that is left out; "": it had no name yet

    @property
    def is_now(self) -> bool:
        """At the parent's next border."""
        return self.turn is None and self.token is None and self.checkpoint is None

    def is_behind_turn(self, last: int) -> bool:
        """It goes on behind what the run's last turn has said, and not at a token that is told exactly."""
        return self.is_now or self.turn == last

    @property
    def is_between_messages(self) -> bool:
        """It opens no answer, so that none is to be closed before the child's messages."""
        return self.checkpoint in ("system", "prompt")


class RunSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a run was asked for. Limits are checked where it is created."""

    kind: Kind = "call"
    tenant: str = ""
    namespace: str = ""  # as in Submit
    session: str = ""
    agent: str = ""
    parent: str = ""  # the agent that called this one
    parent_run: str = ""  # the run that this one was made by, if that is told
    tree: str = ""  # the run at the root of the tree, whose tree_budget counts; "": this one
    fork: ForkPoint | None = None
    body: bytes = b""  # of a run: a chat request's JSON object; of a call in the background: of ChatRequest
    is_background: bool = False  # a call that goes on without its client: its body is kept
    model: str = ""
    flow_class: FlowClass = "default"
    priority: int = 0
    expected_output_tokens: int = 0  # 0: not told
    budget: Budget = Budget()
    tree_budget: Budget = Budget()  # of the tree, told to its root
    tree_since: float | None = None  # unix seconds: when its root was accepted; None: it is the root
    deadline: float | None = None  # unix seconds
    queue_ttl_ms: int | None = None  # how long a turn may wait for a worker
    heartbeat_ms: int | None = None  # the longest silence of the caller before `orphan` applies
    orphan: Orphan = "cancel"
    hold_seconds: float = 600.0  # how long what a paused run computed is kept, unless a pause says otherwise
    on_end: OnEnd = "complete"
    result_schema: bytes = b""  # checked JSON schema of the result, as its body may tell it too; b"": none
    derail: OnDerail = "stop"
    is_unattended: bool = False  # nobody watches: what detectors find critical ends it
    retain: Retain = "session"
    is_final: bool = False
    expects: str = ""
    label: str = ""
    metadata: dict[str, str] = {}

    @property
    def is_detached(self) -> bool:
        """It outlives its client and its gateway."""
        return self.kind == "run" or self.is_background


encode_spec = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(RunSpec).decode
