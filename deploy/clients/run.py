"""Installs the agents that are pinned here into build/clients, then runs their tests where no network is.

Linux only: a network namespace that has loopback alone. Exit codes: pytest's, or 2 where something is
missing. Further arguments go to pytest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PINNED = Path(__file__).resolve().parent
ROOT = PINNED.parents[1]
BUILD = ROOT / "build" / "clients"
STAMP = BUILD / "installed"
HERMES = BUILD / "hermes"
PACKAGES, REQUIREMENTS = "package.json", "hermes.txt"
"""The first names three packages, whose only dependencies are their own programs at the same version."""

INSIDE = "--inside"
NAMESPACES = (("unshare", "--net"), ("unshare", "--net", "--map-root-user"))
"""As root, or where users may make namespaces of their own."""

SET_FLAGS = 0x8914  # SIOCSIFFLAGS
IS_UP = 0x1  # IFF_UP


def main(arguments: Sequence[str]) -> NoReturn:
    if arguments[:1] == [INSIDE]:
        raise_loopback()
        run_tests(arguments[1:])
    if sys.platform != "linux":
        refuse("The agents are tested in a network namespace, which only Linux has.")
    namespace = usable_namespace()
    install()
    os.execvp(namespace[0], [*namespace, sys.executable, __file__, INSIDE, *arguments])


def usable_namespace() -> Sequence[str]:
    """The command that makes one here."""
    if shutil.which("unshare") is None:
        refuse("`unshare` is needed: install util-linux, then run this again.")
    for namespace in NAMESPACES:
        if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0:
            return namespace
    refuse("This user may make no network namespace: run this as root, or allow user namespaces.")


def install() -> None:
    """Does nothing when the pinned versions are there."""
    if STAMP.exists() and STAMP.read_text() == pinned_hash():
        return
    for name, remedy in (("npm", "install Node.js 20 or later"), ("git", "install git")):
        if shutil.which(name) is None:
            refuse(f"`{name}` is needed: {remedy}, then run this again.")
    BUILD.mkdir(parents=True, exist_ok=True)
    STAMP.unlink(missing_ok=True)
    shutil.rmtree(BUILD / "node_modules", ignore_errors=True)
    shutil.copy(PINNED / PACKAGES, BUILD / PACKAGES)
    npm = ["npm", "install", "--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund"]
    step("Codex, opencode and Claude Code (1.2 GB)", npm)
    shutil.rmtree(HERMES, ignore_errors=True)
    step("an environment for Hermes Agent", [sys.executable, "-m", "venv", str(HERMES)])
    pip = [str(HERMES / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    step("Hermes Agent (230 MB)", [*pip, "--requirement", str(PINNED / REQUIREMENTS)])
    STAMP.write_text(pinned_hash())


def pinned_hash() -> str:
    """Changes with any pinned version, and with this place and Python."""
    digest = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for name in (PACKAGES, REQUIREMENTS):
        digest.update((PINNED / name).read_bytes())
    return digest.hexdigest()


def step(title: str, command: Sequence[str]) -> None:
    """Runs one command in build/clients; its words are shown only when it fails."""
    sys.stdout.write(f"Installing {title} ...\n")
    sys.stdout.flush()
    done = subprocess.run(command, cwd=BUILD, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        refuse(f"{' '.join(command[:3])} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def raise_loopback() -> None:
    """A new namespace's loopback is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SET_FLAGS, struct.pack("16sh14x", b"lo", IS_UP))


def run_tests(arguments: Sequence[str]) -> NoReturn:
    os.chdir(ROOT)
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=1", "tests/clients"]
    os.execv(command[0], [*command, *arguments])


def refuse(words: str) -> NoReturn:
    sys.stderr.write(f"{words}\n")
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
