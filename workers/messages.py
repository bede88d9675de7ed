"""The bus's words: what gateways send to an engine, what an engine answers, and where both are kept.

Imports msgspec only: the gateway imports this module and no other of this room.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .facts import EngineInfo as EngineInfo
from .facts import EngineStats as EngineStats
from .facts import KVFacts as KVFacts
from .facts import StateFacts as StateFacts
from .facts import TokenizerBundle as TokenizerBundle
from .facts import decode_info as decode_info
from .facts import decode_stats as decode_stats
from .facts import decode_tokenizer as decode_tokenizer

VERSION = 1
"""Raised when an older reader would misread a message; a reader refuses a message above its own."""

KEY_PREFIX = "tetrarch:1:"
RUN_END_ID = "18446744073709551615-18446744073709551615"
"""The largest stream id there is: a run's end is written under it, so a second end is impossible."""

EVENT_FIELD = b"e"
"""Every stream entry has this one field; its value is one encoded message."""

LEASE_SECONDS = 3.0


def inbox_key(engine_id: str) -> str:
    """Stream of `ToEngine` for one engine."""
    return f"{KEY_PREFIX}engine:{engine_id}:inbox"


def engine_key(engine_id: str) -> str:
    """Hash of one engine: fields `info` (EngineInfo) and `stats` (EngineStats)."""
    return f"{KEY_PREFIX}engine:{engine_id}"


def engine_lease_key(engine_id: str) -> str:
    """Holds the living incarnation's number as text; expires after LEASE_SECONDS without renewal."""
    return f"{KEY_PREFIX}engine:{engine_id}:lease"


def engine_incarnation_key(engine_id: str) -> str:
    """Counter: each start of an engine increments it."""
    return f"{KEY_PREFIX}engine:{engine_id}:incarnation"


ENGINES_KEY = f"{KEY_PREFIX}engines"
"""Set of engine ids ever started on this bus."""

RUNS_LIVE_KEY = f"{KEY_PREFIX}runs:live"
"""Set of run ids that have no end yet."""


def gateway_lease_key(gateway_id: str) -> str:
    """Holds `1` while the gateway lives; expires after LEASE_SECONDS without renewal."""
    return f"{KEY_PREFIX}gateway:{gateway_id}:lease"


def run_events_key(run_id: str) -> str:
    """Stream of `Event` for one run; ids are `<attempt>-<sequence>`."""
    return f"{KEY_PREFIX}run:{run_id}:events"


def run_attendant_key(run_id: str) -> str:
    """Holds the id of the gateway that stands in for the run's own, dead one; expires without renewal."""
    return f"{KEY_PREFIX}run:{run_id}:attendant"


def tokenizer_key(digest: str) -> str:
    """String: the encoded TokenizerBundle with this digest."""
    return f"{KEY_PREFIX}tokenizer:{digest}"


def event_id(attempt: int, sequence: int) -> str:
    """The stream id of an event; sequence counts from 1, the gateway's own event, within its attempt."""
    return f"{attempt}-{sequence}"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower, omit_defaults=True):
    """Base of everything on the bus. Unknown fields are ignored, so a field may be added with a default."""

    v: int = VERSION


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one turn picks its tokens. The neutral values switch a transformation off."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: drawn afresh by the engine
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only


Retain = Literal["session", "ephemeral", "pin"]
"""What becomes of a turn's prefix: kept as others are, first to go, or kept from eviction (capped)."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a turn's text must spell, and from where on.

    The turn ends as soon as nothing may follow, and never by itself before its text is complete.
    """

    source: str  # in llguidance's dialect of Lark; special tokens other than workers.text.MARKS have no text
    after: str | None = None  # it applies behind this text (the end of thinking); None: from the start


class Submit(Message, frozen=True, kw_only=True):
    """One turn for one engine."""

    run_id: str
    attempt: int
    incarnation: int  # of the engine that shall run it; another one drops it without an answer
    digest: str  # of the TokenizerBundle that made token_ids
    token_ids: bytes  # prompt, little-endian uint32
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tenant: str = ""  # whose turn it is: agents' names and sessions are unique within it
    namespace: str = ""  # prefixes are shared within it, over tenants; "": the tenant shares with nobody
    agent: str = ""  # who calls; it returns to its last worker when that is free
    session: str = ""  # the tree of agents that this one belongs to; agents' names are unique within it
    parent: str = ""  # the agent that called this one, in the same session
    fork_tokens: int = 0  # the prompt's first tokens that are the parent's; 0: not told
    expects: str = ""  # the tool whose result the agent's next prompt will bring; "": not told
    is_final: bool = False  # the agent does not come back: what only it uses may go at once
    retain: Retain = "session"
    system_tokens: int = 0  # prompt length at the end of system text and tools; 0: not told
    turn_tokens: int = 0  # prompt length before the generation prompt; 0: the whole prompt
    explain: bool = False  # a miss may be told with the tokens on each side
    generated_tokens: int = (
        0  # the last of token_ids that this turn generated before it was paused: sampling,
    )
    # text and usage go on behind them; max_tokens counts them too, and their text is not sent again
    most_cached: int | None = None  # usage tells no more as cached: the rest an earlier attempt has computed
    grammar: Grammar | None = None
    stops_derailed: bool = True  # a token cycle ends the turn; False: it is told once and goes on


MAX_HOLD_SECONDS = 86_400.0
"""A paused run's prefix is held for so long at most."""


class Pause(Message, frozen=True, kw_only=True):
    """Ends a turn in Paused at the next step or chunk border; what it computed is pinned softly for a while.

    The pin goes when the run's next Submit starts, at a Cancel of the run, or when nothing else can be had.
    """

    run_id: str
    attempt: int
    hold_seconds: float = 600.0


class Cancel(Message, frozen=True, kw_only=True):
    """Ends a turn at the next step border, wherever it is. Harmless for an unknown or ended turn."""

    run_id: str
    attempt: int


class CancelAgents(Message, frozen=True, kw_only=True):
    """Ends the turns of one agent and of all its descendants, and lets go of what they keep.

    A turn of theirs that the engine receives later runs as usual. agent "" is the whole session.
    """

    session: str
    tenant: str = ""
    agent: str = ""


class Note(Message, frozen=True, kw_only=True):
    """What a gateway has found of a turn, for the engine to tell among the turn's events, in its order.

    Harmless for an unknown or ended turn.
    """

    run_id: str
    attempt: int
    what: Derail


ToEngine = Submit | Pause | Cancel | CancelAgents | Note


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a turn. cached_tokens is the part of prompt_tokens that was not computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a turn's time went, measured by the engine; all in seconds."""

    worker: int | None = None  # None: never reached a worker
    queue_seconds: float = 0.0  # received -> worker
    prefill_seconds: float = 0.0  # worker -> first token
    decode_seconds: float = 0.0  # first token -> last token


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate token: id, its bytes, natural-log probability before temperature and penalties."""

    token_id: int
    token: bytes
    logprob: float


class ChosenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The sampled token and the most likely ones at its position, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Accepted(Message, frozen=True, kw_only=True):
    """First event of a run (id 0-1), written by its gateway: creating the stream claims the run id."""

    model: str
    engine_id: str
    created: int  # unix seconds
    at: float = 0.0  # the same, not cut: what limits count from
    prompt_tokens: int
    gateway: str = ""  # its lease keeps the run alive
    request: msgspec.Raw = msgspec.Raw(b"\xc0")  # what a resuming gateway needs to shape the answer
    spec: bytes = b""  # the gateway's RunSpec; b"": a plain call
    system_tokens: int = 0  # as in its first Submit
    turn_tokens: int = 0


class Dispatched(Message, frozen=True, kw_only=True):
    """The gateway sent this attempt to an engine: id `<attempt>-1`, so an engine's own events start at 2."""

    engine_id: str
    incarnation: int
    turn: int = 1  # of the run; a turn that was paused or lost is sent again under its number
    cached_tokens: int = 0  # of its prompt, that the gateway believed to be in that engine's cache
    reason: str = ""  # why it chose that engine: gateway/flow/router.py


MissCause = Literal["diverged", "evicted", "never_published", "other_namespace"]


class Missed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why over a thousand tokens that an earlier turn of the same agent had are computed again."""

    cause: MissCause
    position: int  # index of the first token that differs, or that is not kept any more
    page: int  # of the prompt, that this token falls in
    recomputed_tokens: int  # that the earlier turn had
    before: tuple[int, ...] = ()  # the earlier turn's tokens from `position` on, if the caller may see them
    now: tuple[int, ...] = ()  # this prompt's


class Started(Message, frozen=True, kw_only=True):
    """The turn has a worker; prefill begins after its cached tokens."""

    worker: int
    cached_tokens: int
    missed: Missed | None = None


class Progress(Message, frozen=True, kw_only=True):
    """Prefill so far: prompt tokens in the cache, cached ones included."""

    processed_tokens: int
    prompt_tokens: int


class Tokens(Message, frozen=True, kw_only=True):
    """Generated tokens and the text that became certain with them; either may be empty."""

    token_ids: bytes  # little-endian uint32
    text: str
    logprobs: tuple[ChosenLogprob, ...] = ()


DerailKind = Literal[
    "token_cycle", "tool_flood", "tool_repeat", "tool_cycle", "text_loop", "stall", "empty", "schema"
]


DerailAction = Literal["report", "steer", "stop"]


class Derail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a turn went astray. Told to the caller; `excerpt` is the caller's own text and is never logged."""

    derail: DerailKind
    severity: Literal["warning", "critical"] = "critical"
    first_token: int = 0  # index among the turn's generated tokens where it began
    excerpt: str = ""  # at most 200 characters of what repeats
    action: DerailAction = "report"  # what is done about it


class Derailed(Message, frozen=True, kw_only=True):
    """The turn goes astray; it goes on unless a terminal event follows."""

    what: Derail


class Finished(Message, frozen=True, kw_only=True):
    """Terminal: the turn ended by itself. reason is `stop`, `length` or `derailed` (after a Derailed)."""

    reason: str
    usage: Usage
    timings: Timings
    stop_text: str | None = None  # the stop string that ended it


class Paused(Message, frozen=True, kw_only=True):
    """Terminal for the attempt: a Pause was obeyed. Held-back text is not sent; a resumed turn sends it."""

    usage: Usage
    timings: Timings


class Cancelled(Message, frozen=True, kw_only=True):
    """Terminal: a Cancel was obeyed."""

    usage: Usage
    timings: Timings


class Failed(Message, frozen=True, kw_only=True):
    """Terminal: error names the kind (a metric label), message says what to do. `retry_after`: in so many
    seconds, where that is known.
    """

    error: str
    message: str
    retryable: bool = False
    retry_after: float | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()


class RunEnded(Message, frozen=True, kw_only=True):
    """The end of a run, under RUN_END_ID. error and message say why it did not complete, where its last
    turn's end does not.
    """

    state: str  # completed, cancelled, failed, expired, rejected or derailed
    error: str = ""
    message: str = ""


TurnEnd = Finished | Paused | Cancelled | Failed
Event = (
    Accepted
    | Dispatched
    | Started
    | Progress
    | Tokens
    | Derailed
    | Finished
    | Paused
    | Cancelled
    | Failed
    | RunEnded
)


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
