"""Structured logs: one JSON object a line on stderr, or plain coloured lines when that is a terminal.

Run and session are bound where one is handled (`about_run`). Owns the rule that no prompt, answer or token
reaches a log: such keys are dropped, and objects are named, never printed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

SPOKEN = frozenset(
    (
        "answer",
        "arguments",
        "body",
        "choices",
        "completion",
        "content",
        "delta",
        "input",
        "messages",
        "output",
        "payload",
        "prompt",
        "raw",
        "reasoning",
        "request",
        "response",
        "stop",
        "text",
        "token_ids",
        "tools",
    )
)
"""Keys that may hold what an agent said or heard: removed at every depth. Counts are named num_..."""

MAX_TEXT = 500
"""Longest string value kept, in characters; tracebacks are kept whole."""

_MAX_DEPTH = 4


def configure(level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send all logs, the standard library's too, to `stream` (stderr). Raises ValueError: unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is unknown: use debug, info, warning or error")
    target = sys.stderr if stream is None else stream
    shared = _shared()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(target)],
    )
    output = logging.StreamHandler(target)
    output.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(number)


def about_run(run_id: str, session: str = "") -> AbstractContextManager[None]:
    """Every line inside is about this run, and about this session (the caller's agent) when it has one."""
    session_name = {"session": session} if session else {}
    return structlog.contextvars.bound_contextvars(run=run_id, **session_name)


def drop_spoken(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The processor behind the rule of this module; `event` itself and tracebacks pass as they are."""
    kept = {"event", "exc_info", "_record", "_from_structlog"}
    return {
        key: value if key in kept else _safe(value, _MAX_DEPTH)
        for key, value in event.items()
        if key.lower() not in SPOKEN
    }


def _safe(value: Any, depth: int) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
        case BaseException():
            return _safe(f"{type(value).__name__}: {value}", depth)
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
        case Mapping() if depth:
            pairs = [(str(key), item) for key, item in value.items()]
            return {key: _safe(item, depth - 1) for key, item in pairs if key.lower() not in SPOKEN}
        case list() | tuple() | set() | frozenset() if depth:
            return [_safe(item, depth - 1) for item in value]
    # A message's repr would print its prompt.
    return f"<{type(value).__name__}>"


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        drop_spoken,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers(target: TextIO) -> list[Processor]:
    # Neither renderer may print local variables: they hold prompts.
    if target.isatty():
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
