"""The demo runs its session against a fake server, and says so when something was not shown."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.client import TokenText
from gateway.demo import demo
from gateway.demo.calls import CallFailed
from gateway.demo.progress import LiveCall, Progress
from gateway.demo.report import KV, CallResult, Report, complaints, read_workers, table
from gateway.demo.workload import NUM_ROUNDS, SYSTEM, agents
from gateway.native.showing import show
from gateway.runs.state import RunState
from gateway.runs.told import RunCompleted, RunFailed, UsageBody
from gateway.store.results import ResultError, RunResult
from metrics.exposition import render
from metrics.instruments import Instruments, TurnSample
from workers.messages import RUN_END_ID, Accepted, Usage

NUM_CALLS = len(agents()) * NUM_ROUNDS


class FakeServer:
    """Answers like the gateway: characters are tokens, the longest earlier prompt is the cache."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []
        self.usages: dict[int, Usage] = {}
        self.in_flight = 0
        self.most_in_flight = 0
        self.seen: list[str] = []
        self.instruments = Instruments()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.get_models)
        app.router.add_get("/health", self.get_health)
        app.router.add_get("/metrics", self.get_metrics)
        app.router.add_post("/v1/runs", self.post_run)
        app.router.add_get("/v1/runs/{id}/events", self.get_events)
        app.router.add_get("/v1/runs/{id}", self.get_run)
        return app

    async def get_models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def get_health(self, _request: web.Request) -> web.Response:
        return web.json_response({"engines": [{"kv": {"dtype": "int8", "bytes_per_token": 12240.0}}]})

    async def get_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=render(self.instruments.registry))

    async def post_run(self, request: web.Request) -> web.Response:
        if self.fault == "refuse" and len(self.bodies) == 3:
            self.fault = ""
            error = {"message": "no such model", "code": "model_not_found"}
            return web.json_response({"error": error}, status=404)
        self.bodies.append(await request.json())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        run_id = f"run-{len(self.bodies)}"
        links = {"self": "", "events": "", "tree": None}
        created = {"id": run_id, "status": "queued", "session": "", "agent": "", "replayed": False}
        return web.json_response(created | {"links": links}, status=202)

    async def get_events(self, request: web.Request) -> web.StreamResponse:
        run_id, is_resumed = request.match_info["id"], request.headers["Last-Event-ID"] != "0-0"
        number = number_of(run_id)
        await asyncio.sleep(0.005)
        response = web.StreamResponse()
        await response.prepare(request)
        if not is_resumed:
            self.answer(number)
            for piece in ("I ", "see 🦊."):
                await send(response, TokenText(run=run_id, turn=1, text=piece), f"1-{len(piece)}")
            if self.fault == "cut" and number == 6:
                return response
        self.in_flight -= 1
        is_broken = self.fault == "break" and number == 5
        kind = RunFailed if is_broken else RunCompleted
        end = kind(run=run_id, usage=UsageBody(), turns=1, error=None, message=None)
        await send(response, end, RUN_END_ID)
        return response

    async def get_run(self, request: web.Request) -> web.Response:
        number = number_of(request.match_info["id"])
        accepted = Accepted(model="tiny", engine_id="e", created=1, prompt_tokens=1)
        is_broken = self.fault == "break" and number == 5
        result = RunResult(
            state="failed" if is_broken else "completed",
            finish_reason="length",
            usage=self.usages[number],
            error=ResultError(code="engine_lost", message="engine lost") if is_broken else None,
        )
        body = show(f"run-{number}", RunState(accepted=accepted), result)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    def answer(self, number: int) -> None:
        prompt = json.dumps(self.bodies[number - 1]["messages"])
        cached = max((shared(prompt, text) for text in self.seen), default=0)
        self.seen.append(prompt)
        self.usages[number] = Usage(prompt_tokens=len(prompt), cached_tokens=cached, completion_tokens=9)
        turn = TurnSample(
            "length",
            0 if self.fault == "one worker" else number % 4,
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            generated_tokens=9,
            queue_seconds=0.1,
            first_token_seconds=0.6,
            prefill_seconds=0.5,
            decode_seconds=2.0,
        )
        self.instruments.observe_turn("e", turn)


def number_of(run_id: str) -> int:
    return int(run_id.removeprefix("run-"))


async def send(response: web.StreamResponse, event: msgspec.Struct, event_id: str) -> None:
    await response.write(b"id: %s\ndata: %s\n\n" % (event_id.encode(), msgspec.json.encode(event)))


def shared(one: str, other: str) -> int:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(len(one), len(other)) if length is None else length


async def figures_of(fake: FakeServer) -> Report:
    progress = Progress(io.StringIO(), NUM_CALLS)
    async with TestServer(fake.app()) as server:
        return await demo.run(demo.Server(str(server.make_url("")).rstrip("/"), 1.5), progress)


async def test_a_session_shows_every_figure_and_nothing_is_missing() -> None:
    fake = FakeServer()
    figures = await figures_of(fake)
    assert list(complaints(figures)) == []
    assert figures.calls == NUM_CALLS >= 12
    assert [worker.worker for worker in figures.workers] == ["0", "1", "2", "3"]
    assert sum(worker.calls for worker in figures.workers) == NUM_CALLS
    assert figures.workers[0].decode_tokens_per_second is not None
    assert figures.workers[0].decode_tokens_per_second.p50 == 4.0
    assert figures.cached_share >= 0.75
    assert figures.kv == KV("int8", 12240.0)
    assert fake.most_in_flight == 4


async def test_each_agent_continues_its_own_conversation_under_one_system_prompt() -> None:
    fake = FakeServer()
    await figures_of(fake)
    for agent in agents():
        first, second = [body["messages"] for body in fake.bodies if body["agent"] == agent.name]
        assert [message["content"] for message in first] == [SYSTEM, agent.tasks[0]]
        assert second[:2] == first
        assert second[2] == {"role": "assistant", "content": "I see 🦊."}
        assert second[3]["content"] == agent.tasks[1]


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("refuse", "no such model"),
        ("break", "failed: engine lost"),
        ("one worker", "1 of 4 workers served calls"),
    ],
)
async def test_what_went_wrong_is_told(fault: str, complaint: str) -> None:
    figures = await figures_of(FakeServer(fault))
    assert any(complaint in text for text in complaints(figures))
    assert figures.calls == NUM_CALLS


async def test_a_cut_connection_is_no_failure() -> None:
    figures = await figures_of(FakeServer("cut"))
    assert list(complaints(figures)) == []
    assert figures.generated_tokens == 9 * NUM_CALLS


async def test_a_small_share_from_the_cache_and_an_unknown_kv_format_are_told() -> None:
    figures = replace(await figures_of(FakeServer()), cached_share=0.5, kv=KV("", 0.0))
    told = list(complaints(figures))
    assert len(told) == 2
    assert "50.0%" in told[0]


async def test_a_missing_page_ends_the_demo_with_its_name() -> None:
    async with TestServer(web.Application()) as server:
        with pytest.raises(CallFailed, match="GET v1/models answered 404"):
            await demo.run(demo.Server(str(server.make_url("")).rstrip("/"), 0), Progress(io.StringIO(), 1))


async def test_the_table_has_a_line_per_worker_and_the_sums() -> None:
    text = table(await figures_of(FakeServer()))
    assert text.count("4.0 / 4.0 / 4.0") == 4
    assert "12,240 bytes per token (int8)" in text


def test_an_idle_worker_has_no_quantiles() -> None:
    now = [0.0]
    instruments = Instruments(clock=lambda: now[0])
    instruments.observe_turn("e", TurnSample("stop", 1, 5, 0, 4, 0.0, 1.0, 1.0))
    now[0] = 10_000.0
    (worker,) = read_workers(render(instruments.registry).decode())
    assert worker.calls == 1
    assert worker.decode_tokens_per_second is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_output_has_one_line_per_call_and_no_escapes() -> None:
    output = io.StringIO()
    progress = Progress(output, 1)
    call = LiveCall("mail", 1)
    progress.begin(call)
    progress.tick()
    progress.end(call, CallResult("mail", 1, "yes", 100, 90, 3, 0.5, 1.0, "stop"))
    progress.close()
    assert output.getvalue().startswith("[ 1/1] round 1  mail")
    assert output.getvalue().count("\n") == 1
    assert "\x1b" not in output.getvalue()


def test_a_terminal_shows_the_live_answer_and_is_left_clean() -> None:
    output = Terminal()
    progress = Progress(output, 1)
    call = LiveCall("mail", 1, answer="the queue\nrepeats", first_token=time.monotonic())
    progress.begin(call)
    assert "> the queue repeats" in output.getvalue()
    progress.close()
    assert output.getvalue().endswith("\x1b[2A\r\x1b[0J")


SERVER = """
import http.server, os, pathlib, signal, sys, time
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if sys.argv[2] == "dies" and self.path != "/ready":
            os._exit(7)
        self.send_response(200); self.end_headers()
        if sys.argv[2] == "hangs" and self.path != "/ready":
            time.sleep(60)
def stop(*_):
    pathlib.Path(sys.argv[1]).write_text(os.environ["TETRARCH_HOME"]); sys.exit(0)
signal.signal(signal.SIGINT, stop)
print("bus:", os.environ.get("TETRARCH_REDIS_URL"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Ready).serve_forever()
"""


def command(tmp_path: Path, fault: str = "") -> list[str]:
    return [sys.executable, "-c", SERVER, str(tmp_path / "stopped"), fault]


async def test_the_server_gets_a_home_and_a_bus_of_its_own_and_is_stopped(tmp_path: Path) -> None:
    log, progress = tmp_path / "build" / "demo.log", Progress(io.StringIO(), 1)
    environ = {"TETRARCH_REDIS_URL": "redis://mine"}
    async with demo.serving(command(tmp_path), environ, log, progress) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.start_seconds > 0
    home = (tmp_path / "stopped").read_text()
    assert not os.path.exists(home)  # noqa: ASYNC240 - a test may look
    assert "bus: None" in log.read_text()


async def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(demo.DemoFailed, match=r"ended with code 1; the end of .*:\nno such model"):
        async with demo.serving(words, {}, tmp_path / "log", Progress(io.StringIO(), 1)):
            pass


async def test_a_server_that_dies_in_the_session_is_told(tmp_path: Path) -> None:
    progress = Progress(io.StringIO(), 1)
    with pytest.raises(demo.DemoFailed, match="ended with code 7"):
        async with demo.serving(command(tmp_path, "dies"), {}, tmp_path / "log", progress) as server:
            await demo.run(server, progress)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_server(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import os, sys; from gateway.demo import demo; demo.SERVE = sys.argv[1:6]; "
        "sys.exit(demo.main(['--output', sys.argv[6]], os.environ))"
    )
    arguments = [*command(tmp_path, "hangs"), str(tmp_path / "demo.json")]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert b"starting" in process.stdout.readline()
        deadline = time.monotonic() + 20
        while "GET /v1/models" not in read(tmp_path / "demo.log") and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == b"demo: stopped before its end\n"
    assert (tmp_path / "stopped").exists()


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
