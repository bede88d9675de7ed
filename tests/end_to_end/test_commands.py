"""The other ways to start Tetrarch: on a bus that runs already, each process alone, beyond loopback."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mcp import Client as McpClient
from mcp import StdioServerParameters
from redis import Redis

from gateway.callers.tokens import TokenStore
from tests.conftest import ValkeyServer
from tests.models import make_model
from tests.workers.gguf_files import tiny_llama
from tests.workers.test_bus import BUNDLE, INFO
from workers.messages import (
    ENGINES_KEY,
    EngineStats,
    encode,
    engine_key,
    engine_lease_key,
    tokenizer_key,
)

from .hybrid_folder import make_chatting_hybrid
from .served import ROOT, Served, wait_for

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

POOL = ("--pool-tokens", "16384")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


def call(url: str, path: str, body: dict[str, Any] | None = None, token: str = "") -> tuple[int, Any]:
    """Status and JSON of one request."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, data, headers), timeout=60
        ) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def check_served(url: str, token: str = "") -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, answer = call(url, "/v1/completions", body, token)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 4


def variables(**changes: str) -> dict[str, str]:
    """This process's, without settings of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TETRARCH_")} | changes


def external_host() -> str | None:
    """An address of this machine that is not loopback. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            return None
        host: str = probe.getsockname()[0]
    return None if host.startswith("127.") else host


def own_name() -> str | None:
    """This machine's name, where it leads to this machine."""
    try:
        host = socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError:
        return None
    return socket.gethostname()


@pytest.mark.parametrize("host", [external_host(), own_name()], ids=["address", "name"])
def test_serve_on_another_host_becomes_ready_and_beyond_loopback_asks_for_the_token(
    host: str | None, model: Path, tmp_path: Path
) -> None:
    if host is None:
        pytest.skip("this machine has no address or name but loopback")
    home = tmp_path / "home"
    home.mkdir()
    token = TokenStore(home / "tokens.json").add("phone")
    served = Served(home, model, "--host", host, *POOL)
    try:
        served.wait_ready()
        needs_token = not served.url.startswith("http://127.0.0.1:")  # where the machine's name leads
        assert ("-H 'Authorization: Bearer TOKEN'" in served.words) is needs_token
        assert call(served.url, "/v1/models")[0] == (401 if needs_token else 200)
        check_served(served.url, token)
    finally:
        served.close()


def test_serve_on_a_bus_that_runs_already_uses_it_and_leaves_it(
    own_valkey: ValkeyServer, model: Path, tmp_path: Path
) -> None:
    """The bus also knows an engine of earlier days, which sorts first."""
    with own_valkey.client() as client:
        know_dead_engine(client)
        served = Served(
            tmp_path / "home",
            model,
            "--engine-id",
            "zz",
            *POOL,
            environ={"TETRARCH_REDIS_URL": own_valkey.url},
        )
        try:
            served.wait_ready()
            assert "tiny: 4 workers" in served.words
            assert not any("bus-guard" in command for command in served.family().values())
            assert client.get(engine_lease_key("zz")) == b"1"
            check_served(served.url)
            health = call(served.url, "/health")[1]
            check_effective(health, served, own_valkey)
        finally:
            served.close()
        assert client.ping()
        assert client.get(engine_lease_key("zz")) is None


def know_dead_engine(client: Redis) -> None:
    info = msgspec.structs.replace(INFO, engine_id="a-dead-one", model_id="other", incarnation=1)
    fields: Any = {"info": encode(info), "stats": encode(EngineStats(incarnation=1, ready=True))}
    client.set(tokenizer_key(info.digest), encode(BUNDLE))
    client.hset(engine_key(info.engine_id), mapping=fields)
    client.sadd(ENGINES_KEY, info.engine_id)


def check_effective(health: dict[str, Any], served: Served, bus: ValkeyServer) -> None:
    """/health reports what is in force, not what was left open."""
    gateway = health["gateway"]["settings"]
    assert gateway["port"] == int(served.url.rpartition(":")[2])
    assert gateway["redis_url"] == bus.url
    assert gateway["home"] == str(served.home)
    assert gateway["tokens_file"] == str(served.home / "tokens.json")
    dead, engine = health["engines"]
    assert (dead["engine_id"], engine["engine_id"]) == ("a-dead-one", "zz")
    workers, cache = engine["settings"]["workers"], engine["settings"]["kvcache"]
    assert workers["weights"] in ("fp32", "native")
    assert workers["few_rows_linear"] is (workers["weights"] == "fp32" and engine["device"].startswith("cpu"))
    assert (cache["bits"], cache["pool_tokens"]) == ("8", 16384)
    assert engine["kv"]["dtype"] == "int8"


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, log: Path, *arguments: str, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """`tetrarch VERB`, ended with the test."""
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments], cwd=ROOT, env=environ, stdout=output, stderr=output
    )

    def end() -> None:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()

    stack.callback(end)
    return process


def test_engine_and_gateway_started_alone_serve_together(
    valkey: ValkeyServer, model: Path, tmp_path: Path, processes: ExitStack
) -> None:
    environ = variables(TETRARCH_REDIS_URL=valkey.url, TETRARCH_HOME=str(tmp_path / "home"))
    log = tmp_path / "gateway.log"
    start(processes, log, "gateway", "--port", "0", environ=environ)
    engine = ("engine", "--model", str(model), "--workers", "2", *POOL)
    start(processes, tmp_path / "engine.log", *engine, environ=environ)
    wait_for(lambda: re.search(r"http://[\d.]+:\d+", log.read_text()) is not None, 30)
    found = re.search(r"http://[\d.]+:\d+", log.read_text())
    assert found
    wait_for(lambda: call(found[0], "/ready")[0] == 200, 60)
    check_served(found[0])
    (served,) = call(found[0], "/v1/models")[1]["data"]
    assert served["id"] == "tiny"


def fetch(name: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway", "model", "fetch", "--model", str(name)]
    environ = variables(TETRARCH_CACHE=str(cache))
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_model_fetch_checks_a_folder_and_converts_a_gguf_file_once(model: Path, tmp_path: Path) -> None:
    folder = fetch(model, tmp_path / "cache")
    assert (folder.returncode, folder.stdout.splitlines()[-1]) == (0, str(model)), folder.stderr
    file = tiny_llama().write(tmp_path / "some.gguf")
    for _ in range(2):
        converted = fetch(file, tmp_path / "cache")
        assert converted.returncode == 0, converted.stderr
        made = Path(converted.stdout.splitlines()[-1])
        assert made.is_relative_to(tmp_path / "cache")
        assert (made / "model.safetensors").exists()
    assert "converting" not in converted.stdout
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:100])
    refused = fetch(broken, tmp_path / "cache")
    assert refused.returncode == 2
    assert "broken.gguf" in refused.stderr
    assert refused.stderr.count("\n") == 1


def tetrarch(url: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A verb of a caller."""
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=ROOT,
        env=variables(TETRARCH_URL=url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_chatting_hybrid(tmp_path_factory.mktemp("models") / "a hybrid")
    flags = ("--kv-bits", "native", "--pool-tokens", "65536", "--states", "24")
    served = Served(tmp_path_factory.mktemp("commands") / "home", model, *flags)
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


def test_run_shows_its_text_while_its_gateway_is_killed_and_comes_again(chatting: Served) -> None:
    prompt, flags = "Tell me. " * 400, ("--session", "killed", "--budget-output", "300")
    running = tetrarch(chatting.url, "run", prompt, *flags)
    assert running.stderr is not None
    assert any(b"worker" in line for line in iter(running.stderr.readline, b""))
    chatting.kill_child("gateway gateway")
    text, words = running.communicate(timeout=90)
    told = json.loads(only_line(tetrarch(chatting.url, "runs", "--session", "killed", "--json")))
    shown = json.loads(only_line(tetrarch(chatting.url, "runs", "show", told["id"], "--json")))
    assert text.decode().rstrip("\n") == shown["result"]["text"].rstrip("\n")
    assert shown["usage"]["completion_tokens"] <= 300
    assert f"{told['id']}: {shown['status']}" in words.decode()
    assert (running.returncode == 0) is (shown["status"] == "completed")


def only_line(process: subprocess.Popen[bytes]) -> bytes:
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output.count(b"\n")) == (0, 1), errors
    return output


async def test_an_mcp_client_has_sub_agents_at_a_served_model(chatting: Served) -> None:
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "gateway", "mcp", "--session", "of mcp"],
        env=variables(TETRARCH_URL=chatting.url),
        cwd=ROOT,
    )
    async with McpClient(command) as client:
        tasks = [{"prompt": f"Task {number}", "max_output_tokens": 20} for number in range(4)]
        made = [await client.call_tool("spawn_subagent", task) for task in tasks]
        runs = [result.structured_content["run"] for result in made]
        waited = await client.call_tool("wait", {"runs": runs, "timeout_seconds": 60})
        done = waited.structured_content["done"]
        assert [run["run"] for run in done] == runs
        assert {run["status"] for run in done} <= {"completed", "failed"}, (
            done
        )  # random words, cut at 20 tokens
        listed = await client.call_tool("list", {})
        assert len(listed.structured_content["runs"]) == 4
    tree = json.loads(only_line(tetrarch(chatting.url, "runs", "tree", "of mcp", "--json")))
    assert (tree["num_runs"], tree["num_live"]) == (4, 0)
