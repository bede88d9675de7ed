"""The cache's settings: how rows are stored, how many tokens are kept, whether prefixes are reused."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

PAGE_TOKENS = 64
"""Tokens in one page."""

KVBits = Literal["8", "native"]


class KVCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine's cache.

    bits: "8" stores int8 codes with fp16 scales, "native" the model's compute dtype.
    pool_tokens: tokens that the pool holds, in whole pages; None lets the memory ledger choose.
    states: checkpoints of a hybrid model's recurrent state that are kept; None lets the memory ledger choose.
    shared_reads: a prefix that running turns share is attended once for all of them.
    small_states: more of them, in 8 bits, for those that give up their place. None by default: what a state
    loses is felt by every later token (docs/decisions/002).
    prefix_cache: False computes every prompt from its first token and keeps nothing after a turn.
    """

    bits: KVBits = "8"
    pool_tokens: int | None = None
    states: int | None = None
    small_states: int = 0
    prefix_cache: bool = True
    shared_reads: bool = True

    def __post_init__(self) -> None:
        check(self)


def check(settings: KVCacheSettings) -> None:
    """Raises ValueError that names the field, its value and the remedy."""
    if settings.bits not in get_args(KVBits):
        raise ValueError(f"bits is {settings.bits!r}: use '8' (smaller) or 'native' (exact)")
    if settings.pool_tokens is not None and settings.pool_tokens < PAGE_TOKENS:
        raise ValueError(
            f"pool_tokens is {settings.pool_tokens}: use at least {PAGE_TOKENS} (one page), "
            "or leave it out and the memory ledger chooses"
        )
    if settings.states is not None and settings.states < int(settings.prefix_cache):
        raise ValueError(
            f"states is {settings.states}: use at least 1, or leave it out and the memory ledger chooses; "
            "prefix_cache false keeps none"
        )
    if settings.small_states < 0:
        raise ValueError(f"small_states is {settings.small_states}: use 0 (none) or more")
