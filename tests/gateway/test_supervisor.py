"""The supervisor's parts and the command's refusals; whole servers are in tests/end_to_end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.children import Child, Command, describe_exit
from gateway.paths import Home, home_at
from gateway.process import UnfitGateway, check_exposure, in_force, listen, url_of
from gateway.settings import GatewaySettings
from gateway.supervisor import Plan, Supervisor, serve
from gateway.tokens import TokenStore
from gateway.valkey import BusError, hold_lock, name_holder
from metrics.settings import as_dict

ROOT = Path(__file__).parents[2]


def command(tmp_path: Path, script: str) -> Command:
    return Command("part", (sys.executable, "-c", script), os.environ, (), tmp_path / "part.log")


async def test_a_child_tells_plain_lines_and_warnings_and_keeps_all(tmp_path: Path) -> None:
    script = """
print("plain words")
print('{"event": "quiet", "level": "info"}')
print('{"event": "loud", "level": "warning", "count": 3}')
"""
    told: list[str] = []
    child = Child(command(tmp_path, script), told.append)
    child.is_talkative = False
    await child.start()
    assert await child.wait() == 0
    assert told == ["part: plain words", "part: loud (count 3)"]
    assert "quiet" in (tmp_path / "part.log").read_text()


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""
    told: list[str] = []
    child = Child(command(tmp_path, script), told.append)
    await child.start()
    async with asyncio.timeout(10):
        while not told:  # noqa: ASYNC110 - it tells through a pipe
            await asyncio.sleep(0.01)
    assert not await child.stop(0.2)
    assert await child.wait() == -signal.SIGKILL
    assert child.pid is None


async def test_a_child_is_in_a_session_of_its_own(tmp_path: Path) -> None:
    told: list[str] = []
    child = Child(command(tmp_path, "import os; print(os.getsid(0) == os.getpid())"), told.append)
    await child.start()
    await child.wait()
    assert told == ["part: True"]


def test_exits_are_told_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = home_at(tmp_path / "home", {})
    home.make()
    yield home
    if home.socket_folder.exists():
        home.socket_folder.rmdir()


def test_other_addresses_than_loopback_need_a_token(home: Home) -> None:
    settings = GatewaySettings(host="0.0.0.0")
    with pytest.raises(UnfitGateway, match="tetrarch token add"):
        check_exposure(settings, home)
    TokenStore(home.tokens_file).add("phone")
    check_exposure(settings, home)
    check_exposure(GatewaySettings(), home)


def test_a_taken_port_and_a_wrong_host_are_told_with_the_remedy() -> None:
    listener = listen("127.0.0.1", 0)
    with listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(UnfitGateway, match=f"port {port}.*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(UnfitGateway, match="--host"):
        listen("no.such.host.invalid", 0)


def test_the_settings_in_force_name_what_was_chosen_and_no_password(home: Home) -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        url = "redis://:secret@127.0.0.1:6379"
        report = as_dict(in_force(GatewaySettings(port=0), home, url, listener))
    assert report["port"] == port > 0
    assert report["home"] == str(home.folder)
    assert report["tokens_file"] == str(home.tokens_file)
    assert report["redis_url"] == "redis://***@127.0.0.1:6379"


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_ipv6_address_is_written_in_brackets() -> None:
    try:
        listener = listen("::1", 0)
    except UnfitGateway:
        pytest.skip("IPv6 is switched off here")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


async def test_a_home_in_use_names_its_holder(home: Home) -> None:
    lock = hold_lock(home.lock, "")
    name_holder(lock, "process 42, http://127.0.0.1:1, home /x")
    plan = Plan(GatewaySettings(port=0), home, (), (), None)
    with pytest.raises(BusError, match=r"process 42, http://127\.0\.0\.1:1, home /x"):
        await serve(plan, {}, lambda words: None)
    os.close(lock)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (("--engine-id", "a"), {"TETRARCH_ENGINE_ID": "b"}, "a"),
        (("--engine-id=a",), {}, "a"),
        ((), {"TETRARCH_ENGINE_ID": "b"}, "b"),
        ((), {}, "from-file"),
    ],
)
def test_the_engine_id_is_known_from_where_the_engine_takes_it(
    home: Home, arguments: tuple[str, ...], environ: dict[str, str], expected: str
) -> None:
    file = home.folder / "settings.toml"
    file.write_text('[engine]\nengine_id = "from-file"\n')
    plan = Plan(GatewaySettings(), home, (), arguments, file)
    with listen("127.0.0.1", 0) as listener:
        supervisor = Supervisor(plan, environ, lambda words: None, listener, 0)
    assert supervisor._engine_id == expected


def tetrarch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_all_verbs_and_an_unknown_one_is_refused() -> None:
    told = tetrarch("--help").stdout
    for verb in ("serve", "engine", "gateway", "model", "token", "doctor", "demo"):
        assert f"  {verb}" in told
    wrong = tetrarch("sevre")
    assert wrong.returncode == 2
    assert "serve" in wrong.stderr


def test_help_of_serve_shows_the_engine_flags_too() -> None:
    told = tetrarch("serve", "--help").stdout
    for flag in ("--port", "--host", "--home", "--model", "--workers", "--kv-bits"):
        assert flag in told


def test_tokens_are_added_listed_and_revoked(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    secret = tetrarch("token", "add", "phone", *home).stdout.strip()
    assert TokenStore(tmp_path / "tokens.json").find(secret) is not None
    assert secret not in (tmp_path / "tokens.json").read_text()
    assert tetrarch("token", "add", "phone", *home).returncode == 2
    assert "phone" in tetrarch("token", "list", *home).stdout
    assert tetrarch("token", "revoke", "phone", *home).returncode == 0
    assert tetrarch("token", "list", *home).stdout == ""


def test_a_bad_setting_is_one_line() -> None:
    wrong = tetrarch("serve", "--port", "seventy")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "--port" in wrong.stderr
