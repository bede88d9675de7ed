"""One engine's settings: the model, its workers, its memory and its bus. The cache's are a table inside.

Knows the names of flags and variables; does not read a model or ask the machine what fits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvcache.settings import KVCacheSettings
from metrics.hosts import machine_name
from metrics.settings import LOCAL_BUS_VARIABLE, load

from .derail import DerailRules

SECTION = "engine"

SUPERVISOR_VARIABLE = "TETRARCH_SUPERVISOR_FD"
"""Number of an inherited pipe's read end: when it closes, the supervisor is gone and the engine stops."""

Weights = Literal["auto", "native", "fp32"]
LogLevel = Literal["debug", "info", "warning", "error"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `tetrarch engine` runs with."""

    model: Annotated[
        str | None,
        Meta(
            description="Model folder, .gguf file or Hugging Face repo; left out: SmolLM2-135M-Instruct.",
            extra={"variable": "TETRARCH_MODEL"},
        ),
    ] = None
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="Turns that run at the same time.",
            extra={"variable": "TETRARCH_WORKERS"},
        ),
    ] = 4
    context: Annotated[
        Annotated[int, Meta(ge=64)] | None,
        Meta(
            description="Longest prompt plus answer, in tokens; left out: the model's.",
            extra={"variable": "TETRARCH_CONTEXT"},
        ),
    ] = None
    weights: Annotated[
        Weights,
        Meta(
            description="native keeps the quantisation, fp32 unpacks it, auto unpacks where that is faster.",
            extra={"variable": "TETRARCH_WEIGHTS"},
        ),
    ] = "auto"
    few_rows_linear: Annotated[
        bool,
        Meta(description="On a CPU with fp32 weights, multiply few rows the way that OpenBLAS does best."),
    ] = True
    step_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=60)] | None,
        Meta(description="Budget of a step that others decode in; left out: 0.12 on a CPU, 0.3 on a GPU."),
    ] = None
    grammar_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=300,
            description="A turn ends in an error when its schema takes longer to be made a grammar.",
        ),
    ] = 10.0
    memory_bytes: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        Meta(
            description="Memory that the engine may use, as 96GB, 512MB or plain bytes (GB and GiB are both "
            "2^30, as on a Mac's label); left out: what the machine or container allows.",
            extra={"flag": "memory", "variable": "TETRARCH_MEMORY", "is_size": True},
        ),
    ] = None
    bus_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="What of it the bus's server takes; left out: 256 MiB, 0 for one on another host."),
    ] = None
    engine_id: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")],
        Meta(
            description="This engine's name on the bus; left out: the machine's name.",
            extra={"variable": "TETRARCH_ENGINE_ID"},
        ),
    ] = msgspec.field(default_factory=machine_name)
    redis_url: Annotated[
        str | None,
        Meta(
            description="The bus: unix:///path/bus.sock, redis://127.0.0.1:6379 or rediss://:password@host:6379.",
            extra={"variable": "TETRARCH_REDIS_URL", "secret": True},
        ),
    ] = None
    derail: DerailRules = msgspec.field(default_factory=DerailRules)
    log_level: Annotated[LogLevel, Meta(description="Least urgent log line to print.")] = "info"
    kvcache: Annotated[
        KVCacheSettings,
        Meta(
            extra={
                "flags": {
                    "bits": "kv-bits",
                    "pool_tokens": "pool-tokens",
                    "states": "states",
                    "small_states": "small-states",
                    "prefix_cache": "prefix-cache",
                },
                "variables": {
                    "bits": "TETRARCH_KV_BITS",
                    "pool_tokens": "TETRARCH_POOL_TOKENS",
                    "states": "TETRARCH_STATES",
                    "small_states": "TETRARCH_SMALL_STATES",
                },
            }
        ),
    ] = msgspec.field(default_factory=KVCacheSettings)

    def __post_init__(self) -> None:
        if self.redis_url is not None and not re.match(r"(unix|rediss?)://.", self.redis_url):
            raise ValueError("redis_url must start with unix://, redis:// or rediss://")


def load_settings(file: Path | None, flags: Mapping[str, str]) -> EngineSettings:
    """Flags over this process's variables over the file, over this machine's own bus where one runs.

    Raises metrics.settings.SettingsError.
    """
    settings = load(EngineSettings, SECTION, file=file, environ=os.environ, flags=flags)
    local = os.environ.get(LOCAL_BUS_VARIABLE)
    if settings.redis_url is None and local:
        return msgspec.structs.replace(settings, redis_url=local)
    return settings


def environment() -> dict[str, str]:
    """This process's variables."""
    return dict(os.environ)


def supervisor_descriptor() -> int | None:
    """The inherited pipe to watch, or None when nobody supervises this process."""
    text = os.environ.get(SUPERVISOR_VARIABLE, "")
    return int(text) if text.isdigit() else None
