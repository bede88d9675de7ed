"""The audit log: one JSON line for each control verb, kept in a private file of bounded size.

Written in a thread, off the event loop; holds ids and names, never a text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path

import msgspec
import structlog

AUDIT_FILE = "audit.jsonl"
"""In the home folder."""

MAX_PENDING = 10_000
"""Further lines are lost, and the loss is logged, while the disk does not keep up."""

log = structlog.get_logger(__name__)


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, by whom, and how it was answered."""

    time: str  # UTC, ISO 8601
    verb: str
    method: str
    path: str  # the route's pattern
    ids: dict[str, str]  # the path's parts, the run that it made or met, the tenant that it named
    token: str  # its name; "" for a call from this machine without one
    peer: str  # address
    status: int
    error: str  # kind; "" for none
    request_id: str


class AuditLog:
    """Appends lines to `path`; at `max_bytes` the file becomes `<path>.1` and the one before that goes.

    A failure to write never reaches a caller: it is logged once, and again after writing has worked.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._pending: deque[AuditLine] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._num_lost = 0
        self._is_failing = False

    def note(self, line: AuditLine) -> None:
        """Takes the line; it is on disk soon after."""
        if len(self._pending) >= MAX_PENDING:
            self._num_lost += 1
            return
        self._pending.append(line)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_pending())

    async def close(self) -> None:
        """Waits until all lines are written."""
        if self._writing is not None:
            await self._writing

    async def _write_pending(self) -> None:
        while self._pending:
            lines = [*self._pending]
            self._pending.clear()
            try:
                await asyncio.to_thread(self._write, lines)
            except OSError as error:
                self._num_lost += len(lines)
                if not self._is_failing:
                    log.error("audit_log_unwritable", file=str(self._path), problem=error.strerror)
                self._is_failing = True
                continue
            self._is_failing = False
            if self._num_lost:
                log.error("audit_lines_lost", num_lost=self._num_lost)
                self._num_lost = 0

    def _write(self, lines: list[AuditLine]) -> None:
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        # Not through a link that somebody else put there, and for the owner only whatever the umask.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            written = file.seek(0, os.SEEK_END) + file.write(text)
            number = os.fstat(file.fileno()).st_ino
        # Another gateway of this home may have set the file aside already.
        if written >= self._max_bytes and self._path.stat().st_ino == number:
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
