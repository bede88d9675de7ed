"""What the gateway's benchmarks stand on: a real Valkey, a real gateway process, processors' time, tables.

A scripted engine (scripted_engine.py) stands for the model. Everything is private and gone at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gateway.serving.paths import Home
from gateway.serving.valkey import EmbeddedValkey
from workers.fetch import cache_dir, resolve_model
from workers.messages import TokenizerBundle

BUS_BYTES = 1 << 30
START_SECONDS = 30.0


@dataclass(slots=True)
class Gateway:
    """A running gateway process. `core`: the only one that it may use; None: any."""

    url: str
    pid: int
    core: int | None
    control: socket.socket  # to its probe, if it has one

    def cpu_seconds(self) -> float:
        """Processors' time of all its threads so far."""
        return cpu_seconds(self.pid)


@contextlib.contextmanager
def gateway(*, pins: bool = True, probe: Sequence[str] | None = None) -> Iterator[tuple[Gateway, str]]:
    """A gateway over a bus of its own, and the bus's URL. `pins`: it has a core for itself, if there are two;
    `probe`: its loop is watched by loop_probe.py, which has these flags.
    """
    with tempfile.TemporaryDirectory(prefix="tetrarch-bench-") as name:
        home = Home(Path(name), Path(name) / "s")
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        core = cores[-1] if pins and len(cores) > 1 else None
        if core is not None:
            os.sched_setaffinity(0, cores[:-1])
        valkey = EmbeddedValkey(home, BUS_BYTES)
        valkey.start()
        try:
            with _process(home, probe, core) as started:
                yield started, home.bus_url
        finally:
            valkey.stop()
            if core is not None:
                os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def _process(home: Home, probe: Sequence[str] | None, core: int | None) -> Iterator[Gateway]:
    ours, theirs = socket.socketpair()
    port = _free_port()
    module = ["gateway"] if probe is None else ["bench.loop_probe", str(theirs.fileno()), *probe]
    command = [sys.executable, "-m", *module, "gateway", f"--home={home.folder}"]
    command += [f"--redis-url={home.bus_url}", f"--port={port}", "--log-level=warning"]
    log_file = home.logs_folder / "gateway.log"
    with log_file.open("wb") as log, ours, theirs:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[theirs.fileno()])
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        try:
            started = Gateway(f"http://127.0.0.1:{port}", process.pid, core, ours)
            _wait(started, process, log_file)
            yield started
        finally:
            process.kill()
            process.wait()
            lines = log_file.read_text().splitlines()
            if lines:
                print(f"the gateway said {len(lines)} lines, last: {lines[-1][:300]}", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(started: Gateway, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{started.url}/metrics", timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the gateway does not start: {log_file.read_text()[-500:]}")
        time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """Processors' time of a process so far: exact on Linux, in steps of 10 ms elsewhere."""
    if platform.system() == "Linux":
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3): CPUCLOCK_SCHED of a process
    told = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True, check=True)
    parts = reversed(told.stdout.strip().split(":"))
    return sum((float(part) * 60**power for power, part in enumerate(parts)), 0.0)


def default_bundle() -> tuple[Tokenizer, TokenizerBundle]:
    """The default model's tokenizer; the first time it is downloaded."""
    from workers.model import read_tokenizer  # imports MLX

    folder = resolve_model(None, cache_dir(os.environ))
    return read_tokenizer(folder, json.loads((folder / "config.json").read_text()))


class Texts:
    """Texts of so many tokens that nobody has seen before, with lines, code-like names and numbers."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        words = (token.removeprefix("Ġ") for token in tokenizer.get_vocab())
        self._words = sorted(word for word in set(words) if re.fullmatch(r"[A-Za-z]{2,12}", word))
        self._source = random.Random(seed)

    def take(self, num_tokens: int) -> str:
        """Within a hundredth of so many."""
        text = self._draw(num_tokens)
        found = self.count(text)
        return text[: len(text) * num_tokens // found] if found > num_tokens else text

    def count(self, text: str) -> int:
        """Its tokens."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _draw(self, num_words: int) -> str:
        pieces = []
        for _ in range(num_words):
            word = self._source.choice(self._words)
            match self._source.randrange(24):
                case 0:
                    word += f"_{self._source.randrange(1000)}"
                case 1:
                    word += ".\n"
                case 2:
                    word += f"({self._source.choice(self._words)}),"
            pieces.append(word)
        return " ".join(pieces)


def quantile(values: Sequence[float], share: float) -> float:
    """By the nearest measured value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def middle(values: Sequence[float]) -> float:
    """The median."""
    return float(np.median(values))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows under their head, columns aligned."""
    lines = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())


def machine() -> dict[str, object]:
    """What a figure should be read with."""
    load = os.getloadavg()[0]
    return {"cores": os.cpu_count(), "platform": sys.platform, "load": round(load, 2)}


def report(name: str, figures: dict[str, object]) -> None:
    """One line of JSON."""
    print(json.dumps({"benchmark": name, **figures, **machine()}))
