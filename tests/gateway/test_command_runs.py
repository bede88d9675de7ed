"""`tetrarch run` and `tetrarch runs` as processes, against a gateway with all its parts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.cli.screen import age, line_of, one_line, plain, table, tree_lines
from gateway.client import Client, RunLine, RunUsage, TreeBody
from gateway.native.bodies import TreeAgent
from gateway.runs.told import RunCancelled, RunDerail, RunFailed, RunRouted, UsageBody
from tests.conftest import ValkeyServer
from tests.end_to_end.served import ROOT

from .native_client import NativeClient
from .talking_engine import TalkingEngine
from .test_native_real import FIRST, answers, serving


@pytest.fixture
async def engine(valkey: ValkeyServer) -> AsyncIterator[TalkingEngine]:
    async with TalkingEngine(valkey.url, answers) as talking:
        yield talking


@pytest.fixture
async def gateway(engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[NativeClient]:
    async with serving(valkey.url, tmp_path) as started:
        yield started


@pytest.fixture
async def client(gateway: NativeClient) -> AsyncIterator[Client]:
    async with Client(gateway.url) as opened:
        yield opened


async def start(url: str, *arguments: str, **environ: str) -> Process:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TETRARCH_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE,
        env=variables | {"TETRARCH_URL": url} | environ,
    )  # fmt: skip


async def command(url: str, *arguments: str, stdin: bytes = b"", **environ: str) -> tuple[int, str, str]:
    process = await start(url, *arguments, **environ)
    async with asyncio.timeout(20):
        output, errors = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_run_writes_the_text_to_stdout_and_all_else_to_stderr(
    client: Client, gateway: NativeClient
) -> None:
    code, output, errors = await command(gateway.url, "run", "Hi", "--session", "s", "--class", "bulk")
    assert (code, output) == (0, f"{FIRST}\n")
    assert "accepted: model, 10 prompt tokens" in errors and "completed; 10 prompt tokens" in errors
    (line,) = [line async for line in client.runs(session="s")]
    assert (line.flow_class, line.status) == ("bulk", "completed")


async def test_run_reads_stdin_and_tells_all_as_json(gateway: NativeClient) -> None:
    arguments = ("run", "-", "--json", "--budget-output", "3", "--agent", "a")
    code, output, _ = await command(gateway.url, *arguments, stdin=b"Hi there")
    told = json.loads(output)
    assert (code, told["status"], told["error"]["code"]) == (1, "failed", "budget_exceeded")
    assert (told["agent"], told["budget"]["output_tokens"]) == ("a", 3)
    code, _, errors = await command(gateway.url, "run", "-", stdin=b" \n")
    assert code == 2 and "the prompt is empty" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_stopped_run_is_cancelled(
    client: Client, gateway: NativeClient, engine: TalkingEngine, number: signal.Signals
) -> None:
    engine.allowed = 5
    process = await start(gateway.url, "run", "Hi", "--session", "s")
    assert process.stdout is not None
    async with asyncio.timeout(20):
        assert await process.stdout.read(3) == FIRST[:3].encode()
        process.send_signal(number)
        _, errors = await process.communicate()
    assert process.returncode == 130
    assert b": cancelled" in errors and b"Traceback" not in errors
    (line,) = [line async for line in client.runs(session="s")]
    assert line.status == "cancelled"


async def test_a_run_whose_reader_has_left_is_cancelled(
    client: Client, gateway: NativeClient, engine: TalkingEngine
) -> None:
    engine.seconds_per_token = 0.05
    process = await start(gateway.url, "run", "Hi", "--session", "s")
    assert process.stdout is not None and process.stderr is not None
    async with asyncio.timeout(20):
        await process.stdout.read(3)
        process.stdout._transport.close()  # type: ignore[attr-defined] # there is no other way to it
        errors = await process.stderr.read()
        await process.wait()
    assert process.returncode == 1
    assert b"Traceback" not in errors
    (line,) = [line async for line in client.runs(session="s")]
    assert line.status == "cancelled"


async def test_verbs_of_runs(client: Client, gateway: NativeClient, engine: TalkingEngine) -> None:
    engine.allowed = 3
    run = await client.spawn("Hi", session="s", agent="a", label="the one")
    async with asyncio.timeout(10):
        while (await run.read()).usage.completion_tokens < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    code, output, errors = await command(gateway.url, "runs", "pause", run.id, "--hold", "2.5")
    assert (code, output, errors) == (0, f"{run.id}: paused, hold_ms 2500\n", "")
    code, output, _ = await command(gateway.url, "runs", "--session", "s")
    assert code == 0 and output.count("\n") == 2
    assert "paused" in output and "the one" in output
    code, output, _ = await command(gateway.url, "runs", "tree", "s")
    assert f"  · {run.id}  paused  the one" in output
    code, output, _ = await command(gateway.url, "runs", "resume", run.id)
    assert "recomputed_tokens 0" in output
    steer = ("runs", "steer", run.id, "-", "--when", "now")
    code, output, _ = await command(gateway.url, *steer, stdin=b"Brief.")
    assert code == 0 and "applied now, turn 2" in output
    code, output, _ = await command(gateway.url, "runs", "cancel", run.id, "--tree")
    assert code == 0 and run.id in output


async def test_runs_show_and_watch_tell_what_was_said_and_done(client: Client, gateway: NativeClient) -> None:
    run = await client.spawn("Hi", session="s", agent="a")
    await run.result(seconds=10)
    code, output, _ = await command(gateway.url, "runs", "show", run.id)
    assert code == 0 and f"{run.id}: completed" in output and FIRST in output
    watching = await start(gateway.url, "runs", "watch", "s")
    assert watching.stdout is not None
    async with asyncio.timeout(20):
        lines = [(await watching.stdout.readline()).decode() for _ in range(5)]
        watching.send_signal(signal.SIGINT)
        await watching.communicate()
    assert "accepted" in lines[0] and "completed" in lines[-1]
    assert watching.returncode == 130


async def test_what_is_wrong_is_one_line_with_its_remedy(gateway: NativeClient) -> None:
    code, _, errors = await command(gateway.url, "runs", "show", "run-1")
    assert (code, errors.count("\n")) == (2, 1) and "There is no run 'run-1'" in errors
    code, _, errors = await command("http://127.0.0.1:1", "runs")
    assert (code, errors.count("\n")) == (1, 1) and "tetrarch serve" in errors
    code, _, errors = await command("nowhere", "runs")
    assert (code, errors.count("\n")) == (2, 1) and "must begin with http" in errors
    code, _, errors = await command(gateway.url, "runs", "shwo")
    assert code == 2 and "choose from show, tree" in errors


# What a screen shows.


def test_what_a_model_writes_cannot_move_the_cursor_or_turn_the_text() -> None:
    hostile = "a\x1b[2Jb\x9bc\rd\u202ee\ttab\nline"
    assert plain(hostile) == "a\ufffd[2Jb\ufffdc\ufffdd\ufffde\ttab\nline"
    assert one_line("a\n b\x1b c" + "d" * 300, 10) == "a b\ufffd cddd…"
    derail = RunDerail(
        run="r", kind="cycle", severity="stop", first_token=1, excerpt="\x1b]0;title\x07", action="report"
    )
    told = line_of(derail)
    assert told is not None and "\x1b" not in told and "\x07" not in told


def test_ends_and_attempts_are_told() -> None:
    failed = RunFailed(
        run="r", usage=UsageBody(prompt_tokens=1200), turns=2, error="engine_lost", message="m\n!"
    )
    assert line_of(failed) == (
        "failed (engine_lost: m !); 1,200 prompt tokens (0 cached), 0 output tokens in 2 turns"
    )
    cancelled = RunCancelled(run="r", usage=UsageBody(), turns=1, error=None, message=None)
    assert line_of(cancelled) == "cancelled; 0 prompt tokens (0 cached), 0 output tokens"
    routed = RunRouted(run="r", engine="e", turn=1, attempt=2, cached_tokens=3, reason="held")
    assert line_of(routed) == "turn 1 sent to engine e (held), attempt 2"


def test_ages_have_two_digits() -> None:
    assert [age(seconds) for seconds in (-1, 5, 119, 120, 7199, 7200, 200_000)] == [
        "0 s", "5 s", "119 s", "2 min", "120 min", "2 h", "2 d",
    ]  # fmt: skip


def run_line(run_id: str, agent: str) -> RunLine:
    return RunLine(
        id=run_id, kind="run", status="completed", session="s", agent=agent, parent="", parent_run=None,
        flow_class="bulk", label="", model="m", created=100.0, usage=RunUsage(prompt_tokens=1234),
    )  # fmt: skip


def test_a_table_is_aligned_and_a_tree_is_indented() -> None:
    head, row = table([run_line("run-1", "run-1")], now=160.0)
    assert row.index("completed") == head.index("status")
    assert "(its own)" in row and "1,234" in row and row.endswith("60 s")
    leaf = TreeAgent(
        agent="leaf", parent="root", status="paused", runs=[run_line("run-2", "leaf")], usage=RunUsage(),
        num_live=1, children=[],
    )  # fmt: skip
    root = TreeAgent(
        agent="root", parent="", status="completed", runs=[], usage=RunUsage(), num_live=1, children=[leaf]
    )
    tree = TreeBody(session="s", num_runs=1, num_live=1, usage=RunUsage(), agents=[root])
    lines = list(tree_lines(tree))
    assert lines[1].startswith("root: completed") and lines[2].startswith("  leaf: paused")
    assert lines[3] == "    · run-2  completed"
