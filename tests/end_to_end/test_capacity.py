"""What the commands that plan a machine say and how they end, as processes: `doctor` and `simulate`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import mixed_config

from .served import ROOT

pytestmark = pytest.mark.end_to_end

TRACE = "tests/traces/agents_1700.jsonl.gz"
HEADS = {
    **{"hidden_size": 2048, "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 2},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 262_144},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "dtype": "bfloat16"},
}
QWEN3_NEXT_80B = ("qwen3_next", 48, 151_936, 512, 10)
QWEN3_5_35B = ("qwen3_5_moe", 40, 248_320, 256, 8)


def published(folder: Path, model: tuple[str, int, int, int, int]) -> str:
    """The config alone, quantised to 4 bits with gates of 8."""
    model_type, num_layers, vocab_size, num_experts, per_token = model
    sizes: dict[str, Any] = {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    sizes |= {"num_experts": num_experts, "num_experts_per_tok": per_token}
    eight = {"group_size": 64, "bits": 8}
    gates = {
        f"{'language_model.' if model_type == 'qwen3_5_moe' else ''}model.layers.{layer}.mlp.{name}": eight
        for layer in range(num_layers)
        for name in ("gate", "shared_expert_gate")
    }
    quantization = {"group_size": 64, "bits": 4, **gates}
    config = mixed_config(model_type, HEADS | sizes) | {"quantization": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`tetrarch ...` without settings of this shell."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TETRARCH_")}
    command = [sys.executable, "-m", "gateway", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def gibibytes(report: str, item: str) -> float:
    found = re.search(rf"^{item} +([\d,.]+) MiB", report, re.MULTILINE)
    assert found, report
    return float(found[1].replace(",", "")) / 1024


@pytest.mark.parametrize(
    ("model", "weights", "token_bytes", "state_mebibytes", "total"),
    [(QWEN3_NEXT_80B, 41.7, 13_056, 73.7, 60), (QWEN3_5_35B, 18.3, 10_880, 61.4, 34)],
    ids=["Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B"],
)
def test_doctor_plans_a_published_hybrid_on_a_96_gb_mac(
    tmp_path: Path,
    model: tuple[str, int, int, int, int],
    weights: float,
    token_bytes: int,
    state_mebibytes: float,
    total: float,
) -> None:
    """The figures are those that the design was made with."""
    flags = ("--memory", "96GB", "--pool-tokens", "1048576", "--states", "32")
    planned = run("doctor", "--model", published(tmp_path, model), *flags)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert gibibytes(planned.stdout, "weights") == pytest.approx(weights, rel=0.01)
    assert gibibytes(planned.stdout, "total") == pytest.approx(total, rel=0.05)
    assert f"1,048,576 tokens of {token_bytes:,} B, kv-bits 8" in planned.stdout
    assert f"4 live, 32 kept, {state_mebibytes} MiB each" in planned.stdout
    assert "does not fit" not in planned.stdout.partition("\n\n--")[0]


def test_doctor_refuses_what_does_not_fit_with_the_sum_and_flags_that_do(tmp_path: Path) -> None:
    largest = published(tmp_path, QWEN3_NEXT_80B)
    for flags in (("--memory", "32GB"), ("--memory", "96GB", "--weights", "fp32")):
        refused = run("doctor", "--model", largest, *flags)
        assert refused.returncode == 2
        (line,) = (line for line in refused.stdout.splitlines() if line.startswith("does not fit: "))
        assert re.search(r"weights .* \+ states .* \+ pages for .* = .* MiB, but .* may be used", line)
        remedy = re.search(r"--[a-z-]+ \w+", line.partition("would fit: ")[2])
        assert remedy, line
        name, value = remedy[0].split()
        changed = dict(zip(flags[::2], flags[1::2], strict=True)) | {name: value}
        fits = run("doctor", "--model", largest, *(word for pair in changed.items() for word in pair))
        assert fits.returncode == 0, fits.stdout


def test_doctor_ends_with_2_for_a_model_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt9"}))
    refused = run("doctor", "--model", str(tmp_path))
    assert (refused.returncode, refused.stderr) == (2, "")
    assert "gpt9" in refused.stdout


def test_simulate_replays_a_trace_and_prints_figures_for_programs() -> None:
    done = run("simulate", TRACE, "--context", "20000", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert 0.3 < figures["hit_rate"] < 1
    (order,) = figures["orders"]
    assert order["num_calls"] + order["num_skipped"] == 1700
    assert order["num_failed"] == 0
    assert order["num_restored"] > 0


def test_simulate_explains_itself() -> None:
    done = run("simulate", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: tetrarch simulate")
    for words in ("--pool-tokens", "--states", "examples:", "hash_ids"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.jsonl"], "absent.jsonl: No such file"),
        ([TRACE, "--agents", "few"], "argument --agents: invalid int value: 'few'"),
        ([TRACE, "--agnts", "4"], "unrecognized arguments: --agnts 4"),
    ],
)
def test_simulate_refuses_in_one_line(arguments: list[str], words: str) -> None:
    refused = run("simulate", *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr
    assert refused.stderr.startswith("tetrarch")
    assert refused.stderr.count("\n") == 1
