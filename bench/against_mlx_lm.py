"""Replays the agent workload against this server and mlx_lm.server, one after the other, and prints ratios.

    python -m bench.against_mlx_lm --bench FOLDER_WITH_REPLAY_PY --model-dir FP32_MODEL_FOLDER

Owns the servers it starts. The workload, its reference and the probes are those of the given folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
STOP_SECONDS = 30.0

_WITH_OPENBLAS = (
    "import ctypes, sys; "
    "sys.platform == 'linux' and ctypes.CDLL('libopenblas.so.0', ctypes.RTLD_GLOBAL); "
    "from mlx_lm.server import main; main()"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One server to measure. `command` lacks its port; the path `ready` answers 200 when it can serve."""

    name: str
    command: tuple[str, ...]
    ready: str
    model: str | None  # None: the first that it offers


def candidates(options: argparse.Namespace) -> Iterator[Candidate]:
    """Those named by --servers, in that order."""
    model_dir = str(options.model_dir)
    for name in options.servers:
        if name == "mlx_lm":
            rival = [sys.executable, "-c", _WITH_OPENBLAS, "--model", model_dir, "--host", "127.0.0.1"]
            rival += ["--decode-concurrency", "4", "--prompt-concurrency", "4"]
            yield Candidate(name, tuple(rival), "/health", "default_model")
        else:
            bits = "8" if name == "tetrarch-8bit" else "native"
            ours = (sys.executable, "-m", "gateway", "serve", "--model", model_dir, "--kv-bits", bits)
            yield Candidate(name, ours, "/ready", None)


@contextlib.contextmanager
def served(candidate: Candidate, log_folder: Path) -> Iterator[tuple[str, int]]:
    """The address and process id of a running server, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tetrarch-bench-", ignore_cleanup_errors=True) as home:
        log = log_folder / f"{candidate.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*candidate.command, "--port", str(port)],
                env=os.environ | {"TETRARCH_HOME": home, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url + candidate.ready, process, log)
            yield url, process.pid
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"{url} never answered; see {log}")


def run_shared(options: argparse.Namespace, script: str, arguments: Sequence[str]) -> None:
    """Run one of the shared scripts; its own output goes to the terminal."""
    command = [sys.executable, str(options.bench / script), *arguments]
    environment = os.environ | {"MODEL_DIR": str(options.model_dir)}
    subprocess.run(command, check=True, env=environment, cwd=options.out)


def replay(options: argparse.Namespace, candidate: Candidate, workload: Path, reference: Path | None) -> None:
    """One replay (and the probes, unless another workload is asked for) against a fresh server."""
    with served(candidate, options.out) as (url, pid):
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            model = candidate.model or json.load(response)["data"][0]["id"]
        target = ["run", "--base-url", f"{url}/v1", "--name", candidate.name, "--model", model]
        target += ["--pid", str(pid)]
        source = ["--workload", str(workload), "--ref", str(reference or "none"), "--out", "results.jsonl"]
        run_shared(options, "replay.py", [*target, *source, "--agent-header", "X-Agent"])
        if options.probes and reference is not None:
            run_shared(options, "probes.py", [*target, "--out", "probes.jsonl"])


def latest(results: Path) -> dict[str, dict[str, Any]]:
    """The last result of each server."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines}


def goals(ours: dict[str, Any], rival: dict[str, Any] | None) -> Iterator[tuple[str, str, str, bool]]:
    """(what, figure, goal, met) for one of our results."""
    if rival is not None:
        wall = ours["wall_s"] / rival["wall_s"]
        yield "wall time over mlx_lm's", f"{wall:.2f}", "<= 1.00 (aim 0.75)", wall <= 1
        first = ours["ttft_s"][1] / rival["ttft_s"][1]
        yield "first token p50 over mlx_lm's", f"{first:.2f}", "<= 0.60", first <= 0.6
    share, ideal = ours["cached_ratio"] or 0.0, ours["ideal_hit_ratio"] or 0.0
    if ours["match_ref"] is None:
        yield "cached share below the ideal", f"{ideal - share:.4f}", "<= 0.01", ideal - share <= 0.01
    else:
        yield "cached share of prompt tokens", f"{share:.4f}", ">= 0.905", share >= 0.905
        equal, gap = ours["match_ref"], (ours["mismatch_gap_min_max"] or [0, 0])[1]
        if ours["name"] == "tetrarch-8bit":
            yield "largest gap at a difference", f"{gap:.3f} ({equal} equal)", "< 0.3", gap < 0.3
        else:
            yield "texts equal to the reference", f"{equal} of {ours['calls']}", "all", equal == ours["calls"]
    gap_p90, memory = ours["gap_max_s"][2], ours["peak_rss_mb"]
    yield "worst gap p90, seconds", f"{gap_p90:.2f}", "<= 0.35 (aim 0.25)", gap_p90 <= 0.35
    yield "peak memory, MiB", f"{memory}", "<= 2400", memory <= 2400
    yield "errors", f"{ours['errors']}", "0", ours["errors"] == 0


def print_goals(results: dict[str, dict[str, Any]]) -> bool:
    """A table for each of our results; whether every goal is met."""
    met = True
    for name, ours in results.items():
        if name == "mlx_lm":
            continue
        print(f"\n{name}: wall {ours['wall_s']} s, first token p10/50/90 {ours['ttft_s']} s")
        for what, figure, goal, good in goals(ours, results.get("mlx_lm")):
            print(f"  {'ok  ' if good else 'MISS'}  {what:<32} {figure:>18}   goal {goal}")
            met &= good
    return met


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True, help="folder of replay.py and probes.py")
    parser.add_argument("--model-dir", type=Path, required=True, help="see bench.fp32_model")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument(
        "--servers", nargs="+", default=["tetrarch-8bit", "mlx_lm", "tetrarch-native"], metavar="NAME"
    )
    parser.add_argument("--seed", type=int, help="replay another workload, without reference and probes")
    parser.add_argument("--no-probes", dest="probes", action="store_false")
    options = parser.parse_args()
    options.bench, options.model_dir = options.bench.resolve(), options.model_dir.resolve()
    options.out = options.out.resolve()
    return options


def main() -> None:
    """Replay and judge; exit code 1 when a goal is missed."""
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.jsonl").unlink(missing_ok=True)
    (options.out / "probes.jsonl").unlink(missing_ok=True)
    workload: Path = options.bench / "workload.json"
    reference: Path | None = options.bench / "ref.json"
    if options.seed is not None:
        workload, reference = options.out / f"workload-{options.seed}.json", None
        run_shared(options, "replay.py", ["gen", "--seed", str(options.seed), "--out", str(workload)])
    for candidate in candidates(options):
        print(f"\n== {candidate.name}", flush=True)
        replay(options, candidate, workload, reference)
    run_shared(options, "replay.py", ["table", "results.jsonl"])
    if options.probes and reference is not None:
        run_shared(options, "probes.py", ["table", "probes.jsonl"])
    raise SystemExit(0 if print_goals(latest(options.out / "results.jsonl")) else 1)


if __name__ == "__main__":
    main()
