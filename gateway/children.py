"""A supervised process: started by exec in a session of its own, its output kept in a file, ended for sure.

Knows no room; the supervisor decides when and what.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `descriptors` are inherited."""

    name: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    descriptors: tuple[int, ...]
    log_file: Path


class Child:
    """One process at a time of one command. `tell` gets its plain lines and its warnings."""

    def __init__(self, command: Command, tell: Callable[[str], None]) -> None:
        self.command = command
        self.is_talkative = True  # also its info lines are told: while it starts
        self._tell = tell
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Starts it. A Ctrl-C in the terminal does not reach it: the supervisor stops in order."""
        command = self.command
        self._process = await asyncio.create_subprocess_exec(
            *command.arguments,
            env=dict(command.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=command.descriptors,
            start_new_session=True,
        )
        self._relay = asyncio.create_task(self._copy_output(self._process))

    async def wait(self) -> int:
        """Its exit code; negative: the signal that ended it."""
        assert self._process is not None
        code = await self._process.wait()
        if self._relay is not None:
            await asyncio.wait({self._relay}, timeout=1.0)  # a grandchild may hold the pipe
        return code

    async def stop(self, seconds: float) -> bool:
        """SIGTERM, and SIGKILL when that takes too long: then False."""
        if self._process is None or self.pid is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
            return True
        except TimeoutError:
            self.kill()
            await self._process.wait()
            return False

    def kill(self) -> None:
        """SIGKILL, now."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        path = self.command.log_file
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".old.log"))
        rest = b""
        with path.open("ab", buffering=0) as file:
            while data := await process.stdout.read(1 << 16):
                file.write(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._show(line.decode(errors="replace"))
                rest = rest[-(1 << 16) :]

    def _show(self, line: str) -> None:
        shown = line.strip()
        if shown.startswith("{"):
            try:
                entry = json.loads(shown)
                is_told = self.is_talkative or entry.get("level") in ("warning", "error", "critical")
                shown = _plain(entry) if is_told else ""
            except ValueError:
                pass
        if shown:
            self._tell(f"{self.command.name}: {shown}")


def _plain(entry: dict[str, object]) -> str:
    hidden = ("event", "level", "timestamp", "logger")
    details = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in hidden)
    return f"{entry.get('event', '')}{f' ({details})' if details else ''}"


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
