"""The one account of memory: what a model and settings need, what is left for pages, what would fit instead.

Pure arithmetic: reads no file, asks no machine, allocates nothing. All sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvcache.settings import PAGE_TOKENS, KVBits

from .errors import DoesNotFit, UnsupportedModel
from .settings import EngineSettings

MEBIBYTE = 2**20
BUS_BYTES = 256 * MEBIBYTE
"""The embedded bus's usual maxmemory."""

_PROCESS_BYTES = 350 * MEBIBYTE  # interpreters and libraries of engine and gateway, tokenizer included
_USABLE_PERCENT = 90  # of the limit; the rest is the system's and the allocators' rounding
_CHUNK_ROWS = 2048  # of one prefill chunk when nobody decodes
_TILE_TOKENS = 4096  # of context that attention over pages scores at a time, at the most,
_TILE_SCORES = 2**25  # and the most scores of one such tile (kvcache/attention.py)
_LOGIT_COPIES = 6  # logits, log-probabilities, sorted values and their indices
_SMALLEST_CONTEXT = 2 * PAGE_TOKENS

HeldWeights = Literal["native", "fp32"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the arithmetic needs of a model. native_bytes is the size of its weight files."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    num_parameters: int
    native_bytes: int
    compute_bytes: int = 2  # of one activation when the weights stay native


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """Settings that cost memory. context and pool_tokens None: as much as the model has and as fits."""

    workers: int = 4
    context: int | None = None
    kv_bits: KVBits = "8"
    pool_tokens: int | None = None
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
    kv_bytes_per_token: int
    weights: HeldWeights
    scratch_bytes: int
    wired_bytes: int  # weights and pool
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


def shape_of(config: Mapping[str, Any], native_bytes: int) -> ModelShape:
    """A checked config (`families.check_config`) as a shape."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    layers, inner, vocabulary = config["num_hidden_layers"], config["intermediate_size"], config["vocab_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner + 2 * hidden
    tied = config.get("tie_word_embeddings", True)
    return ModelShape(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocabulary,
        context_length=config.get("max_position_embeddings") or 32768,
        num_parameters=layers * layer + vocabulary * hidden * (1 if tied else 2) + hidden,
        native_bytes=native_bytes,
        compute_bytes=4 if (config.get("torch_dtype") or config.get("dtype")) == "float32" else 2,
    )


def request_of(
    settings: EngineSettings, shape: ModelShape, limit_bytes: int, *, is_cpu: bool
) -> MemoryRequest:
    """What the settings ask for; `auto` weights are fp32 on a CPU where those fit, else native."""
    request = MemoryRequest(
        workers=settings.workers,
        context=settings.context,
        kv_bits=settings.kvcache.bits,
        pool_tokens=settings.kvcache.pool_tokens,
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
    """K and V of one token in every layer. Raises UnsupportedModel for a head that 8 bits cannot store."""
    if request.kv_bits == "native":
        row = shape.head_dim * _compute_bytes(shape, request)
    else:
        group = 64 if shape.head_dim % 64 == 0 else 32
        if shape.head_dim % group:
            raise UnsupportedModel(
                f"8-bit KV needs heads of a multiple of 32, not {shape.head_dim}: use --kv-bits native"
            )
        row = shape.head_dim + 4 * (shape.head_dim // group)  # codes; an fp16 scale and bias for each group
    return 2 * shape.num_layers * shape.num_kv_heads * row


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


def _compute_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    return 4 if request.weights == "fp32" else shape.compute_bytes


def _fixed(shape: ModelShape, request: MemoryRequest) -> tuple[LedgerItem, ...]:
    """Everything but the pool."""
    size = _compute_bytes(shape, request)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    rows = min(_CHUNK_ROWS, request.context or shape.context_length) + request.workers
    activations = rows * (4 * shape.hidden_size + 3 * shape.intermediate_size + 2 * heads) * size
    scores = 3 * 4 * min(rows * shape.num_heads * _TILE_TOKENS, _TILE_SCORES)
    sampling = request.workers * shape.vocab_size * 4 * _LOGIT_COPIES
    weights = 4 * shape.num_parameters if request.weights == "fp32" else shape.native_bytes
    return (
        LedgerItem("weights", weights, request.weights),
        LedgerItem("scratch", activations + scores, f"prefill chunk of {rows:,} rows; MLX's cache limit"),
        LedgerItem("sampling", sampling, "logits of each worker"),
        LedgerItem("bus", request.bus_bytes, "its maxmemory" if request.bus_bytes else "not on this machine"),
        LedgerItem("processes", _PROCESS_BYTES, "interpreters and libraries"),
    )


def _room(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> int:
    """Tokens, in whole pages, that fit beside everything else; negative when not even that fits."""
    left = limit_bytes * _USABLE_PERCENT // 100 - sum(item.num_bytes for item in _fixed(shape, request))
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
    per_token = kv_bytes_per_token(shape, request)
    note = f"{num_tokens:,} tokens of {per_token:,} B, kv-bits {request.kv_bits}"
    pool_item = LedgerItem("pages", num_tokens * per_token, note)
    weights, *others = _fixed(shape, request)
    return Ledger(
        items=(weights, pool_item, *others),
        limit_bytes=limit_bytes,
        context=context,
        num_pages=num_tokens // PAGE_TOKENS,
        kv_bytes_per_token=per_token,
        weights=request.weights,
        scratch_bytes=others[0].num_bytes,
        wired_bytes=weights.num_bytes + pool_item.num_bytes,
        bus_bytes=request.bus_bytes,
        notes=_notes(shape, request, context, num_tokens),
    )


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


def _whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


def _explanation(shape: ModelShape, request: MemoryRequest, limit_bytes: int) -> str:
    fixed = [item for item in _fixed(shape, request) if item.num_bytes]
    per_token = kv_bytes_per_token(shape, request)
    context = min(request.context or _SMALLEST_CONTEXT, shape.context_length)
    num_tokens = request.pool_tokens or context
    if context > num_tokens and num_tokens <= _room(shape, request, limit_bytes):
        return (
            f"does not fit: a context of {context:,} tokens is more than the pool's {num_tokens:,}; "
            f"would fit: --context {num_tokens}; or --pool-tokens {_whole_pages(context)}"
        )
    parts = [f"{item.name} {mebibytes(item.num_bytes)}" for item in fixed]
    parts.append(f"pages for {num_tokens:,} tokens at {per_token:,} B {mebibytes(num_tokens * per_token)}")
    total = sum(item.num_bytes for item in fixed) + num_tokens * per_token
    usable = limit_bytes * _USABLE_PERCENT // 100
    remedies = _remedies(shape, request, limit_bytes) or ["a smaller model, or more memory"]
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
        free = dataclasses.replace(base, context=None, pool_tokens=None)
        smaller = _plan(shape, free, limit_bytes)
        if smaller is not None and not found:
            name = "--context" if request.pool_tokens is None else "--pool-tokens"
            tokens = smaller.context if request.pool_tokens is None else _room(shape, free, limit_bytes)
            found.append(f"{words}{name} {tokens}")
    return found
