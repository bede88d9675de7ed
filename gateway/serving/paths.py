"""Where state lives: the home folder and what is in it, and the short folder of the bus's socket.

Makes private folders; knows nothing of what is written into them.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_SOCKET_BYTES = 100
"""macOS allows 104 with the closing zero, Linux 108."""


class HomeError(Exception):
    """A folder that cannot be used. Its text is one line with the remedy."""


@dataclass(frozen=True, slots=True)
class Home:
    """The home folder, and the short one that holds its bus's socket."""

    folder: Path
    socket_folder: Path

    @property
    def lock(self) -> Path:
        """Held by the one `tetrarch serve` of this home; names it."""
        return self.folder / "serve.lock"

    @property
    def bus_folder(self) -> Path:
        """The embedded server's data."""
        return self.folder / "bus"

    @property
    def logs_folder(self) -> Path:
        """What the processes print."""
        return self.folder / "logs"

    @property
    def tokens_file(self) -> Path:
        """Hashes of access tokens."""
        return self.folder / "tokens.json"

    @property
    def socket(self) -> Path:
        """The embedded server's socket."""
        return self.socket_folder / "bus.sock"

    @property
    def bus_url(self) -> str:
        """The embedded server, as a client names it."""
        return f"unix://{self.socket}"

    def make(self) -> None:
        """Creates the folders, private to this user. Raises HomeError."""
        for folder in (self.folder, self.bus_folder, self.logs_folder):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise HomeError(
                    f"cannot make the folder {folder}: {error.strerror}; name another with --home"
                ) from error
        _make_private(self.socket_folder.parent)
        _make_private(self.socket_folder)


def home_at(folder: Path | None, environ: Mapping[str, str]) -> Home:
    """The home folder: as given, else by its variable, else the system's place for a program's state."""
    named = environ.get("TETRARCH_GATEWAY_HOME") or environ.get("TETRARCH_HOME")
    if folder is None and named:
        folder = Path(named)
    chosen = (folder or _default_folder(environ)).expanduser().absolute()
    return Home(chosen, _socket_folder(chosen, environ))


def _default_folder(environ: Mapping[str, str]) -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "tetrarch"
    state = environ.get("XDG_STATE_HOME") or ""
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "tetrarch"


def _socket_folder(folder: Path, environ: Mapping[str, str]) -> Path:
    """One short folder per home: a home's own path may be longer than a socket's may be."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    runtime = environ.get("XDG_RUNTIME_DIR") or ""
    if runtime.startswith("/") and " " not in runtime and os.access(runtime, os.W_OK):
        chosen = Path(runtime) / "tetrarch" / name
        if len(os.fsencode(chosen / "bus.sock")) <= MAX_SOCKET_BYTES:
            return chosen
    return Path("/tmp") / f"tetrarch-{os.getuid()}" / name


def _make_private(folder: Path) -> None:
    """Others can write to /tmp: the folder must be ours and closed to them."""
    folder.mkdir(mode=0o700, exist_ok=True, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise HomeError(f"{folder} belongs to somebody else: remove it, or set XDG_RUNTIME_DIR")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
