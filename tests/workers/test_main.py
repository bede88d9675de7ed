from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from tests.conftest import ValkeyServer
from tests.models import make_model
from tests.workers.test_bus import BUNDLE, INFO
from workers.__main__ import main
from workers.bus import Bus, check_bus
from workers.messages import EngineStats
from workers.settings import EngineSettings


@pytest.fixture(autouse=True)
def _quiet_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from the shell, and logging as it was."""
    for name in ("TETRARCH_MODEL", "TETRARCH_REDIS_URL", "TETRARCH_ENGINE_ID", "TETRARCH_SETTINGS"):
        monkeypatch.delenv(name, raising=False)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    error = capsys.readouterr().err
    assert error.startswith("tetrarch: ")
    assert error.count("\n") == 1
    return code, error


def test_a_bad_setting_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "engine", "--workers", "99") == (
        2,
        "tetrarch: --workers = '99': give an integer from 1 to 16\n",
    )


def test_an_engine_without_a_bus_is_told_where_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = refusal(capsys, "engine")
    assert code == 2
    assert "tetrarch serve" in error


def test_a_bus_that_does_not_answer_is_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, error = refusal(capsys, "engine", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert code == 1
    assert "is it running" in error


def test_a_bus_url_that_cannot_be_read_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = refusal(capsys, "engine", "--redis-url", "redis://:secret@localhost:port")
    assert code == 1
    assert "secret" not in error


@pytest.mark.parametrize(
    ("url", "remedy"),
    [("redis://bus.example:6379", "rediss://"), ("rediss://bus.example:6379", "password")],
)
def test_a_bus_on_another_machine_needs_tls_and_a_password(
    capsys: pytest.CaptureFixture[str], url: str, remedy: str
) -> None:
    code, error = refusal(capsys, "engine", "--redis-url", url)
    assert code == 2
    assert remedy in error


def test_a_bus_that_evicts_is_2(capsys: pytest.CaptureFixture[str], own_valkey: ValkeyServer) -> None:
    with own_valkey.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    code, error = refusal(capsys, "engine", "--redis-url", own_valkey.url)
    assert code == 2
    assert "noeviction" in error


def test_a_bus_without_persistence_is_told(own_valkey: ValkeyServer) -> None:
    assert check_bus(own_valkey.url) == []
    with own_valkey.client() as client:
        client.config_set("appendonly", "no")
    assert "appendonly yes" in check_bus(own_valkey.url)[0]


def test_an_engine_id_in_use_is_2_and_names_the_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, valkey: ValkeyServer
) -> None:
    def begin(settings: EngineSettings) -> int:
        bus = Bus(settings.redis_url or "", msgspec.structs.replace(INFO, engine_id="twin"), BUNDLE, stats)
        bus.begin()
        return 0

    def stats(incarnation: int) -> EngineStats:
        return EngineStats(incarnation=incarnation, ready=True)

    living = Bus(valkey.url, msgspec.structs.replace(INFO, engine_id="twin"), BUNDLE, stats)
    living.begin()
    monkeypatch.setattr("workers.process.run_engine", begin)  # without a model
    code, error = refusal(capsys, "engine", "--redis-url", valkey.url)
    living.close()
    assert code == 2
    assert "--engine-id" in error
    assert "twin" in error


def test_a_model_that_is_not_there_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = refusal(capsys, "model-fetch", "--model", "./no such folder")
    assert code == 2
    assert "no such folder" in error


def test_a_missing_settings_file_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = refusal(capsys, "doctor", "--settings", "absent.toml")
    assert code == 2
    assert "absent.toml" in error


@pytest.mark.parametrize("verb", ["engine", "model-fetch", "doctor"])
def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([verb, "--help"])
    assert leaving.value.code == 0
    assert f"examples:\n  tetrarch {verb.replace('-', ' ')}" in capsys.readouterr().out


def test_doctor_reports_a_model_that_cannot_be_used_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    output = capsys.readouterr().out
    assert "machine " in output
    assert str(tmp_path) in output


@pytest.mark.parametrize("number", [None, 0])
def test_doctor_names_a_number_that_a_config_lacks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int | None
) -> None:
    folder = make_model(tmp_path / "tiny", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": number}))
    assert main(["doctor", "--model", str(folder)]) == 2
    assert "the config's num_attention_heads is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers"], "tetrarch engine: argument --workers: expected one argument"),
        (["--wrkers", "3"], "tetrarch: unrecognized arguments: --wrkers 3"),
    ],
)
def test_an_unusable_flag_is_one_line_that_leads_to_the_help(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["engine", *flags])
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(words)
    assert error.endswith(" --help`\n")
    assert error.count("\n") == 1
