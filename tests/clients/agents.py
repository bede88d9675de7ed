"""The installed agents: where `make test-clients` put them, and one run of one in folders of its own.

Knows no server and no script.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALLED = Path(__file__).parents[2] / "build" / "clients"
MODULES = INSTALLED / "node_modules"

ARCHITECTURE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
"""As npm's packages name it."""


def codex() -> Path:
    """Codex's program."""
    return found(MODULES / "@openai" / f"codex-linux-{ARCHITECTURE}", "vendor/*/bin/codex")


def opencode() -> Path:
    """opencode's program; where there is a choice, the one that any processor runs."""
    baseline = MODULES / f"opencode-linux-{ARCHITECTURE}-baseline"
    folder = baseline if baseline.exists() else MODULES / f"opencode-linux-{ARCHITECTURE}"
    return found(folder, "bin/opencode")


def claude_code() -> Path:
    """Claude Code's program."""
    return found(MODULES / "@anthropic-ai" / f"claude-code-linux-{ARCHITECTURE}", "claude")


def hermes() -> Path:
    """Hermes Agent's program, in an environment of its own."""
    return found(INSTALLED / "hermes", "bin/hermes")


def found(folder: Path, pattern: str) -> Path:
    """The one file there."""
    files = sorted(folder.glob(pattern))
    assert len(files) == 1, f"{folder.relative_to(INSTALLED.parent)} has no {pattern}: run make test-clients"
    return files[0]


@dataclass(frozen=True, slots=True)
class Done:
    """A finished run of an agent."""

    code: int
    output: str
    errors: str


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders of one agent: its home, and where it works. Nothing of the real home is seen."""

    home: Path
    work: Path

    @staticmethod
    def at(folder: Path) -> Workplace:
        """Makes both. A repository of its own ends an agent's search for settings in folders above."""
        place = Workplace(folder / "home", folder / "work")
        place.home.mkdir()
        subprocess.run(["git", "init", "--quiet", str(place.work)], check=True)
        return place

    def read(self, name: str) -> str:
        """What an agent wrote into a file; "" where it wrote none."""
        file = self.work / name
        return file.read_text().strip() if file.exists() else ""

    async def run(
        self, command: Sequence[object], environ: Mapping[str, str], *, seconds: float = 90.0
    ) -> Done:
        """Runs an agent to its end. Fails the test when that takes longer."""
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            cwd=self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", **environ},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(seconds):
                output, errors = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it left running too
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        assert process.returncode is not None
        return Done(process.returncode, output.decode(errors="replace"), errors.decode(errors="replace"))
