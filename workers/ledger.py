"""The one account of memory: what a model and settings need, what is left for pages, what would fit instead.

Pure arithmetic: reads no file, asks no machine, allocates nothing. All sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from kvcache.settings import PAGE_TOKENS, KVBits

from .errors import DoesNotFit, UnsupportedModel
from .scratch import scratch_bytes
from .settings import EngineSettings
from .shapes import ModelShape

MEBIBYTE = 2**20
GIBIBYTE = 2**30
BUS_BYTES = 256 * MEBIBYTE
"""The embedded bus's usual maxmemory."""

_PROCESS_BYTES = 350 * MEBIBYTE  # interpreters and libraries of engine and gateway, tokenizer included
_USABLE_PERCENT = 90  # of the limit; the rest is the system's and the allocators' rounding
_CHUNK_ROWS = 2048  # of one prefill chunk when nobody decodes
_LOGIT_COPIES = 6  # logits, log-probabilities, sorted values and their indices
_SMALLEST_CONTEXT = 2 * PAGE_TOKENS
_USUAL_STATES = 8  # checkpoints of a hybrid's state for each worker,
_STATES_PERCENT = 25  # and the most that they take of what pages and checkpoints share, unless asked for

HeldWeights = Literal["native", "fp32"]


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """Settings that cost memory. context, pool_tokens and states None: as much as is usual and as fits."""

    workers: int = 4
    context: int | None = None
    kv_bits: KVBits = "8"
    pool_tokens: int | None = None
    states: int | None = None  # checkpoints of a hybrid's recurrent state; nothing to a dense model
    weights: HeldWeights = "native"
    bus_bytes: int = BUS_BYTES  # 0 when the bus runs elsewhere


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
    num_states: int | None  # checkpoints; None for a dense model
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


def kv_bytes_per_token(shape: ModelShape, request: MemoryRequest) -> int:
    """K and V of one token in all attention layers. Raises UnsupportedModel for heads unfit for 8 bits."""
    if request.kv_bits == "native":
        row = shape.head_dim * _compute_bytes(shape, request)
    else:
        group = 64 if shape.head_dim % 64 == 0 else 32
        if shape.head_dim % group:
            raise UnsupportedModel(
                f"8-bit KV needs heads of a multiple of 32, not {shape.head_dim}: use --kv-bits native"
            )
        row = shape.head_dim + 4 * (shape.head_dim // group)  # codes; an fp16 scale and bias for each group
    return 2 * shape.num_attention_layers * shape.num_kv_heads * row


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


def state_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    """One recurrent state of all layers, with the hidden row that the head would see; 0 for a dense model."""
    if shape.delta is None:
        return 0
    size = _compute_bytes(shape, request)
    return shape.delta.state_bytes(size) + shape.hidden_size * size


def _compute_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    return 4 if request.weights == "fp32" else shape.compute_bytes


def _fixed(shape: ModelShape, request: MemoryRequest) -> tuple[LedgerItem, ...]:
    """Everything but the pool and the checkpoints."""
    rows = min(_CHUNK_ROWS, request.context or shape.context_length) + request.workers
    scratch = scratch_bytes(shape, rows, _compute_bytes(shape, request))
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


def _num_states(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> int:
    """Checkpoints to keep: as asked, else the usual number as far as there is room; one a worker at least."""
    if shape.delta is None:
        return 0
    if request.states is not None:
        return request.states
    left = _left(shape, request, limit_bytes)
    beside = left - _needed_tokens(shape, request) * kv_bytes_per_token(shape, request)
    share = beside if request.pool_tokens is not None else min(beside, left * _STATES_PERCENT // 100)
    fitting = share // state_bytes(shape, request)
    return max(request.workers, min(_USUAL_STATES * request.workers, fitting))


def _needed_tokens(shape: ModelShape, request: MemoryRequest) -> int:
    """The least that the pool must hold, in whole pages."""
    least = request.pool_tokens or min(request.context or _SMALLEST_CONTEXT, shape.context_length)
    return _whole_pages(least)


def _room(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> int:
    """Tokens, in whole pages, that fit beside everything else; negative when not even that fits."""
    checkpoints = _num_states(shape, request, limit_bytes) * state_bytes(shape, request)
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
    num_states = None if shape.delta is None else _num_states(shape, request, limit_bytes)
    note = f"{num_tokens:,} tokens of {per_token:,} B, kv-bits {request.kv_bits}"
    kept = [LedgerItem("pages", num_tokens * per_token, note)]
    if num_states is not None:
        kept.append(_states_item(shape, request, num_states))
    weights, *others = _fixed(shape, request)
    return Ledger(
        items=(weights, *kept, *others),
        limit_bytes=limit_bytes,
        context=context,
        num_pages=num_tokens // PAGE_TOKENS,
        num_states=num_states,
        kv_bytes_per_token=per_token,
        state_bytes=state_bytes(shape, request),
        weights=request.weights,
        scratch_bytes=others[0].num_bytes,
        wired_bytes=weights.num_bytes + sum(item.num_bytes for item in kept),
        bus_bytes=request.bus_bytes,
        notes=_notes(shape, request, context, num_tokens, num_states),
    )


def _states_item(shape: ModelShape, request: MemoryRequest, num_states: int) -> LedgerItem:
    one = state_bytes(shape, request)
    note = f"{request.workers} live, {num_states} kept, {mebibytes(one)} each"
    return LedgerItem("states", (request.workers + num_states) * one, note)


def _notes(
    shape: ModelShape, request: MemoryRequest, context: int, num_tokens: int, num_states: int | None
) -> tuple[str, ...]:
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
    usual_states = _USUAL_STATES * request.workers
    if num_states is not None and request.states is None and num_states < usual_states:
        notes.append(f"{num_states} states are kept, not the usual {usual_states}: fewer prefixes are found")
    return tuple(notes)


def _whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


def _explanation(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> str:
    fixed = [item for item in _fixed(shape, request) if item.num_bytes]
    if shape.delta is not None:
        fixed.insert(1, _states_item(shape, request, _num_states(shape, request, limit_bytes)))
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
    """The number that the ledger would choose, with a smaller pool too where nothing else helped."""
    if shape.delta is None or not request.states:
        return []
    usual = dataclasses.replace(request, states=None)
    if _plan(shape, usual, limit_bytes) is not None:
        return [f"--states {_num_states(shape, usual, limit_bytes)}"]
    free = dataclasses.replace(usual, context=None, pool_tokens=None)
    num_states = _num_states(shape, free, limit_bytes)
    fewer = dataclasses.replace(request, states=num_states)
    return _smaller(shape, fewer, limit_bytes, f"--states {num_states} ") if is_last_hope else []
