"""The gateway's settings, and those of `tetrarch serve` that are not the engine's.

Knows the names of flags and variables; reads no state and opens nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.aliases import USUAL_ALIASES, parse_aliases
from gateway.callers.scopes import USUAL_SCOPES, Scope
from gateway.derail.rules import DerailRules
from gateway.flow.classes import Classes
from metrics.settings import load

SECTION = "gateway"

SUPERVISOR_VARIABLE = "TETRARCH_SUPERVISOR_FD"
"""Number of an inherited pipe's read end: when it closes, the supervisor is gone and the process stops."""

LogLevel = Literal["debug", "info", "warning", "error"]


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `tetrarch gateway` runs with."""

    host: Annotated[
        str,
        Meta(
            description="Address to listen on; any other than loopback needs a token.",
            min_length=1,
            extra={"variable": "TETRARCH_HOST"},
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="Port to listen on; 0 takes a free one.",
            extra={"variable": "TETRARCH_PORT"},
        ),
    ] = 8114
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Further names, comma-separated, that a request's Host header may hold."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins of web pages, comma-separated, that may call this server though it did not "
            "send them, such as https://phone.example where a proxy rewrites the Host header."
        ),
    ] = ()
    local_scopes: Annotated[
        tuple[Scope, ...],
        Meta(description="What calls of this machine may do without a token: read, control, approve, admin."),
    ] = USUAL_SCOPES
    calls_per_minute: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Calls a minute of a token made without a limit of its own; left out: any number."),
    ] = None
    shared_prefixes: Annotated[
        tuple[str, ...],
        Meta(
            description="Groups of tokens, comma-separated, that share cached prefixes with each other; "
            "'local' stands for calls without a token. Their runs stay apart."
        ),
    ] = ()
    aliases: Annotated[
        tuple[str, ...],
        Meta(
            description="Names of models that are not here, comma-separated as PATTERN=MODEL, and the model "
            "that answers to them; 'default' is the only one there is. The first that fits counts."
        ),
    ] = USUAL_ALIASES
    audit_file_bytes: Annotated[
        int,
        Meta(ge=4096, description="Bytes at which the audit log is set aside; one older file is kept."),
    ] = 16 << 20
    max_waiting: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Calls of all classes that may wait in line; more get 429."),
    ] = 1024
    body_limit_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="Largest request body, in bytes.")
    ] = 8 << 20
    keepalive_seconds: Annotated[
        float, Meta(gt=0, le=600, description="Longest silence of a stream before a keep-alive is sent.")
    ] = 10.0
    normalise_prompts: Annotated[
        bool,
        Meta(
            description="Whether lines of known clients that change with every call (billing headers, token "
            "counts) are made constant, so that what was prefilled before is found again."
        ),
    ] = True
    tokens_file: Annotated[
        Path | None,
        Meta(description="File of access tokens (hashes); left out: tokens.json in the home folder."),
    ] = None
    redis_url: Annotated[
        str | None,
        Meta(
            description="The bus: unix:///path/bus.sock, redis://127.0.0.1:6379 or rediss://:password@host; "
            "left out: a Valkey server of its own in the home folder.",
            extra={"variable": "TETRARCH_REDIS_URL", "secret": True},
        ),
    ] = None
    bus_memory_bytes: Annotated[
        int, Meta(ge=32 << 20, description="Memory limit of the bus's own Valkey server, in bytes.")
    ] = 256 << 20
    kept_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Part of the bus's memory, in bytes, for what is kept of runs: two fifths of it for "
            "token ids (a day), three tenths for results of runs (a week, deflated), a twentieth for those "
            "of plain calls, an eighth each for stored responses and session logs. Of each kind the oldest "
            "go first.",
        ),
    ] = 128 << 20
    home: Annotated[
        Path | None,
        Meta(description="Folder for the bus's data, tokens and logs.", extra={"variable": "TETRARCH_HOME"}),
    ] = None
    log_level: Annotated[LogLevel, Meta(description="Least urgent log line to print.")] = "info"
    classes: Classes = Classes()
    derail: DerailRules = DerailRules()

    def __post_init__(self) -> None:
        if self.redis_url is not None and not re.match(r"(unix|rediss?)://.", self.redis_url):
            raise ValueError("redis_url must start with unix://, redis:// or rediss://")
        parse_aliases(self.aliases)
        for origin in self.allowed_origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin, re.IGNORECASE):
                raise ValueError(
                    f"allowed_origins: '{origin[:60]}' must be an origin, such as https://phone.example"
                )


def load_settings(file: Path | None, flags: Mapping[str, str]) -> GatewaySettings:
    """Flags over this process's variables over the file. Raises metrics.settings.SettingsError."""
    return load(GatewaySettings, SECTION, file=file, environ=os.environ, flags=flags)


def supervisor_descriptor() -> int | None:
    """The inherited pipe to watch, or None when nobody supervises this process."""
    text = os.environ.get(SUPERVISOR_VARIABLE, "")
    return int(text) if text.isdigit() else None
