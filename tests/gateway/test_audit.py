"""The audit log: a private file of bounded size, complete at the end, and never in a caller's way."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gateway.audit import AuditLine, AuditLog


def line(number: int) -> AuditLine:
    return AuditLine(
        time="2026-11-30T00:00:00.000+00:00",
        verb="cancel",
        method="POST",
        path="/v1/runs/{id}/cancel",
        ids={"id": f"run-{number}"},
        token="phone",
        peer="127.0.0.1",
        status=200,
        error="",
        request_id="req-1",
    )


def ids(path: Path) -> list[str]:
    return [json.loads(text)["ids"]["id"] for text in path.read_text().splitlines()]


async def test_every_line_is_on_disk_at_the_end_in_order(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", 1 << 20)
    for number in range(500):
        log.note(line(number))
    await log.close()
    assert ids(tmp_path / "audit.jsonl") == [f"run-{number}" for number in range(500)]
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600
    await log.close()


async def test_a_large_file_is_set_aside_and_one_older_is_kept(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", 4096)
    for number in range(200):
        log.note(line(number))
        await log.close()
    files = [file for file in (tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1") if file.exists()]
    assert (tmp_path / "audit.jsonl.1") in files
    assert not (tmp_path / "audit.jsonl.2").exists() and all(
        file.stat().st_size < 4096 + 512 for file in files
    )
    kept = [name for file in reversed(files) for name in ids(file)]
    assert kept == [f"run-{number}" for number in range(200 - len(kept), 200)]


async def test_a_folder_that_cannot_be_written_is_logged_once_and_breaks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    log = AuditLog(folder / "audit.jsonl", 4096)
    for number in range(3):
        log.note(line(number))
        await log.close()
    assert capsys.readouterr().out.count("audit_log_unwritable") == 1
    folder.mkdir()
    log.note(line(3))
    await log.close()
    assert ids(folder / "audit.jsonl") == ["run-3"]
    assert "num_lost=3" in capsys.readouterr().out


async def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "audit.jsonl").symlink_to(victim)
    log = AuditLog(tmp_path / "audit.jsonl", 4096)
    log.note(line(0))
    await log.close()
    assert victim.read_text() == "mine"
