from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.settings import KVCacheSettings
from tests.workers.gguf_files import tiny_llama
from workers.doctor import doctor
from workers.machine import load_blas
from workers.settings import EngineSettings

NATIVE = KVCacheSettings(bits="native")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TETRARCH_CACHE": str(tmp_path / "a cache")}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny_llama().write(tmp_path / "tiny.gguf"))


def test_the_report_names_machine_device_blas_and_the_ledger(model: str, environ: dict[str, str]) -> None:
    settings = EngineSettings(model=model, workers=2, memory_bytes=2**33, kvcache=NATIVE)
    report = doctor(settings, environ)
    assert f"BLAS      {load_blas()}" in report
    assert "memory    8,192.0 MiB may be used" in report
    assert "model     tiny: llama, 2 layers" in report
    assert "settings  2 workers, context 512, kv-bits native" in report
    assert "2,048 tokens of" in report
    assert "--workers 4             fits: " in report


def test_what_does_not_fit_is_in_the_report(model: str, environ: dict[str, str]) -> None:
    report = doctor(EngineSettings(model=model, memory_bytes=2**28, kvcache=NATIVE), environ)
    assert "does not fit: weights" in report
    assert "would fit: a smaller model, or more memory" in report


def test_a_model_that_cannot_be_used_is_a_line_of_the_report(tmp_path: Path, environ: dict[str, str]) -> None:
    report = doctor(EngineSettings(model=str(tmp_path / "missing.gguf")), environ)
    assert "machine   " in report
    assert f"model     {tmp_path}/missing.gguf: cannot be read" in report
