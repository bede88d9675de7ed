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
from io import FileIO
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
        self._tell = unbreakable(tell)
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
        """Its exit code; negative: the signal that ended it. Raises what broke the reading of its output."""
        assert self._process is not None and self._relay is not None
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({ending, self._relay}, return_when=asyncio.FIRST_COMPLETED)
            if self._relay.done():
                self._relay.result()
            code = await ending
        finally:
            ending.cancel()
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
        """Reads on whatever happens: a full disk or closed terminal must not stop a child at a full pipe."""
        assert process.stdout is not None
        log = LogFile(self.command.log_file)
        rest = b""
        try:
            while data := await process.stdout.read(1 << 16):
                problem = log.write(data)
                if problem is not None:
                    self._tell(f"{self.command.name}: {problem}")
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._show(line.decode(errors="replace"))
                rest = rest[-(1 << 16) :]
        finally:
            log.close()

    def _show(self, line: str) -> None:
        shown = line.strip()
        if shown.startswith("{"):
            try:
                entry = json.loads(shown)
                is_told = self.is_talkative or entry.get("level") in ("warning", "error", "critical")
                shown = _plain(entry) if is_told else ""
            except (ValueError, RecursionError):
                pass
        if shown:
            self._tell(f"{self.command.name}: {shown}")


class LogFile:
    """A file that takes what it can: beyond MAX_LOG_BYTES it begins again and the full one is kept aside."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._num_bytes = 0
        self._is_failing = False

    def write(self, data: bytes) -> str | None:
        """Never raises: what cannot be written is lost. Returns words for the first of several failures."""
        try:
            if self._num_bytes > MAX_LOG_BYTES:
                self.close()
            if self._file is None:
                self._file = self._open()
            self._num_bytes += self._file.write(data)
            self._is_failing = False
            return None
        except OSError as error:
            was_failing, self._is_failing = self._is_failing, True
            return None if was_failing else f"{self._path} cannot be written: {error.strerror}"

    def close(self) -> None:
        """The next write opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _open(self) -> FileIO:
        file = FileIO(self._path, "a")
        if os.fstat(file.fileno()).st_size > MAX_LOG_BYTES:
            file.close()
            self._path.replace(self._path.with_suffix(".old.log"))
            file = FileIO(self._path, "a")
        self._num_bytes = os.fstat(file.fileno()).st_size
        return file


def unbreakable(tell: Callable[[str], None]) -> Callable[[str], None]:
    """`tell` without its failures: the terminal that it writes to may be closed."""

    def told(words: str) -> None:
        with contextlib.suppress(OSError):
            tell(words)

    return told


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
