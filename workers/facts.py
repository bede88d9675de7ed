"""What an engine publishes about itself: its tokenizer, its measured facts, and how it is doing.

Part of the bus's words: others import these from messages.py.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True):
    """All a gateway needs to turn messages into this engine's tokens."""

    tokenizer_json: bytes
    chat_template: str  # "" when the model has none: chat calls are refused
    special_tokens: dict[str, str] = {}  # bos_token, eos_token, ... as the template names them
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False  # completions: whether a raw prompt gets the BOS token


class KVFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Measured on the live pools, not read from the settings."""

    dtype: str
    bytes_per_token: float
    page_tokens: int
    num_pages: int
    pool_bytes: int


class StateFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Measured on the live arrays of a hybrid model's recurrent states."""

    dtype: str
    bytes_per_state: int
    num_states: int  # exact checkpoint rows; each worker has one live state besides
    bytes_per_small_state: int = 0
    num_small_states: int = 0  # checkpoint rows that hold a state in 8 bits
    total_bytes: int  # all checkpoint rows and live states


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is, published once per incarnation."""

    engine_id: str
    incarnation: int
    model_id: str
    digest: str  # of the TokenizerBundle
    context_length: int
    num_workers: int
    vocab_size: int
    kv: KVFacts
    states: StateFacts | None = None  # None: the model has no recurrent layers
    device: str
    weights: str  # measured dtype of the linear weights
    blas: str
    created: int  # unix seconds
    settings: dict[str, Any] = {}  # effective values by room


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is doing, published every second. Counters grow over one incarnation."""

    incarnation: int
    ready: bool  # False: stopping, or a step takes far longer than predicted (loop.why_stuck)
    reason: str = ""  # why not ready
    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_tree_pages: int = 0
    num_live_pages: int = 0  # owned by running turns
    num_tree_nodes: int = 0
    num_evicted_pages: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    num_steps: int = 0
    num_preempted: int = 0  # turns that gave their pages back and wait again
    num_free_states: int = 0
    num_free_small_states: int = 0
    num_checkpoints: int = 0  # in exact and small rows
    num_restored: int = 0  # turns that went on from a checkpoint at a position above 0
    num_evicted_states: int = 0
    num_pinned_pages: int = 0
    missed_tokens: dict[str, int] = {}  # by MissCause: tokens computed again though an earlier turn had them
    num_derailed: dict[str, int] = {}  # by DerailKind: turns that were seen to go astray
    step_age_seconds: float = 0.0  # of the step in flight, 0 when idle
    active_memory_bytes: int = 0
    peak_memory_bytes: int = 0
    prefill_tokens_per_second: float = 0.0  # moving averages, for routing and Retry-After
    decode_tokens_per_second: float = 0.0


decode_info = msgspec.msgpack.Decoder(EngineInfo).decode
decode_stats = msgspec.msgpack.Decoder(EngineStats).decode
decode_tokenizer = msgspec.msgpack.Decoder(TokenizerBundle).decode
