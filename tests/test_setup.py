from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "deploy" / "setup.py"


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deploy_setup", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_written_for_python_3_9_and_the_standard_library() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 9))
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imports <= set(sys.stdlib_module_names)


def test_this_python_is_usable_and_comes_first(setup: ModuleType) -> None:
    assert setup.probe(sys.executable) == sys.version_info[:2]
    assert setup.candidates()[0] == sys.executable
    assert setup.find_python() == sys.executable


@pytest.mark.parametrize("body", ["exit 1", "echo 3 9 x86_64", "echo 3 15 x86_64", "echo hello"])
def test_a_python_that_will_not_do_is_passed_over(setup: ModuleType, tmp_path: Path, body: str) -> None:
    fake = tmp_path / "python3.12"
    fake.write_text(f"#!/bin/sh\n{body}\n")
    fake.chmod(0o755)
    assert setup.probe(str(fake)) is None


def test_without_any_python_the_line_to_run_is_printed(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, path in (("VENV", ".venv"), ("STAMP", ".venv/stamp"), ("PYTHON", ".venv/bin/python")):
        monkeypatch.setattr(setup, name, tmp_path / path)
    monkeypatch.setattr(setup, "LOG", tmp_path / "build" / "setup.log")
    monkeypatch.setattr(setup, "candidates", list[str])
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    assert setup.main() == 2
    printed = capsys.readouterr().err
    assert "Python 3.11 to 3.14 with venv is needed" in printed
    assert len(printed.splitlines()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="os-release is Linux's")
@pytest.mark.parametrize(
    ("release", "line"),
    [
        ({"ID": "debian", "VERSION_ID": "12"}, "apt-get install -y python3 python3-venv"),
        ({"ID": "ubuntu", "ID_LIKE": "debian", "VERSION_ID": "22.04"}, "python3.11 python3.11-venv"),
        ({"ID": "ubuntu", "ID_LIKE": "debian", "VERSION_ID": "24.04"}, "install -y python3 python3-venv"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian", "VERSION_ID": "22"}, "python3 python3-venv"),
        ({"ID": "fedora"}, "dnf install -y python3.12"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "zypper install -y python313"),
        ({"ID": "arch"}, "pacman -S --noconfirm python"),
        ({}, "install Python 3.13"),
    ],
)
def test_the_advice_is_for_this_system(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, release: dict[str, str], line: str
) -> None:
    monkeypatch.setattr(setup, "os_release", lambda: release)
    assert line in setup.advice()


@pytest.mark.parametrize(("version", "word"), [((2, 31), "glibc 2.31"), ((), "another C library")])
def test_an_old_c_library_is_named(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], word: str
) -> None:
    monkeypatch.setattr(setup, "glibc_version", lambda: version)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(setup.SystemUnfit, match=word):
        setup.check_system()


def test_a_copied_environment_is_not_reused(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    pip.write_text("#!/elsewhere/.venv/bin/python\n")
    assert setup.environment_is_usable() is False
    pip.write_text(f"#!{tmp_path}/bin/python\n")
    assert setup.environment_is_usable() is True


def test_a_failed_step_shows_the_end_of_its_output(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(setup, "LOG", tmp_path / "setup.log")
    assert setup.run("Working", ["sh", "-c", "echo one; echo two"]) == "two"
    with pytest.raises(setup.StepFailed, match=r"Working failed\. .*setup\.log:\nbroken"):
        setup.run("Working", ["sh", "-c", "echo broken >&2; exit 3"])
    assert "Working ... failed (0 s)" in capsys.readouterr().out


def test_make_without_a_target_teaches() -> None:
    printed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "make demo" in printed
    assert "make test" in printed


class Machine:
    """A machine without OpenBLAS, seen by a set-up whose stamp says that all else is done."""

    def __init__(self, setup: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.setup, self._monkeypatch = setup, monkeypatch
        self.has_openblas = False
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        (folder / ".venv").mkdir()
        for name, path in (("VENV", ".venv"), ("STAMP", ".venv/stamp"), ("LOG", "setup.log")):
            monkeypatch.setattr(setup, name, folder / path)
        monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
        monkeypatch.setattr(setup, "has_openblas", lambda: self.has_openblas)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setenv("PATH", f"{self.bin}:/bin:/usr/bin")
        monkeypatch.setattr(setup.shutil, "which", self._which)
        self.be(root=True)
        setup.write_stamp({"environment": setup.environment_hash()})

    def _which(self, name: str) -> str | None:
        path = self.bin / name
        return str(path) if path.exists() else None

    def be(self, *, root: bool) -> None:
        self._monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)

    def give_apt(self, code: int) -> None:
        """An apt-get that ends so, and notes how it was called."""
        path = self.bin / "apt-get"
        path.write_text(f'#!/bin/sh\necho "$@" >> "{self.calls}"\nexit {code}\n')
        path.chmod(0o755)

    def set_up(self) -> str:
        """What the stamp says of OpenBLAS afterwards."""
        self.setup.set_up(with_model=False)
        blas: str = self.setup.read_stamp()["blas"]
        return blas


@pytest.fixture
def machine(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(setup, monkeypatch, tmp_path)


def test_a_second_run_skips_what_is_done_and_says_nothing(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.has_openblas = True
    assert machine.set_up() == "present"
    assert "Set-up done" in capsys.readouterr().out
    machine.has_openblas = False  # not even looked for
    assert machine.set_up() == "present"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("root", "apt", "remedy"),
    [
        (True, False, "Install your system's OpenBLAS package."),
        (False, True, "Run: sudo apt-get install -y libopenblas0-pthread"),
    ],
)
def test_without_apt_or_root_one_line_is_said_once(
    machine: Machine, capsys: pytest.CaptureFixture[str], root: bool, apt: bool, remedy: str
) -> None:
    machine.be(root=root)
    if apt:
        machine.give_apt(0)
    assert machine.set_up() == "missing"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "OpenBLAS" in line]
    assert line == f"OpenBLAS is missing: everything works, but many times slower. {remedy}"
    assert machine.set_up() == "missing"
    assert capsys.readouterr().out == ""
    assert not machine.calls.exists()


def test_a_failed_apt_is_one_line_and_tried_again_briefly(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.give_apt(100)
    for _ in range(2):
        assert machine.set_up() == "missing"
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "missing" in line]
        assert line.endswith(f"It could not be installed; see {machine.setup.LOG}.")
    calls = machine.calls.read_text().splitlines()
    assert ["Timeout" in call for call in calls] == [False, False, True, True]
    assert ["update" in call for call in calls] == [False, True, False, True]
    machine.give_apt(0)
    assert machine.set_up() == "installed"
    machine.give_apt(100)
    assert machine.set_up() == "installed"


def test_openblas_that_came_by_itself_is_found_by_the_next_run(machine: Machine) -> None:
    assert machine.set_up() == "missing"
    machine.has_openblas = True
    assert machine.set_up() == "present"


@pytest.mark.parametrize(
    ("version", "machine_type", "words"),
    [
        ("13.6.1", "arm64", "macOS 14 is needed, this is 13.6.1. Run: softwareupdate"),
        ("14.0", "x86_64", "Apple silicon is needed"),
        ("14.0", "arm64", ""),
        ("26.1", "arm64", ""),
        ("", "arm64", ""),
    ],
)
def test_an_old_macos_or_an_intel_mac_is_named(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, machine_type: str, words: str
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(setup.platform, "mac_ver", lambda: (version, ("", "", ""), machine_type))
    monkeypatch.setattr(setup.platform, "machine", lambda: machine_type)
    monkeypatch.setattr(setup.subprocess, "check_output", lambda command: b"0\n")
    if not words:
        setup.check_system()
        return
    with pytest.raises(setup.SystemUnfit) as caught:
        setup.check_system()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
