"""`tetrarch serve` as a user starts it, with a small random model, and a client that reads its streams."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0


class Served:
    """One `serve` process with a home of its own, on a free port. `close` leaves nothing behind."""

    def __init__(self, home: Path, model: Path, *flags: str, environ: dict[str, str] | None = None) -> None:
        self.home = home
        self._log = home.with_suffix(".log")
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--home", str(home)]
        command += ["--model", str(model), *flags]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("TETRARCH_")}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=variables | (environ or {}), stdout=output, stderr=output
            )
        self.url = ""

    def wait_ready(self) -> None:
        """Returns when calls are served."""
        wait_for(lambda: "ready after" in self.words or self.process.poll() is not None, START_SECONDS)
        found = re.search(r"ready after .* at (http\S+)", self.words)
        assert found, self.words
        self.url = found[1]

    @property
    def words(self) -> str:
        """What it printed so far."""
        return self._log.read_text()

    def child(self, words: str) -> int:
        """The process below `serve`, at any depth, whose command line holds these words."""
        found = [number for number, command in self.family().items() if words in command]
        assert len(found) == 1, self.family()
        return found[0]

    def family(self) -> dict[int, str]:
        """All living processes below `serve`, with their command lines."""
        processes = all_processes()
        members: dict[int, str] = {}
        parents = {self.process.pid}
        while parents:
            children = {number: entry for number, entry in processes.items() if entry[0] in parents}
            members |= {number: command for number, (_, command) in children.items()}
            parents = set(children)
        return members

    def kill_child(self, words: str) -> None:
        """kill -9."""
        os.kill(self.child(words), signal.SIGKILL)

    def close(self) -> None:
        """Stops it however it is."""
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        wait_for(lambda: not family.keys() & all_processes().keys(), 30)


def all_processes() -> dict[int, tuple[int, str]]:
    """Living processes: number -> parent, command line."""
    listing = subprocess.run(
        ["ps", "-axww", "-o", "pid=,ppid=,stat=,command="], capture_output=True, text=True, check=True
    ).stdout
    processes: dict[int, tuple[int, str]] = {}
    for line in listing.splitlines():
        number, parent, state, command = line.split(None, 3)
        if not state.startswith("Z"):
            processes[int(number)] = (int(parent), command)
    return processes


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Polls; fails the test when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@dataclass
class Answer:
    """One streamed answer as its client saw it."""

    text: str = ""
    last_id: str = ""
    run_id: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False  # [DONE] came
    num_processed: int = 0  # of the prompt, as keep-alives said
    broken: str = ""  # the connection's error
    seconds: float = 0.0

    def take(self, line: str) -> None:
        """One line of the stream."""
        if line.startswith("id: "):
            self.last_id = line[4:]
        if line.startswith(": keepalive "):
            self.num_processed = int(line.split()[2].partition("/")[0])
        if not line.startswith("data: "):
            return
        data = line[6:]
        if data == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.run_id = chunk.get("id", self.run_id)
        if chunk.get("usage"):
            self.usages.append(chunk["usage"])
        for choice in chunk.get("choices", []):
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice.get("finish_reason"):
                self.finish_reasons.append(choice["finish_reason"])


class Client:
    """Raw completions of token ids, greedy and of an exact length."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def body(self, prompt: Sequence[int], max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
        """A call that depends on nothing but the prompt."""
        return {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }

    async def stream(self, prompt: Sequence[int], max_tokens: int, answer: Answer | None = None) -> Answer:
        """Reads a streamed answer to its end, whatever that is."""
        answer = answer or Answer()
        body = self.body(prompt, max_tokens)
        call = self._session.post(f"{self._url}/v1/completions", json=body)
        return await self._read(call, answer)

    async def resume(self, before: Answer) -> Answer:
        """The rest of an answer after the last event that was seen."""
        headers = {"Last-Event-ID": before.last_id} if before.last_id else {}
        call = self._session.get(f"{self._url}/v1/completions/{before.run_id}", headers=headers)
        return await self._read(call, before)

    async def plain(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, dict[str, Any]]:
        """Status and body of an unstreamed call."""
        body = self.body(prompt, max_tokens, stream=False)
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def until_served(self, seconds: float = 60.0) -> dict[str, Any]:
        """Repeats a small call until it succeeds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                status, body = await self.plain([1, 2, 3], 4)
                if status == 200:
                    return body
            except aiohttp.ClientError:
                pass
            assert time.monotonic() < deadline, "no call was served in time"
            await asyncio.sleep(0.2)

    async def health(self) -> dict[str, Any]:
        """GET /health."""
        async with self._session.get(f"{self._url}/health") as response:
            body: dict[str, Any] = await response.json()
            return body

    async def until_idle(self, seconds: float = 20.0) -> dict[str, Any]:
        """Waits until no run lives and no page is owned by a turn; the engine's stats then."""
        deadline = time.monotonic() + seconds
        while True:
            health = await self.health()
            stats = health["engines"][0]["stats"]
            busy = ("num_running", "num_waiting", "num_live_pages")
            if not any(stats.get(name, 0) for name in busy) and not health["gateway"]["runs_live"]:
                return dict(stats)
            assert time.monotonic() < deadline, health
            await asyncio.sleep(0.2)

    async def _read(self, call: Any, answer: Answer) -> Answer:
        started = time.monotonic()
        try:
            async with call as response:
                if response.status != 200:
                    answer.errors.append((await response.json())["error"])
                    return answer
                async for line in response.content:
                    answer.take(line.decode().rstrip("\n"))
        except (aiohttp.ClientError, ConnectionError) as error:
            answer.broken = repr(error)
        finally:
            answer.seconds = time.monotonic() - started
        return answer


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Polls without stopping the loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)
