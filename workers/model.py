"""Loads a model the way mlx-lm does, swaps its mixers for ours, makes the pools, and says what came of it.

Everything here runs on the engine's thread: MLX streams belong to threads, and nothing lazy may cross one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from kvcache.pages import Pools
from kvcache.rows import row_format
from kvcache.settings import PAGE_TOKENS
from kvcache.states import StateLayout, States

from . import weights
from .errors import ModelError
from .families import left_out, rope_overrides
from .fetch import Progress, cache_dir, model_name, resolve_model, silent
from .folder import check_folder, read_json
from .ledger import Ledger, plan_memory, request_of
from .linear import is_quick, quicken
from .machine import memory_limit_bytes
from .messages import KVFacts, StateFacts, TokenizerBundle, encode
from .mixers import Mixers, swap_mixers
from .runner import ModelRunner, Network
from .settings import EngineSettings, environment
from .shapes import shape_of


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on this machine, ready to run steps, with everything measured on the live arrays."""

    model_id: str
    runner: ModelRunner
    tokenizer: Tokenizer
    bundle: TokenizerBundle
    digest: str  # of the bundle
    namespace: bytes  # digest of weights and KV format: prefixes are shared within it
    context_length: int
    vocab_size: int
    kv: KVFacts
    states: StateFacts | None  # None: the model has no recurrent layers
    device: str
    weights: str
    few_rows_linear: bool
    ledger: Ledger


def load(settings: EngineSettings, *, progress: Progress = silent) -> Loaded:
    """Raises ModelError (one line: what is wrong, what to do), DoesNotFit among them."""
    folder = resolve_model(settings.model, cache_dir(environment()), progress=progress)
    config = check_folder(folder)
    tokenizer, bundle = read_tokenizer(folder, config)
    progress(f"loading {folder.name}")
    for line in left_out(config):
        progress(line)
    model = _load_lazily(folder, config)
    ledger = _plan(settings, config, folder, model)
    _hold_weights(settings, model, ledger)
    mixers = swap_mixers(model)
    dtype = _compute_dtype(model)
    pools = _make_pools(settings, mixers, ledger, dtype)
    states = _make_states(settings, mixers, ledger, dtype)
    _limit_memory(ledger)
    share = settings.kvcache.shared_reads
    return Loaded(
        model_id=model_name(settings.model),
        runner=ModelRunner(_network(model, mixers), pools, states, share_reads=share),
        tokenizer=tokenizer,
        bundle=bundle,
        digest=_digest(encode(bundle)).hex(),
        namespace=_digest(f"{_fingerprint(folder)} {ledger.weights} {pools.row.name}".encode()),
        context_length=ledger.context,
        vocab_size=config["vocab_size"],
        kv=_kv_facts(pools),
        states=_state_facts(states) if states is not None else None,
        device=str(mx.default_device()).removeprefix("Device(").rstrip(")"),
        weights=weights.linear_dtype(model),
        few_rows_linear=is_quick(model),
        ledger=ledger,
    )


def read_tokenizer(folder: Path, config: dict[str, Any]) -> tuple[Tokenizer, TokenizerBundle]:
    """The folder's tokenizer and all a gateway needs of it. Raises ModelError."""
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any broken file
        raise ModelError(f"{path}: not a tokenizer that works here ({error})") from None
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    special = _special_tokens(settings, tokenizer)
    bos = tokenizer.token_to_id(special.get("bos_token", ""))
    bundle = TokenizerBundle(
        tokenizer_json=text.encode(),
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        eos_token_ids=_eos_token_ids(folder, config, tokenizer, special),
        add_bos=bos is not None and tokenizer.encode("a").ids[:1] == [bos],
    )
    return tokenizer, bundle


def _load_lazily(folder: Path, config: dict[str, Any]) -> nn.Module:
    try:
        model, _ = load_model(folder, lazy=True, model_config=rope_overrides(config))
    except (ValueError, KeyError, TypeError, RuntimeError, ArithmeticError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise ModelError(f"{folder}: the weights do not fit the config: {reason}") from None
    return model


def _plan(settings: EngineSettings, config: dict[str, Any], folder: Path, model: nn.Module) -> Ledger:
    native_bytes = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    shape = dataclasses.replace(shape_of(config, native_bytes), compute_bytes=_compute_dtype(model).size)
    limit = settings.memory_bytes or memory_limit_bytes()
    request = request_of(settings, shape, limit, is_cpu=not mx.metal.is_available())
    return plan_memory(shape, request, limit)


def _hold_weights(settings: EngineSettings, model: nn.Module, ledger: Ledger) -> None:
    """Evaluate the weights in the form that the ledger chose."""
    if ledger.weights == "fp32":
        weights.dequantise(model)
        if settings.few_rows_linear and not mx.metal.is_available():
            quicken(model)
        return
    narrow = weights.narrow_experts(model)
    if narrow and not mx.metal.is_available():
        raise ModelError(
            f"a CPU multiplies by experts in fp32 or quantised only, not in {narrow}: "
            "use --weights fp32, or a quantised checkpoint"
        )
    mx.eval(model.parameters())


def _make_pools(settings: EngineSettings, mixers: Mixers, ledger: Ledger, dtype: mx.Dtype) -> Pools:
    attention = mixers.attention[0]
    return Pools(
        row_format(settings.kvcache.bits, attention.head_dim, dtype),
        num_layers=len(mixers.attention),
        num_pages=ledger.num_pages,
        num_kv_heads=attention.num_kv_heads,
        page_tokens=PAGE_TOKENS,
    )


def _make_states(settings: EngineSettings, mixers: Mixers, ledger: Ledger, dtype: mx.Dtype) -> States | None:
    if not mixers.recurrent:
        return None
    delta = mixers.recurrent[0]
    layout = StateLayout(
        num_layers=len(mixers.recurrent),
        num_heads=delta.num_v_heads,
        value_dim=delta.head_v_dim,
        key_dim=delta.head_k_dim,
        window_rows=delta.window_rows,
        channels=delta.channels,
        hidden_size=delta.hidden_size,
        dtype=dtype,
    )
    return States(
        layout,
        num_workers=settings.workers,
        num_rows=ledger.num_states or 0,
        num_small_rows=ledger.num_small_states,
    )


def _kv_facts(pools: Pools) -> KVFacts:
    return KVFacts(
        dtype=pools.dtype_name,
        bytes_per_token=pools.bytes_per_token,
        page_tokens=PAGE_TOKENS,
        num_pages=pools.num_pages,
        pool_bytes=pools.nbytes,
    )


def _state_facts(states: States) -> StateFacts:
    return StateFacts(
        dtype=states.dtype_name,
        bytes_per_state=states.bytes_per_state,
        num_states=states.num_rows,
        bytes_per_small_state=states.bytes_per_small_state,
        num_small_states=states.num_small_rows,
        total_bytes=states.nbytes,
    )


def _network(model: nn.Module, mixers: Mixers) -> Network:
    text = model.language_model if "language_model" in model else model
    attention = mixers.attention[0]
    return Network(
        body=text.model,
        head=text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear,
        are_recurrent=mixers.are_recurrent,
        queries_per_kv=attention.num_heads // attention.num_kv_heads,
    )


def _compute_dtype(model: nn.Module) -> mx.Dtype:
    dtype: mx.Dtype = model.model.embed_tokens(mx.array([[0]])).dtype
    return dtype


def _limit_memory(ledger: Ledger) -> None:
    mx.set_cache_limit(ledger.scratch_bytes)
    # Beyond this MLX waits for what it has begun instead of preparing more of a step ahead.
    mx.set_memory_limit(ledger.wired_bytes + ledger.scratch_bytes)
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(ledger.wired_bytes + ledger.scratch_bytes, recommended))


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    """From its own file, or from the tokenizer's settings, where several may be named."""
    own = folder / "chat_template.jinja"
    if own.exists():
        return own.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or ""
    return str(template)


def _eos_token_ids(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    """All that the config, the generation config and the tokenizer name."""
    path = folder / "generation_config.json"
    named_in = [config, read_json(path) if path.exists() else {}]
    found: set[int | None] = set()
    for value in (place.get("eos_token_id") for place in named_in):
        found |= set(value if isinstance(value, list) else [value])
    found.add(tokenizer.token_to_id(special.get("eos_token", "")))
    return tuple(sorted(token_id for token_id in found if token_id is not None))


def _special_tokens(settings: dict[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Texts of `bos_token` and its like, each written as text or as an object with its text in `content`.

    `add_bos_token` and other switches end in the same word, and some folders name tokens that they lack.
    """
    found: dict[str, str] = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str) and tokenizer.token_to_id(text) is not None:
            found[name] = text
    return found


def _fingerprint(folder: Path) -> str:
    """Names, sizes and times of the weight files: cheap, and different after any change."""
    stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
