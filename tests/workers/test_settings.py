from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from metrics.hosts import machine_name
from metrics.settings import SettingsError, add_flags, as_dict, given_flags
from workers.settings import EngineSettings, load_settings, supervisor_descriptor


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TETRARCH_MODEL", "TETRARCH_REDIS_URL", "TETRARCH_ENGINE_ID", "TETRARCH_SETTINGS"):
        monkeypatch.delenv(name, raising=False)


def parse(*arguments: str) -> EngineSettings:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineSettings)
    return load_settings(None, given_flags(parser.parse_args(arguments), EngineSettings))


def test_the_defaults_serve_four_workers_at_8_bits() -> None:
    settings = parse()
    assert (settings.workers, settings.kvcache.bits, settings.kvcache.prefix_cache) == (4, "8", True)
    assert settings.engine_id == machine_name()


def test_the_flags_of_the_command() -> None:
    settings = parse(
        *("--model", "folder", "--workers", "2", "--context", "4096", "--kv-bits", "native"),
        *("--pool-tokens", "9000", "--no-prefix-cache", "--weights", "fp32", "--engine-id", "left"),
        *("--states", "12", "--small-states", "0", "--memory", "96GB"),
    )
    assert (settings.kvcache.states, settings.kvcache.small_states) == (12, 0)
    assert settings.memory_bytes == 96 * 2**30
    assert (settings.model, settings.workers, settings.context) == ("folder", 2, 4096)
    assert (settings.kvcache.bits, settings.kvcache.pool_tokens) == ("native", 9000)
    assert (settings.kvcache.prefix_cache, settings.weights, settings.engine_id) == (False, "fp32", "left")


def test_the_short_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETRARCH_MODEL", "folder")
    monkeypatch.setenv("TETRARCH_REDIS_URL", "unix:///run/bus.sock")
    monkeypatch.setenv("TETRARCH_ENGINE_ID", "left")
    monkeypatch.setenv("TETRARCH_ENGINE_KVCACHE_POOL_TOKENS", "640")
    settings = parse()
    assert (settings.model, settings.redis_url, settings.engine_id) == (
        "folder",
        "unix:///run/bus.sock",
        "left",
    )
    assert settings.kvcache.pool_tokens == 640


def test_the_names_that_a_user_would_try_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("WORKERS", "8"),
        ("CONTEXT", "4096"),
        ("KV_BITS", "native"),
        ("POOL_TOKENS", "640"),
        ("WEIGHTS", "fp32"),
        ("STATES", "5"),
        ("SMALL_STATES", "6"),
        ("MEMORY", "2 GiB"),
    ):
        monkeypatch.setenv(f"TETRARCH_{name}", value)
    settings = parse()
    assert (settings.workers, settings.context, settings.weights) == (8, 4096, "fp32")
    assert (settings.kvcache.bits, settings.kvcache.pool_tokens) == ("native", 640)
    assert (settings.kvcache.states, settings.kvcache.small_states) == (5, 6)
    assert settings.memory_bytes == 2**31
    assert parse("--workers", "2").workers == 2


def test_the_file_holds_the_cache_in_a_table_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[engine]\nworkers = 3\n[engine.kvcache]\nbits = 'native'\n[gateway]\nport = 1\n")
    settings = load_settings(file, {})
    assert (settings.workers, settings.kvcache.bits) == (3, "native")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("96GB", 96 * 2**30),
        ("96GiB", 96 * 2**30),
        ("1.5g", 3 * 2**29),
        ("512MB", 2**29),
        ("64 kib", 2**16),
        ("8589934592", 2**33),
    ],
)
def test_memory_is_given_as_it_is_sold(text: str, num_bytes: int, tmp_path: Path) -> None:
    assert parse("--memory", text).memory_bytes == num_bytes
    file = tmp_path / "settings.toml"
    file.write_text(f"[engine]\nmemory_bytes = {text if text.isdigit() else repr(text)}\n")
    assert load_settings(file, {}).memory_bytes == num_bytes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "--workers = '0': give an integer from 1 to 16"),
        (["--workers", "17"], "from 1 to 16"),
        (["--context", "1"], "--context = '1': give an integer from 64"),
        (["--kv-bits", "4"], "--kv-bits = '4': give one of 8, native"),
        (["--pool-tokens", "3"], "pool_tokens is 3: use at least 64"),
        (["--states", "0"], "states is 0: use at least 1"),
        (["--memory", "much"], "--memory = 'much': give a size like 96GB, 512MB or plain bytes"),
        (["--memory", "0GB"], "--memory = '0GB': give a size"),
        (["--weights", "int4"], "give one of auto, native, fp32"),
        (["--step-seconds", "nan"], "--step-seconds = 'nan'"),
        (["--bus-bytes", "-1"], "--bus-bytes = '-1'"),
        (["--engine-id", "a:b"], "--engine-id = 'a:b'"),
        (["--redis-url", "localhost"], "redis_url must start with unix://"),
    ],
)
def test_a_wrong_value_is_refused_with_the_remedy(flags: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        parse(*flags)
    assert words in str(refusal.value)


def test_the_report_shows_no_password() -> None:
    report = as_dict(EngineSettings(redis_url="rediss://:word@host:6379"))
    assert "word" not in str(report)
    assert report["kvcache"] == {
        "bits": "8",
        "pool_tokens": None,
        "states": None,
        "small_states": 0,
        "prefix_cache": True,
        "shared_reads": True,
    }


def test_this_machines_own_bus_is_for_an_engine_that_was_told_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETRARCH_LOCAL_BUS", "unix:///local/bus.sock")
    file = tmp_path / "settings.toml"
    file.write_text("[engine]\nredis_url = 'unix:///from/file.sock'\n")
    assert load_settings(None, {}).redis_url == "unix:///local/bus.sock"
    assert load_settings(file, {}).redis_url == "unix:///from/file.sock"
    assert load_settings(file, {"redis_url": "unix:///flag.sock"}).redis_url == "unix:///flag.sock"
    monkeypatch.setenv("TETRARCH_REDIS_URL", "unix:///variable.sock")
    assert load_settings(None, {}).redis_url == "unix:///variable.sock"


def test_the_supervisors_pipe_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETRARCH_SUPERVISOR_FD", raising=False)
    assert supervisor_descriptor() is None
    monkeypatch.setenv("TETRARCH_SUPERVISOR_FD", "9")
    assert supervisor_descriptor() == 9
