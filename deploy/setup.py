"""Makes .venv, installs the project and its tools, OpenBLAS on Debian, and fetches the default model.

Standard library only; runs on Python 3.9, on Linux and macOS, before anything is installed. A second run
finds the first one's stamp and ends at once, without a network. Exit codes: 0 done, 1 a step failed (its
log is named), 2 this system cannot run it (the line to run first is printed).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "deploy" / "constraints.txt"
STAMP = VENV / "tetrarch-setup.json"
LOG = ROOT / "build" / "setup.log"

OLDEST, NEWEST = (3, 11), (3, 14)
OLDEST_GLIBC = (2, 35)
OLDEST_MACOS = (14, 0)
MACOS_PYTHON = "3.13.5"
BLAS_PACKAGE = "libopenblas0-pthread"
APT_BRIEFLY = ["-oAcquire::Retries=0", "-oAcquire::http::Timeout=5", "-oAcquire::https::Timeout=5"]
MODEL_TITLE = "Fetching the default model (95 MB) and converting it"
QUIET_SECONDS = 15  # between signs of life where output is not a terminal

PROBE = """
import sys, platform, ssl, venv, ensurepip
print(sys.version_info[0], sys.version_info[1], platform.machine())
"""
FETCH = """
import os, sys
from workers.machine import load_blas
load_blas()
from workers.errors import WorkersError
from workers.fetch import cache_dir, fetch_default_model
try:
    print(fetch_default_model(cache_dir(os.environ)))
except WorkersError as error:
    sys.exit(str(error))
"""


class SystemUnfit(Exception):
    """This system lacks something; the text says what, and the line to run."""


class StepFailed(Exception):
    """A step of the set-up failed; the text shows the end of its output and names the log."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-model", action="store_true", help="leave the default model out")
    arguments = parser.parse_args()
    try:
        LOG.parent.mkdir(exist_ok=True)
        with LOG.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two targets at once: the second waits and finds all done
            set_up(with_model=not arguments.no_model)
    except SystemUnfit as problem:
        print(problem, file=sys.stderr)
        return 2
    except StepFailed as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up stopped; run it again to go on", file=sys.stderr)
        return 130
    return 0


def set_up(*, with_model: bool) -> None:
    """Do what the stamp does not say is done."""
    started = time.monotonic()
    stamp = read_stamp()
    before = dict(stamp)
    if stamp.get("environment") != environment_hash() or not PYTHON.exists():
        check_system()
        make_environment()
        stamp = {key: value for key, value in stamp.items() if value != "missing"}
        stamp["environment"] = environment_hash()
        write_stamp(stamp)
    if stamp.get("blas", "missing") == "missing":
        stamp["blas"] = install_blas(was_told="blas" in stamp)
        write_stamp(stamp)
    if with_model and not model_is_there(stamp):
        stamp["model"] = run(MODEL_TITLE, [str(PYTHON), "-c", FETCH])
        stamp["caches"] = cache_variables()
        write_stamp(stamp)
    if stamp != before:
        print(f"Set-up done in {time.monotonic() - started:.0f} s.", flush=True)


# What is done already


def environment_hash() -> str:
    """Changes with what is to be installed, where, and the Python that .venv was made with."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, VENV / "pyvenv.cfg"):
        digest.update(path.read_bytes() if path.exists() else b"none")
    return digest.hexdigest()


def read_stamp() -> dict[str, str]:
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp: dict[str, str]) -> None:
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    partial.replace(STAMP)


def cache_variables() -> str:
    """What decides where the model is kept."""
    return "|".join(os.environ.get(name, "") for name in ("TETRARCH_CACHE", "XDG_CACHE_HOME", "HOME"))


def model_is_there(stamp: dict[str, str]) -> bool:
    folder = Path(stamp.get("model", ""))
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return stamp.get("caches") == cache_variables() and all((folder / name).exists() for name in names)


# The system


def check_system() -> None:
    """Raises SystemUnfit: MLX has wheels for macOS 14 on Apple silicon, and for Linux with glibc 2.35."""
    if sys.platform == "darwin":
        found = platform.mac_ver()[0]
        if found and numbers(found) < OLDEST_MACOS:
            raise SystemUnfit(f"macOS 14 is needed, this is {found}. Run: softwareupdate --install --all")
        if not on_apple_silicon():
            raise SystemUnfit("A Mac with Apple silicon is needed: MLX has no build for Intel Macs.")
    elif sys.platform.startswith("linux"):
        version = glibc_version()
        if version < OLDEST_GLIBC:
            found = f"glibc {'.'.join(map(str, version))}" if version else "another C library"
            raise SystemUnfit(
                f"glibc 2.35 is needed (Debian 12, Ubuntu 22.04, Fedora 36), this is {found}. Run it in a "
                'container:\n  docker run -it -v "$PWD":/tetrarch -w /tetrarch python:3.13 make demo'
            )
    else:
        raise SystemUnfit(f"macOS or Linux is needed, this is {sys.platform}.")


def on_apple_silicon() -> bool:
    """Also when this Python is an Intel one, translated."""
    command = ["/usr/sbin/sysctl", "-n", "hw.optional.arm64"]
    try:
        return platform.machine() == "arm64" or subprocess.check_output(command).strip() == b"1"
    except (OSError, subprocess.CalledProcessError):
        return False


def glibc_version() -> tuple[int, ...]:
    """Empty for another C library."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ()
    return numbers(name) if name.startswith("glibc") else ()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


# Python and .venv


def find_python() -> str:
    """A Python 3.11 to 3.14 that can make a virtual environment: this one if it can, else the newest."""
    found: list[tuple[tuple[int, int], str]] = []
    for candidate in candidates():
        version = probe(candidate)
        if version is not None:
            if candidate == sys.executable:
                return candidate
            found.append((version, candidate))
    if not found:
        raise SystemUnfit(
            "Python 3.11 to 3.14 with venv is needed and was not found. Run this, then the same again:\n  "
            + advice()
        )
    return max(found, key=lambda pair: pair[0])[1]


def candidates() -> list[str]:
    """Paths that exist, each once: this Python, PATH, then the places where Pythons are usually kept."""
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    paths = [sys.executable, *(shutil.which(name) or "" for name in [*names, "python3", "python"])]
    home = os.path.expanduser("~")
    pyenv = glob.escape(os.environ.get("PYENV_ROOT") or f"{home}/.pyenv")
    uv = glob.escape(os.environ.get("UV_PYTHON_INSTALL_DIR") or f"{home}/.local/share/uv/python")
    folders = [
        "/usr/bin",
        "/usr/local/bin",
        "/opt/homebrew/bin",
        "/opt/local/bin",
        "/usr/local/opt/python@3.*/bin",
        "/Library/Frameworks/Python.framework/Versions/3.*/bin",
        f"{pyenv}/versions/3.*/bin",
        f"{uv}/*/bin",
    ]
    for folder in folders:
        for name in names:
            paths += sorted(glob.glob(f"{folder}/{name}"))
    seen: dict[str, str] = {}
    for path in paths:
        if path and os.path.exists(path):
            seen.setdefault(os.path.realpath(path), path)
    return list(seen.values())


def probe(python: str) -> tuple[int, int] | None:
    """The version, if it is one that works, has venv and ensurepip, and is not translated."""
    command = [python, "-I", "-c", PROBE]
    try:
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=30)
        major, minor, machine = output.decode().split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    version = (int(major), int(minor))
    fits = OLDEST <= version <= NEWEST and (sys.platform != "darwin" or machine == "arm64")
    return version if fits else None


def advice() -> str:
    """The one line that brings a Python to this system."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    if sys.platform == "darwin":
        package = f"python-{MACOS_PYTHON}-macos11.pkg"
        url = f"https://www.python.org/ftp/python/{MACOS_PYTHON}/{package}"
        return f"curl -fLO {url} && sudo installer -pkg {package} -target /"
    system = os_release()
    family = {system.get("ID", ""), *system.get("ID_LIKE", "").split()}
    if family & {"debian", "ubuntu"}:
        old = system.get("ID") == "ubuntu" and numbers(system.get("VERSION_ID", "")) < (24, 4)
        packages = "python3.11 python3.11-venv" if old else "python3 python3-venv"
        return f"{sudo}apt-get update && {sudo}apt-get install -y {packages}"
    if family & {"fedora", "rhel", "centos"}:
        return f"{sudo}dnf install -y python3.12"
    if family & {"suse", "opensuse"}:
        return f"{sudo}zypper install -y python313"
    if "arch" in family:
        return f"{sudo}pacman -S --noconfirm python"
    return "install Python 3.13 with your system's package manager"


def os_release() -> dict[str, str]:
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}


def make_environment() -> None:
    """.venv with the project, editable, and its test and check tools at the pinned versions."""
    if not environment_is_usable():
        python = find_python()
        if VENV.exists() and not (VENV / "pyvenv.cfg").exists():
            raise SystemUnfit(f"{VENV} is there, but it is no virtual environment: move it away.")
        if VENV.exists():
            shutil.rmtree(VENV)
        run(f"Making .venv with {python}", [python, "-m", "venv", str(VENV)])
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    pip += ["--constraint", str(CONSTRAINTS)]
    run("Updating pip", [*pip, "--upgrade", "pip"])
    project = ["--editable", str(ROOT), "--group", "test", "--group", "check"]
    run("Installing the project and its tools", [*pip, *project])


def environment_is_usable() -> bool:
    """It works, and it was made here: one that came along with a copied folder points to the old one."""
    try:
        made_here = str(VENV) in (VENV / "bin" / "pip").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return made_here and probe(str(PYTHON)) is not None


# OpenBLAS


def install_blas(*, was_told: bool) -> str:
    """What came of it; without OpenBLAS all works, slower. After `was_told` apt is tried again, briefly."""
    if sys.platform == "darwin" or has_openblas():
        return "present"
    if was_told and not (shutil.which("apt-get") and os.geteuid() == 0):
        return "missing"
    slow = "OpenBLAS is missing: everything works, but many times slower."
    if not shutil.which("apt-get"):
        print(slow, "Install your system's OpenBLAS package.")
    elif os.geteuid() != 0:
        print(slow, f"Run: sudo apt-get install -y {BLAS_PACKAGE}")
    elif install_with_apt(APT_BRIEFLY if was_told else []):
        return "installed"
    else:
        print(slow, f"It could not be installed; see {LOG}.")
    return "missing"


def install_with_apt(options: list[str]) -> bool:
    install = ["apt-get", *options, "install", "-y", "--no-install-recommends", BLAS_PACKAGE]
    try:
        run(f"Installing {BLAS_PACKAGE}", install)
    except StepFailed:  # the usual reason is that the package lists are old or absent
        try:
            run("Updating the package lists", ["apt-get", *options, "update"])
            run(f"Installing {BLAS_PACKAGE}", install)
        except StepFailed:
            return False
    return True


def has_openblas() -> bool:
    try:
        return ctypes.CDLL("libopenblas.so.0") is not None
    except OSError:
        return False


# Steps that take long


def run(title: str, command: list[str]) -> str:
    """Run with signs of life; returns the last line of its output. Raises StepFailed with the end of it."""
    started = time.monotonic()
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive", PYTHONUNBUFFERED="1")
    with LOG.open("ab") as log:
        log.write(f"\n# {title}\n".encode())
        log.flush()
        begin = log.tell()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            code = wait(process, title, started)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    output = LOG.read_bytes()[begin:].decode("utf-8", "replace").strip().splitlines()
    if code != 0:
        head = f"{title} failed. The first set-up needs a network. The end of {LOG}:\n"
        raise StepFailed(head + "\n".join(output[-8:]))
    return output[-1] if output else ""


def wait(process: subprocess.Popen[bytes], title: str, started: float) -> int:
    """The exit code; meanwhile the time that has passed, on one line of a terminal or now and then."""
    live = sys.stdout.isatty()
    print(f"{title} ...", end="" if live else "\n", flush=True)
    shown = time.monotonic()
    while True:
        try:
            code = process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if now - shown >= (1 if live else QUIET_SECONDS):
                shown = now
                text = f"{title} ... {now - started:.0f} s"
                print(f"\r{text}" if live else text, end="" if live else "\n", flush=True)
        else:
            outcome = "done" if code == 0 else "failed"
            text = f"{title} ... {outcome} ({time.monotonic() - started:.0f} s)"
            print(f"\r{text}" if live else text, flush=True)
            return code


if __name__ == "__main__":
    sys.exit(main())
