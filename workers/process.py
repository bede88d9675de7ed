"""The engine process: the main thread loads the model, from then on it is the engine thread, and serves.

Owns the order in which libraries are loaded (OpenBLAS before anything imports MLX), and how it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from kvcache.cache import Cache
from kvcache.settings import KVCacheSettings
from metrics.settings import as_dict

from .bus import check_bus
from .engine import Engine
from .errors import SettingsError
from .grammar import GrammarLimits, Grammars
from .loop import EngineLoop, Memory, Parts
from .machine import describe_device, load_blas
from .messages import EngineInfo
from .pace import PaceLimits
from .settings import EngineSettings, supervisor_descriptor
from .signals import StopWatch
from .text import Detokenizer
from .turn import TurnRules

if TYPE_CHECKING:
    from .model import Loaded

STOP_PATIENCE_SECONDS = 10.0
"""A step in flight ends well before; one that does not is left with exit code 1."""

CPU_STEP_SECONDS = 0.12
GPU_STEP_SECONDS = 0.3
CPU_MIN_ROWS = 20
GPU_MIN_ROWS = 32
"""Of a prefill chunk beside decoding turns. A CPU is over its budget by then: fewer rows keep gaps short."""

log = structlog.get_logger(__name__)

Loader = Callable[[EngineSettings], Parts]


def run_engine(settings: EngineSettings, load: Loader | None = None) -> int:
    """Serves until a signal, or until the supervisor is gone; then 0. In the main thread only.

    Raises WorkersError: what cannot be loaded or served, in one line.
    """
    if settings.redis_url is None:
        raise SettingsError("no bus: give --redis-url or TETRARCH_REDIS_URL, or use `tetrarch serve`")
    found = check_bus(settings.redis_url)  # loading a model for nothing takes long
    watch = StopWatch()
    descriptor = supervisor_descriptor()
    if descriptor is None:  # else `serve` has told it
        for doubt in found:
            log.warning("doubtful bus", problem=doubt)
    else:
        watch.watch_supervisor(descriptor)
    parts = (load or load_parts)(settings)
    loop = EngineLoop(parts, settings.redis_url)
    watch.arm(loop.stop, patience_seconds=STOP_PATIENCE_SECONDS)
    try:
        loop.run()
    finally:
        watch.finished()
    return 0


def load_parts(settings: EngineSettings) -> Parts:
    """Loads BLAS, then MLX, then the model. Raises ModelError."""
    blas = load_blas()
    import mlx.core as mx

    from .linear import KERNEL_ROWS
    from .model import load

    loaded = load(settings, progress=log.info)
    is_gpu = mx.metal.is_available()
    step_seconds = settings.step_seconds or (GPU_STEP_SECONDS if is_gpu else CPU_STEP_SECONDS)
    cache = Cache(
        loaded.kv.num_pages,
        keep_prefixes=settings.kvcache.prefix_cache,
        num_states=loaded.ledger.num_states,
        num_small_states=loaded.ledger.num_small_states,
    )
    rules = rules_of(loaded, settings)
    engine = Engine(
        loaded.runner,
        cache,
        rules,
        num_workers=settings.workers,
        limits=PaceLimits(
            step_seconds=step_seconds,
            min_rows=GPU_MIN_ROWS if is_gpu else CPU_MIN_ROWS,
            row_multiple=1 if is_gpu else KERNEL_ROWS,
        ),
        grammars=grammars_of(rules, GrammarLimits(build_seconds=settings.grammar_seconds)),
    )
    info = describe(loaded, settings, blas=blas, step_seconds=step_seconds)

    def memory() -> Memory:
        return Memory(mx.get_active_memory(), mx.get_peak_memory())

    return Parts(engine=engine, info=info, bundle=loaded.bundle, memory=memory)


def grammars_of(rules: TurnRules, limits: GrammarLimits) -> Grammars:
    """For turns of a model with these rules."""
    return Grammars(rules.detokenizer, width=rules.vocab_size, end_ids=rules.eos_token_ids, limits=limits)


def describe(loaded: Loaded, settings: EngineSettings, *, blas: str, step_seconds: float) -> EngineInfo:
    """What is in force, measured where it can be; `incarnation` and `created` are the bus's to fill in."""
    return EngineInfo(
        engine_id=settings.engine_id,
        incarnation=0,
        model_id=loaded.model_id,
        digest=loaded.digest,
        context_length=loaded.context_length,
        num_workers=settings.workers,
        vocab_size=loaded.vocab_size,
        kv=loaded.kv,
        states=loaded.states,
        device=f"{loaded.device}: {describe_device()}",
        weights=loaded.weights,
        blas=blas,
        created=0,
        settings=_in_force(loaded, settings, step_seconds),
    )


def _in_force(loaded: Loaded, settings: EngineSettings, step_seconds: float) -> dict[str, Any]:
    pool_tokens = loaded.kv.num_pages * loaded.kv.page_tokens
    cache: KVCacheSettings = msgspec.structs.replace(
        settings.kvcache,
        pool_tokens=pool_tokens,
        states=loaded.ledger.num_states,
        small_states=loaded.ledger.num_small_states,
    )
    effective = msgspec.structs.replace(
        settings,
        model=loaded.model_id,
        context=loaded.context_length,
        weights=loaded.ledger.weights,
        few_rows_linear=loaded.few_rows_linear,
        step_seconds=step_seconds,
        memory_bytes=loaded.ledger.limit_bytes,
        bus_bytes=loaded.ledger.bus_bytes,
        kvcache=cache,
    )
    values = as_dict(effective)
    return {"kvcache": values.pop("kvcache"), "workers": values}


def rules_of(loaded: Loaded, settings: EngineSettings) -> TurnRules:
    """What all turns of a loaded model have in common."""
    return TurnRules(
        detokenizer=Detokenizer(loaded.tokenizer),
        namespace=loaded.namespace,
        context_length=loaded.context_length,
        vocab_size=loaded.vocab_size,
        eos_token_ids=frozenset(loaded.bundle.eos_token_ids),
        derail=settings.derail,
    )
