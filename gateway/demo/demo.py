"""`tetrarch demo`: serves as a user would, in a home of its own, runs one orchestrated session and reports.

Owns the child process and its end. Talks to it over HTTP only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import aiohttp

from .calls import NUM_IN_FLIGHT, CallFailed, get_json, get_text, run_session
from .progress import Progress
from .report import KV, Report, complaints, report, table
from .workload import NUM_ROUNDS, agents

SERVE = (sys.executable, "-m", "gateway", "serve")
START_SECONDS = 300.0
STOP_SECONDS = 40.0
_POLL_SECONDS = 0.25
_LOG_LINES = 15

PRIVATE = (
    "TETRARCH_SETTINGS",
    "TETRARCH_REDIS_URL",
    "TETRARCH_ENGINE_REDIS_URL",
    "TETRARCH_GATEWAY_REDIS_URL",
    "TETRARCH_GATEWAY_HOST",
    "TETRARCH_GATEWAY_HOME",
)
"""Variables that would tie the demo's server to the user's own; left out of its environment."""


class DemoFailed(Exception):
    """The demo could not run to its end; the text says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """The served process, ready for calls."""

    url: str
    start_seconds: float


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the demo; further arguments go to `tetrarch serve`. Exit code 0 only when all was shown."""
    parser = argparse.ArgumentParser(prog="tetrarch demo", description=__doc__, add_help=True)
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"), help="where the figures go")
    options, serve_arguments = parser.parse_known_args(arguments)
    try:
        return asyncio.run(_demo(options.output, serve_arguments, environ, sys.stdout))
    except (DemoFailed, CallFailed, aiohttp.ClientError, TimeoutError) as failure:
        sys.stderr.write(f"demo: {failure or type(failure).__name__}\n")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("demo: stopped before its end\n")
        return 130


async def _demo(
    output: Path, serve_arguments: Sequence[str], environ: Mapping[str, str], stdout: TextIO
) -> int:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    progress = Progress(stdout, num_calls=len(agents()) * NUM_ROUNDS)
    try:
        log = output.with_suffix(".log")
        async with serving([*SERVE, *serve_arguments], environ, log, progress) as server:
            figures = await run(server, progress)
    finally:
        progress.close()
    _write(figures, output)
    progress.say(f"\n{table(figures)}\n\nThe same figures are in {output}.")
    missing = list(complaints(figures))
    for complaint in missing:
        progress.say(f"NOT SHOWN: {complaint}")
    return 1 if missing else 0


async def run(server: Server, progress: Progress) -> Report:
    """The session against a ready server, then its figures. Raises CallFailed."""
    async with aiohttp.ClientSession(f"{server.url}/") as session:
        model = await _first_model(session)
        progress.say(
            f"{len(agents())} agents, {NUM_ROUNDS} rounds, {NUM_IN_FLIGHT} calls at a time; model {model}"
        )
        started = time.monotonic()
        results = await run_session(f"{server.url}/", model, progress)
        wall_seconds = time.monotonic() - started
        kv = read_kv(await get_json(session, "health"))
        metrics = await get_text(session, "metrics")
    return report(model, results, metrics, kv, start_seconds=server.start_seconds, wall_seconds=wall_seconds)


async def _first_model(session: aiohttp.ClientSession) -> str:
    models = (await get_json(session, "v1/models")).get("data")
    if not models:
        raise CallFailed("GET v1/models names no model")
    return str(models[0]["id"])


def read_kv(health: Mapping[str, Any]) -> KV:
    """The first engine's KV facts out of /health; empty ones when it names none."""
    engines = health.get("engines") or [{}]
    facts = engines[0].get("kv") or {}
    return KV(dtype=str(facts.get("dtype", "")), bytes_per_token=float(facts.get("bytes_per_token", 0)))


def _write(figures: Report, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(asdict(figures), indent=2) + "\n", encoding="utf-8")


@contextlib.asynccontextmanager
async def serving(
    command: Sequence[str], environ: Mapping[str, str], log: Path, progress: Progress
) -> AsyncIterator[Server]:
    """Run `command --port N` in a temporary home until the block ends; what it prints goes to `log`.

    Raises DemoFailed when it is never ready or ends before the block does.
    """
    with tempfile.TemporaryDirectory(prefix="tetrarch-demo-", ignore_cleanup_errors=True) as home:
        port = _free_port()
        environment = {name: value for name, value in environ.items() if name not in PRIVATE}
        environment["TETRARCH_HOME"] = home
        started = time.monotonic()
        progress.say("starting bus, engine and gateway ...")
        with _open(log) as log_file:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--port",
                str(port),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops it in order
            )
        try:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(url, process, log)
            yield Server(url, time.monotonic() - started)
        except (CallFailed, aiohttp.ClientError) as failure:
            with contextlib.suppress(TimeoutError):  # a dead server's sockets break before it is reaped
                await asyncio.wait_for(process.wait(), 1)
                raise DemoFailed(_ended(process, log)) from failure
            raise
        finally:
            progress.say("stopping what was started ...")
            if not await _stop(process):
                progress.say(f"the server did not stop within {STOP_SECONDS:.0f} s and was killed")


async def _until_ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise DemoFailed(_ended(process, log))
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_POLL_SECONDS)
    raise DemoFailed(f"the server was not ready after {START_SECONDS:.0f} s; the end of {log}:\n{_tail(log)}")


async def _stop(process: asyncio.subprocess.Process) -> bool:
    if process.returncode is not None:
        return True
    process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        return False
    return True


def _open(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("wb")


def _ended(process: asyncio.subprocess.Process, log: Path) -> str:
    return f"the server ended with code {process.returncode}; the end of {log}:\n{_tail(log)}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
