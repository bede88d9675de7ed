from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.machine import describe_device, load_blas, memory_limit_bytes, openblas_candidates


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_v2_limit_of_an_outer_group_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/system/tetrarch\n")
    write(tmp_path / "sys/fs/cgroup/system/tetrarch/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/system/memory.max", "1048576\n")
    assert memory_limit_bytes(tmp_path) == 1048576


def test_a_v1_limit_seen_from_inside_a_container_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "2097152\n")
    assert memory_limit_bytes(tmp_path) == 2097152


def test_without_a_limit_physical_memory_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    assert memory_limit_bytes(tmp_path) == memory_limit_bytes(tmp_path / "no such folder") > 2**28


def test_candidates_end_with_what_lies_in_the_usual_folders(tmp_path: Path) -> None:
    library = tmp_path / "usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0"
    write(library, "")
    candidates = list(openblas_candidates(tmp_path))
    assert candidates[0] == "libopenblas.so.0"
    assert candidates[-1] == str(library)


def test_blas_is_named_in_one_line() -> None:
    assert load_blas()
    assert "\n" not in load_blas()


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS always has Accelerate")
def test_loading_after_mlx_says_that_it_is_too_late() -> None:
    code = "import mlx.core\nfrom workers.machine import load_blas\nprint(load_blas())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "MLX was imported before" in run.stdout


def test_the_device_is_described() -> None:
    assert "GiB" in describe_device()
