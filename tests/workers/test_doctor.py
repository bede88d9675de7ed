from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcache.settings import KVCacheSettings
from tests.tiny_models import mixed_config
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
    report = doctor(settings, environ).text
    assert f"BLAS      {load_blas()}" in report
    assert "memory    8,192.0 MiB may be used" in report
    assert "model     tiny: llama, 2 layers" in report
    assert "settings  2 workers, context 512, kv-bits native" in report
    assert "2,048 tokens of" in report
    assert "--workers 4             fits: " in report


def test_what_does_not_fit_is_in_the_report(model: str, environ: dict[str, str]) -> None:
    report = doctor(EngineSettings(model=model, memory_bytes=2**28, kvcache=NATIVE), environ)
    assert "does not fit: weights" in report.text
    assert "would fit: a smaller model, or more memory (--memory 2GB)" in report.text
    assert not report.is_fit
    assert doctor(EngineSettings(model=model, memory_bytes=2**31, kvcache=NATIVE), environ).is_fit


def test_a_model_that_cannot_be_used_is_a_line_of_the_report(tmp_path: Path, environ: dict[str, str]) -> None:
    report = doctor(EngineSettings(model=str(tmp_path / "missing.gguf")), environ)
    assert "machine   " in report.text
    assert f"model     {tmp_path}/missing.gguf: cannot be read" in report.text
    assert not report.is_fit


def config_only(folder: Path, **changes: Any) -> str:
    folder.mkdir()
    config = mixed_config("qwen3_5_moe", changes) | {"quantization": {"group_size": 64, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_config_alone_is_enough_and_what_is_guessed_is_said(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    model = config_only(tmp_path / "published")
    report = doctor(EngineSettings(model=model, memory_bytes=2**33, weights="native"), environ).text
    assert "model     published: qwen3_5_moe, 4 layers" in report
    assert "1 layers of attention hold K and V, 3 a recurrent state" in report
    assert "8 experts, 2 of them for each token" in report
    assert "its vision part is not loaded" in report
    assert "the size of the weights is an estimate from the config" in report
    assert "4 live, 32 kept" in report
    assert "tokens and 64 states kept" in report


def test_a_config_alone_must_be_of_a_model_that_works(tmp_path: Path, environ: dict[str, str]) -> None:
    model = config_only(tmp_path / "published", linear_conv_kernel_dim=1)
    report = doctor(EngineSettings(model=model), environ).text
    assert "model     published: the config's linear_conv_kernel_dim is 1" in report


def test_more_than_a_macs_gpu_usually_gets_is_said(tmp_path: Path, environ: dict[str, str]) -> None:
    model = config_only(tmp_path / "published", max_position_embeddings=262_144)
    kvcache = KVCacheSettings(pool_tokens=23_000_000)
    report = doctor(EngineSettings(model=model, memory_bytes=2**33, kvcache=kvcache), environ).text
    assert "on a Mac the GPU usually gets 6,144.0 MiB" in report
