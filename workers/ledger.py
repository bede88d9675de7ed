"""The one account of memory: what a model and settings need, what is left for pages, what would fit instead.

Pure arithmetic: reads no file, asks no machine, allocates nothing. All sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvcache.settings import PAGE_TOKENS

from .errors import DoesNotFit
from .memory_request import (
    BUS_BYTES,
    HeldWeights,
    MemoryRequest,
    compute_bytes,
    kv_bytes_per_token,
    small_state_bytes,
    state_bytes,
)
from .scratch import scratch_bytes
from .settings import EngineSettings
from .shapes import ModelShape

MEBIBYTE = 2**20
GIBIBYTE = 2**30

_PROCESS_BYTES = 350 * MEBIBYTE  # interpreters and libraries of engine and gateway, tokenizer included
_USABLE_PERCENT = 90  # of the limit; the rest is the system's and the allocators' rounding
_CHUNK_ROWS = 2048  # of one prefill chunk when nobody decodes
_LOGIT_COPIES = 6  # logits, log-probabilities, sorted values and their indices
_SMALLEST_CONTEXT = 2 * PAGE_TOKENS
_USUAL_STATES = 8  # checkpoints of a hybrid's state for each worker,
_STATES_PERCENT = 25  # and the most that they take of what pages and checkpoints share, unless asked for


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Checkpoints of a hybrid's recurrent state: so many as they are, and so many small ones in 8 bits."""

    num_exact: int = 0
    num_small: int = 0


@dataclass(frozen=True, slots=True)
class LedgerItem:
    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A plan that fits. MLX's cache limit is to be scratch_bytes, its wired limit wired_bytes."""

    items: tuple[LedgerItem, ...]
    limit_bytes: int
    context: int  # tokens of prompt and answer that one turn may have
    num_pages: int
    num_states: int | None  # exact checkpoints; None for a dense model
    num_small_states: int
    kv_bytes_per_token: int
    state_bytes: int  # of one recurrent state; 0 for a dense model
    weights: HeldWeights
    scratch_bytes: int
    wired_bytes: int  # weights, pool and states
    bus_bytes: int
    notes: tuple[str, ...] = ()  # what was made smaller than asked or usual

    @property
    def total_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * PAGE_TOKENS

    def lines(self) -> list[str]:
        """One line an item, the sum against the limit, then the notes."""
        total = LedgerItem("total", self.total_bytes, f"of {mebibytes(self.limit_bytes)}")
        rows = [f"{i.name:<10}{mebibytes(i.num_bytes):>14}  {i.note}".rstrip() for i in (*self.items, total)]
        return [*rows, *self.notes]


def request_of(
    settings: EngineSettings, shape: ModelShape, limit_bytes: int, *, is_cpu: bool
) -> MemoryRequest:
    """What the settings ask for; `auto` weights are fp32 on a CPU where those fit, else native."""
    request = MemoryRequest(
        workers=settings.workers,
        context=settings.context,
        kv_bits=settings.kvcache.bits,
        pool_tokens=settings.kvcache.pool_tokens,
        states=settings.kvcache.states if settings.kvcache.prefix_cache else 0,
        small_states=settings.kvcache.small_states if settings.kvcache.prefix_cache else 0,
        weights="fp32" if settings.weights == "fp32" else "native",
        bus_bytes=_bus_bytes(settings),
    )
    if settings.weights == "auto" and is_cpu:
        return dataclasses.replace(request, weights=choose_weights(shape, request, limit_bytes))
    return request


def _bus_bytes(settings: EngineSettings) -> int:
    if settings.bus_bytes is not None:
        return settings.bus_bytes
    is_here = settings.redis_url is None or settings.redis_url.startswith("unix:")
    return BUS_BYTES if is_here else 0


def plan_memory(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> Ledger:
    """The plan with the largest pool up to 2 x workers x context tokens.

    Raises DoesNotFit with the arithmetic and the nearest settings that would fit.
    """
    ledger = _plan(shape, request, limit_bytes)
    if ledger is None:
        raise DoesNotFit(_explanation(shape, request, limit_bytes))
    return ledger


def choose_weights(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> HeldWeights:
    """For a machine that computes fastest in fp32: fp32 where the context then fits whole, else native."""
    context = min(request.context or shape.context_length, shape.context_length)
    if request.pool_tokens is not None:
        context = min(context, _whole_pages(request.pool_tokens))
    wanted = dataclasses.replace(request, weights="fp32", context=context)
    return "native" if _plan(shape, wanted, limit_bytes) is None else "fp32"


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / MEBIBYTE:,.1f} MiB"


def _fixed(shape: ModelShape, request: MemoryRequest) -> tuple[LedgerItem, ...]:
    """Everything but the pool and the checkpoints."""
    rows = min(_CHUNK_ROWS, request.context or shape.context_length) + request.workers
    scratch = scratch_bytes(shape, rows, compute_bytes(shape, request))
    sampling = request.workers * shape.vocab_size * 4 * _LOGIT_COPIES
    weights = 4 * shape.num_parameters if request.weights == "fp32" else shape.native_bytes
    return (
        LedgerItem("weights", weights, request.weights),
        LedgerItem("scratch", scratch, f"prefill chunk of {rows:,} rows; MLX's cache limit"),
        LedgerItem("sampling", sampling, "logits of each worker"),
        LedgerItem("bus", request.bus_bytes, "its maxmemory" if request.bus_bytes else "not on this machine"),
        LedgerItem("processes", _PROCESS_BYTES, "interpreters and libraries"),
    )


def _left(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> int:
    """Bytes for pages and checkpoints beside everything else; negative when not even that fits."""
    fixed = sum(item.num_bytes for item in _fixed(shape, request))
    live = request.workers * state_bytes(shape, request)
    return limit_bytes * _USABLE_PERCENT // 100 - fixed - live


def _kept_states(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> KeptStates:
    """As asked, else the usual numbers as far as there is room; exact ones one a worker at least."""
    if shape.delta is None:
        return KeptStates()
    exact_bytes, small_bytes = state_bytes(shape, request), small_state_bytes(shape, request)
    num_small = 0 if request.small_states is None and request.kv_bits == "native" else request.small_states
    left = _left(shape, request, limit_bytes)
    beside = left - _needed_tokens(shape, request) * kv_bytes_per_token(shape, request)
    share = beside if request.pool_tokens is not None else min(beside, left * _STATES_PERCENT // 100)
    num_exact = request.states
    if num_exact is None:
        one = exact_bytes + (small_bytes if num_small is None else 0)
        fitting = (share - (num_small or 0) * small_bytes) // one
        num_exact = max(request.workers, min(_USUAL_STATES * request.workers, fitting))
    if num_small is None:
        num_small = max(0, min(num_exact, (share - num_exact * exact_bytes) // small_bytes))
    return KeptStates(num_exact, num_small)


def _kept_bytes(shape: ModelShape, request: MemoryRequest, kept: KeptStates) -> int:
    exact = kept.num_exact * state_bytes(shape, request)
    return exact + kept.num_small * small_state_bytes(shape, request)


def _needed_tokens(shape: ModelShape, request: MemoryRequest) -> int:
    """The least that the pool must hold, in whole pages."""
    least = request.pool_tokens or min(request.context or _SMALLEST_CONTEXT, shape.context_length)
    return _whole_pages(least)


def _room(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> int:
    """Tokens, in whole pages, that fit beside everything else; negative when not even that fits."""
    checkpoints = _kept_bytes(shape, request, _kept_states(shape, request, limit_bytes))
    left = _left(shape, request, limit_bytes) - checkpoints
    return left // (kv_bytes_per_token(shape, request) * PAGE_TOKENS) * PAGE_TOKENS


def _plan(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> Ledger | None:
    room = _room(shape, request, limit_bytes)
    if request.pool_tokens is not None:
        pool = _whole_pages(request.pool_tokens)
        if pool > room:
            return None
        room = pool
    wanted = min(request.context or shape.context_length, shape.context_length)
    context = min(wanted, room)
    if context < (wanted if request.context is not None else min(wanted, _SMALLEST_CONTEXT)):
        return None
    usual = _whole_pages(2 * request.workers * context)
    num_tokens = room if request.pool_tokens is not None else min(usual, room)
    return _ledger(shape, request, limit_bytes, context=context, num_tokens=num_tokens)


def _ledger(
    shape: ModelShape, request: MemoryRequest, limit_bytes: int, *, context: int, num_tokens: int
) -> Ledger:
    per_token = kv_bytes_per_token(shape, request)
    states = _kept_states(shape, request, limit_bytes)
    note = f"{num_tokens:,} tokens of {per_token:,} B, kv-bits {request.kv_bits}"
    kept = [LedgerItem("pages", num_tokens * per_token, note)]
    if shape.delta is not None:
        kept.append(_states_item(shape, request, states))
    weights, *others = _fixed(shape, request)
    return Ledger(
        items=(weights, *kept, *others),
        limit_bytes=limit_bytes,
        context=context,
        num_pages=num_tokens // PAGE_TOKENS,
        num_states=None if shape.delta is None else states.num_exact,
        num_small_states=states.num_small,
        kv_bytes_per_token=per_token,
        state_bytes=state_bytes(shape, request),
        weights=request.weights,
        scratch_bytes=others[0].num_bytes,
        wired_bytes=weights.num_bytes + sum(item.num_bytes for item in kept),
        bus_bytes=request.bus_bytes,
        notes=_notes(shape, request, context, num_tokens) + _state_notes(shape, request, states),
    )


def _states_item(shape: ModelShape, request: MemoryRequest, kept: KeptStates) -> LedgerItem:
    one = state_bytes(shape, request)
    note = f"{request.workers} live, {kept.num_exact} kept, {mebibytes(one)} each"
    if kept.num_small:
        note += f"; {kept.num_small} in 8 bits, {mebibytes(small_state_bytes(shape, request))} each"
    return LedgerItem("states", request.workers * one + _kept_bytes(shape, request, kept), note)


def _notes(shape: ModelShape, request: MemoryRequest, context: int, num_tokens: int) -> tuple[str, ...]:
    notes = []
    if request.context is not None and request.context > shape.context_length:
        notes.append(f"context is {context:,}, the model's, not the {request.context:,} asked for")
    elif request.context is None and context < shape.context_length:
        notes.append(
            f"context is {context:,} of the model's {shape.context_length:,}: the pool holds no more"
        )
    if request.pool_tokens is None and num_tokens < 2 * request.workers * context:
        usual = 2 * request.workers * context
        notes.append(f"the pool is {num_tokens:,} tokens, not the usual {usual:,}: fewer prefixes are kept")
    return tuple(notes)


def _state_notes(shape: ModelShape, request: MemoryRequest, kept: KeptStates) -> tuple[str, ...]:
    if shape.delta is None:
        return ()
    notes = []
    usual = _USUAL_STATES * request.workers
    if request.states is None and kept.num_exact < usual:
        notes.append(f"{kept.num_exact} states are kept, not the usual {usual}: fewer prefixes are found")
    is_usual = request.small_states is None and request.kv_bits == "8"
    if is_usual and kept.num_small < kept.num_exact:
        notes.append(f"{kept.num_small} states are kept in 8 bits, not the usual {kept.num_exact}")
    return tuple(notes)


def _whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


def _explanation(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> str:
    fixed = [item for item in _fixed(shape, request) if item.num_bytes]
    if shape.delta is not None:
        fixed.insert(1, _states_item(shape, request, _kept_states(shape, request, limit_bytes)))
    per_token = kv_bytes_per_token(shape, request)
    context = min(request.context or _SMALLEST_CONTEXT, shape.context_length)
    num_tokens = request.pool_tokens or context
    if context > num_tokens and num_tokens <= _room(shape, request, limit_bytes):
        return (
            f"does not fit: a context of {context:,} tokens is more than the pool's {num_tokens:,}; "
            f"would fit: --context {num_tokens}; or --pool-tokens {_whole_pages(context)}"
        )
    parts = [f"{item.name} {mebibytes(item.num_bytes)}" for item in fixed]
    if shape.delta is not None:
        parts[1] += f" ({fixed[1].note})"
    parts.append(f"pages for {num_tokens:,} tokens at {per_token:,} B {mebibytes(num_tokens * per_token)}")
    total = sum(item.num_bytes for item in fixed) + num_tokens * per_token
    usable = limit_bytes * _USABLE_PERCENT // 100
    enough = -(-total * 100 // _USABLE_PERCENT // GIBIBYTE)
    more = f"a smaller model, or more memory (--memory {enough}GB)"
    remedies = _remedies(shape, request, limit_bytes) or [more]
    return (
        f"does not fit: {' + '.join(parts)} = {mebibytes(total)}, but {mebibytes(usable)} may be used "
        f"({_USABLE_PERCENT} % of {mebibytes(limit_bytes)}); would fit: {'; or '.join(remedies)}"
    )


def _remedies(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> list[str]:
    """Each changes as little as possible; the last resort changes all of them."""
    found = []
    native = dataclasses.replace(request, weights="native")
    if request.weights != "native" and _plan(shape, native, limit_bytes):
        found.append("--weights native")
    eight = dataclasses.replace(request, kv_bits="8")
    if request.kv_bits != "8" and shape.head_dim % 32 == 0 and _plan(shape, eight, limit_bytes):
        found.append("--kv-bits 8")
    for base, words in ((request, ""), (native, "--weights native ")):
        if not found:
            found += _smaller(shape, base, limit_bytes, words)
    return found + _fewer_states(shape, request, limit_bytes, is_last_hope=not found)


def _smaller(shape: ModelShape, request: MemoryRequest, limit_bytes: int, words: str) -> list[str]:
    """The largest context or pool that fits; none where even the smallest does not."""
    free = dataclasses.replace(request, context=None, pool_tokens=None)
    plan = _plan(shape, free, limit_bytes)
    if plan is None:
        return []
    if request.pool_tokens is None:
        return [f"{words}--context {plan.context}"]
    return [f"{words}--pool-tokens {_room(shape, free, limit_bytes)}"]


def _fewer_states(
    shape: ModelShape, request: MemoryRequest, limit_bytes: int, *, is_last_hope: bool
) -> list[str]:
    """The numbers that the ledger would choose, with a smaller pool too where nothing else helped."""
    asked: list[tuple[str, ...]] = [("small_states",), ("states",), ("states", "small_states")]
    asked = [names for names in asked if shape.delta and all(getattr(request, name) for name in names)]
    for names in asked:
        fewer = _with_usual(shape, request, limit_bytes, names, request)
        if _plan(shape, fewer, limit_bytes) is not None:
            return [_flags(fewer, names)]
    if not asked or not is_last_hope:
        return []
    free = dataclasses.replace(request, context=None, pool_tokens=None)
    fewer = _with_usual(shape, request, limit_bytes, asked[-1], free)
    return _smaller(shape, fewer, limit_bytes, f"{_flags(fewer, asked[-1])} ")


def _with_usual(
    shape: ModelShape, request: MemoryRequest, limit_bytes: int, names: tuple[str, ...], among: MemoryRequest
) -> MemoryRequest:
    """The request with the named numbers of states as the ledger would choose them among other settings."""
    usual: dict[str, Any] = dict.fromkeys(names)
    kept = _kept_states(shape, dataclasses.replace(among, **usual), limit_bytes)
    numbers = {"states": kept.num_exact, "small_states": kept.num_small}
    chosen: dict[str, Any] = {name: numbers[name] for name in names}
    return dataclasses.replace(request, **chosen)


def _flags(request: MemoryRequest, names: tuple[str, ...]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {getattr(request, name)}" for name in names)
