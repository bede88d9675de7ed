"""The supervisor's parts and the command's refusals; whole servers are in tests/end_to_end."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.__main__ import _settings_parser, plan_of
from gateway.callers.tokens import TokenStore
from gateway.serving.children import Child, Command, describe_exit
from gateway.serving.paths import Home, home_at
from gateway.serving.process import UnfitGateway, check_exposure, in_force, listen, url_of
from gateway.serving.supervisor import Plan, Supervisor, serve
from gateway.serving.valkey import BusError, hold_lock, name_holder
from gateway.settings import GatewaySettings
from metrics.settings import as_dict, load
from tests.conftest import ValkeyServer
from workers.messages import engine_lease_key
from workers.settings import EngineSettings

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


CHATTY = """
for number in range(4000):
    print("x" * 100, number)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_does_not_stop_a_child_that_talks() -> None:
    told: list[str] = []
    full = Command("part", (sys.executable, "-c", CHATTY), os.environ, (), Path("/dev/full"))
    child = Child(full, told.append)
    await child.start()
    async with asyncio.timeout(20):
        assert await child.wait() == 0
    assert len([words for words in told if "cannot be written" in words]) == 1
    assert len(told) == 4001


async def test_a_closed_terminal_does_not_stop_a_child_that_talks(tmp_path: Path) -> None:
    def tell(words: str) -> None:
        raise BrokenPipeError

    child = Child(command(tmp_path, CHATTY), tell)
    await child.start()
    async with asyncio.timeout(20):
        assert await child.wait() == 0
    assert (tmp_path / "part.log").read_text().count("\n") == 4000


async def test_a_log_begins_again_while_its_child_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.serving.children.MAX_LOG_BYTES", 100_000)
    child = Child(command(tmp_path, CHATTY), lambda words: None)
    await child.start()
    await child.wait()
    sizes = [(tmp_path / name).stat().st_size for name in ("part.log", "part.old.log")]
    assert all(0 < size < 300_000 for size in sizes), sizes


async def test_a_reader_of_output_that_breaks_is_told_and_not_waited_for(tmp_path: Path) -> None:
    def tell(words: str) -> None:
        raise KeyError(words)

    child = Child(command(tmp_path, "print('x', flush=True); import time; time.sleep(60)"), tell)
    await child.start()
    async with asyncio.timeout(10):
        with pytest.raises(KeyError):
            await child.wait()
    await child.stop(5)


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


def serve_options(*arguments: str) -> tuple[argparse.Namespace, list[str]]:
    return _settings_parser("serve", "", "").parse_known_args(arguments)


def test_a_settings_file_named_by_its_variable_names_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.toml").write_text('[engine]\nengine_id = "from-file"\n')
    monkeypatch.setenv("TETRARCH_SETTINGS", str(tmp_path / "settings.toml"))
    plan = plan_of(*serve_options("--home", str(tmp_path)))
    with listen("127.0.0.1", 0) as listener:
        supervisor = Supervisor(plan, os.environ, lambda words: None, listener, 0)
    assert supervisor._engine.command.environ["TETRARCH_ENGINE_ID"] == "from-file"


def test_no_other_name_of_a_variable_wins_over_what_serve_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETRARCH_GATEWAY_REDIS_URL", "unix:///nowhere/bus.sock")
    monkeypatch.setenv("TETRARCH_GATEWAY_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("TETRARCH_ENGINE_REDIS_URL", "unix:///nowhere/else.sock")
    monkeypatch.setenv("TETRARCH_ENGINE_ENGINE_ID", "other")
    typed = ("--home", str(tmp_path), "--redis-url", "unix:///here/bus.sock", "--engine-id", "mine")
    plan = plan_of(*serve_options(*typed))
    with listen("127.0.0.1", 0) as listener:
        supervisor = Supervisor(plan, os.environ, lambda words: None, listener, 0)
    environ = supervisor._engine.command.environ
    engine = load(EngineSettings, "engine", file=None, environ=environ, flags={})
    served = load(GatewaySettings, "gateway", file=None, environ=environ, flags={})
    assert engine.redis_url == served.redis_url == "unix:///here/bus.sock"
    assert (engine.engine_id, served.home) == ("mine", tmp_path)


@pytest.mark.parametrize("source", ["flag", "file"])
async def test_the_bus_takes_the_memory_limit_that_is_reported(home: Home, source: str) -> None:
    file = home.folder / "settings.toml"
    file.write_text("[gateway]\nbus_memory_bytes = 50331648\n")
    given = ("--bus-memory-bytes", "50331648") if source == "flag" else ("--settings", str(file))
    plan = plan_of(*serve_options("--home", str(home.folder), *given))
    assert plan.settings.bus_memory_bytes == 50331648
    reader, writer = os.pipe()
    with listen("127.0.0.1", 0) as listener:
        supervisor = Supervisor(plan, os.environ, lambda words: None, listener, reader)
        assert await supervisor._start_bus()
        try:
            found = await supervisor._on_bus(lambda client: client.config_get("maxmemory"))
            assert found == {"maxmemory": "50331648"}
        finally:
            await supervisor._stop()
            os.close(reader)
            os.close(writer)


KILLED = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize(
    ("script", "is_ours", "left"),
    [
        (KILLED, True, None),
        (KILLED, False, b"8"),
        ("raise SystemExit(1)", True, b"7"),
        ("raise SystemExit(2)", False, b"8"),
    ],
    ids=["ours, killed", "another machine's, killed", "ours, ended", "another machine's, refused"],
)
async def test_the_lease_of_a_living_engine_elsewhere_is_left_alone(
    home: Home, valkey: ValkeyServer, script: str, is_ours: bool, left: bytes | None
) -> None:
    key = engine_lease_key("twin")
    told: list[str] = []
    plan = Plan(GatewaySettings(redis_url=valkey.url), home, (), ("--engine-id", "twin"), None)
    with listen("127.0.0.1", 0) as listener, valkey.client() as client:
        supervisor = Supervisor(plan, os.environ, told.append, listener, 0)
        take = f"import redis; redis.Redis.from_url({valkey.url!r}).set({key!r}, 7); " if is_ours else ""
        supervisor._engine.command = command(home.folder, take + script)
        if not is_ours:
            client.set(key, 8)
        keeper = supervisor._keep(supervisor._engine)
        async with asyncio.timeout(20):
            while not told:  # noqa: ASYNC110 - it tells that the child ended
                await asyncio.sleep(0.01)
        supervisor._stopping.set()
        await keeper
        assert client.get(key) == left


async def test_a_child_that_nobody_keeps_running_any_more_stops_serve(home: Home) -> None:
    told: list[str] = []
    plan = Plan(GatewaySettings(), home, (), (), None)
    with listen("127.0.0.1", 0) as listener:
        supervisor = Supervisor(plan, os.environ, told.append, listener, 0)
        supervisor._gateway.command = Command("gateway", ("/no/such/program",), {}, (), home.folder / "log")
        await asyncio.wait({supervisor._keep(supervisor._gateway)})
        await asyncio.sleep(0)
    assert supervisor._stopping.is_set()
    assert supervisor._code == 1
    assert "FileNotFoundError" in told[0]


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


def test_a_gateway_alone_refuses_a_bus_that_is_not_fit(own_valkey: ValkeyServer, tmp_path: Path) -> None:
    """Before a password goes anywhere in clear, and before it serves from what forgets."""
    with own_valkey.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    for url, remedy in (("redis://:secret@bus.example:6379", "rediss://"), (own_valkey.url, "noeviction")):
        wrong = tetrarch("gateway", "--port", "0", "--home", str(tmp_path), "--redis-url", url)
        assert wrong.returncode == 2, wrong.stderr
        assert remedy in wrong.stderr.splitlines()[-1]
        assert "secret" not in wrong.stderr
