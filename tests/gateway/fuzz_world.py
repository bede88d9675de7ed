"""What fuzzed calls aim at: a real gateway's runs, responses and chats in every state, by a blocking client.

Its engine holds the turns whose last user message says so; all others it answers at once.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from .fake_engine import Turn, until
from .samples import TOOLS
from .talking_engine import TalkingEngine, text_of

HOLD, QUEUE = "Hold it.", "Stay in line."
SECONDS = 10.0
"""A call that takes longer hangs."""

MESSAGES = "/v1/messages"
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "/a"}}\n</tool_call>'
FAULTS = ("incident", "task_failed", "fault")
"""Log lines that tell of what nobody foresaw."""

Record = Callable[[str, object], None]
"""Keeps a figure in the test report."""

LIVE = ("queued", "prefilling", "decoding", "paused", "input_required")


def answer(prompt: str) -> str:
    """Thinks, calls a tool or writes JSON as the prompt wants it."""
    if "read_file" in prompt and "<tool_response>" not in prompt:
        return CALL
    if "JSON" in prompt:
        return '{"answer": "yes"}'
    return "<think>\nHm.\n</think>\n\nYes, of course." if "Think" in prompt else "Yes, of course."


class HoldingEngine(TalkingEngine):
    """Turns whose last user message is HOLD stand still behind two tokens, those of QUEUE before any."""

    def __init__(self, url: str) -> None:
        super().__init__(url, answer)

    async def talk(self, turn: Turn) -> None:
        """One attempt."""
        last = text_of(turn.submit.token_ids).rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        if last == QUEUE:
            await until(lambda: turn.is_cancelled or turn.is_paused, 1e9)
            await self._end(turn, 0, None)
            return
        self.allowed_of[turn.submit.run_id] = 2 if last == HOLD else None
        await super().talk(turn)


@dataclass(frozen=True)
class Answered:
    """An answer; not `is_whole`: the client left before its end. Status 0: before its beginning."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = True

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Caller:
    """One connection that is kept as long as the server keeps it: one that it drops unasked is an error."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=SECONDS)

    def call(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        *,
        patience: float = SECONDS,
        silence: float = SECONDS,
    ) -> Answered:
        """Leaves when nothing comes for `patience` seconds, or a stream is silent for `silence`."""
        connection = self._connection
        if connection.sock is not None:
            connection.sock.settimeout(SECONDS)
        sent = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, target, body, {**sent, **headers})
        connection.sock.settimeout(patience)
        try:
            response = connection.getresponse()
        except TimeoutError:
            connection.close()
            return Answered(0, is_whole=False)
        told = {name.lower(): value for name, value in response.getheaders()}
        if not told.get("content-type", "").startswith("text/event-stream"):
            return Answered(response.status, told, response.read())
        return self._stream(response, told, silence)

    def _stream(self, response: http.client.HTTPResponse, told: dict[str, str], silence: float) -> Answered:
        pieces: list[bytes] = []
        sock = self._connection.sock
        if sock is not None:
            sock.settimeout(silence)
        try:
            while piece := response.read1():
                pieces.append(piece)
        except TimeoutError:
            self._connection.close()
            return Answered(response.status, told, b"".join(pieces), is_whole=False)
        return Answered(response.status, told, b"".join(pieces))

    def open(self, target: str, body: bytes) -> dict[str, str]:
        """Begins a stream that is read no further; its headers."""
        self._connection.request("POST", target, body, {"Content-Type": "application/json"})
        return {name.lower(): value for name, value in self._connection.getresponse().getheaders()}

    def close(self) -> None:
        """Leaves."""
        self._connection.close()


class World:
    """Live things by kind, made when they are asked for and not there (any more)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.caller = Caller(url)
        self._found: dict[str, str] = {}
        self._talking: list[Caller] = []
        self._makers: dict[str, Callable[[], str]] = {
            "queued": lambda: self._run("queued", input=QUEUE),
            "running": lambda: self._run("decoding", input=HOLD, session="s-1", agent="a-1"),
            "paused": self._paused,
            "input_required": lambda: self._run("input_required", input="Hi", on_end="await_input"),
            "asking": lambda: self._run("input_required", input="Read it.", tools=TOOLS),
            "ended": lambda: self._run("completed", input="Hi", session="s-1", agent="a-2"),
            "cancelled": self._cancelled,
            "chat": lambda: self._said("/v1/chat/completions", {"messages": [_user("Hi")]}),
            "live chat": self._chatting,
            "text": lambda: self._said("/v1/completions", {"prompt": "Once"}),
            "response": lambda: self._said("/v1/responses", {"input": "Hi"}),
            "live response": lambda: self._said("/v1/responses", {"input": HOLD, "background": True}),
            "unstored response": lambda: self._said("/v1/responses", {"input": "Hi", "store": False}),
            "message": lambda: self._said(MESSAGES, {"messages": [_user("Think")], "max_tokens": 9}, "msg_"),
            "response as run": lambda: self._said("/v1/responses", {"input": "Hi"}, "resp_"),
            "session": lambda: self.of("running") and "s-1",
            "model": lambda: "model",
            "alias": lambda: "claude-x",
        }
        self._statuses = {
            **{kind: kind for kind in ("queued", "paused", "input_required", "cancelled")},
            "running": "decoding",
            "ended": "completed",
            "asking": "input_required",
        }

    @property
    def kinds(self) -> list[str]:
        """All kinds."""
        return [*self._makers]

    def of(self, kind: str) -> str:
        """The id of one of this kind."""
        found = self._found.get(kind)
        if found is not None and not self._is_still(kind, found):
            if kind in self._statuses:
                self.post(f"/v1/runs/{found}/cancel", {})  # whatever became of it, it takes no worker
            found = None
        if found is None:
            found = self._found[kind] = self._makers[kind]()
        return found

    def call_id(self) -> str:
        """The id of the call that the asking run waits for."""
        told = self._get(f"/v1/runs/{self.of('asking')}").json()
        return str(told["input_required"]["calls"][0]["id"])

    def clear(self) -> None:
        """Ends all that lives, and waits until the server is idle."""
        for caller in self._talking:
            caller.close()
        self._talking.clear()
        self._found.clear()
        self._until(lambda: not self._cancel_live())
        self._until(self._is_idle, self._health)

    def close(self) -> None:
        """Leaves."""
        self.caller.close()
        for caller in self._talking:
            caller.close()

    def _cancel_live(self) -> int:
        told = [self._get(f"/v1/runs?status={status}&limit=500").json()["data"] for status in LIVE]
        lines = [line for page in told for line in page]
        for line in lines:
            self.post(f"/v1/runs/{line['id']}/cancel", {"tree": True})
        return len(lines)

    def _is_idle(self) -> bool:
        """No run lives, no place in line is taken, and no stream is followed but the
        gateway's inbox."""
        told = self._health()
        return told == {"runs_live": 0, "runs_waiting": 0, "streams_followed": 1}

    def _health(self) -> dict[str, Any]:
        told = self._get("/health").json()["gateway"]
        return {name: told[name] for name in ("runs_live", "runs_waiting", "streams_followed")}

    def _is_still(self, kind: str, found: str) -> bool:
        if kind in self._statuses:
            told = self._get(f"/v1/runs/{found}")
            return told.status == 200 and bool(told.json()["status"] == self._statuses[kind])
        if kind == "session":
            return self._is_still("running", self._found.get("running", ""))
        if kind.endswith("response"):
            told = self._get(f"/v1/responses/{found}")
            is_there = told.status == (404 if kind == "unstored response" else 200)
            return is_there and (kind != "live response" or told.json()["status"] == "in_progress")
        return kind != "live chat" or self._is_still("running", found.replace("chatcmpl-", "run-"))

    def _run(self, status: str, **fields: Any) -> str:
        told = self.post("/v1/runs", fields)
        assert told.status == 202, told
        run_id = str(told.json()["id"])
        self._until(lambda: self._get(f"/v1/runs/{run_id}").json()["status"] == status)
        return run_id

    def _paused(self) -> str:
        run_id = self._run("decoding", input=HOLD)
        self.post(f"/v1/runs/{run_id}/pause", {})
        self._until(lambda: self._get(f"/v1/runs/{run_id}").json()["status"] == "paused")
        return run_id

    def _cancelled(self) -> str:
        run_id = self._run("queued", input=QUEUE)
        self.post(f"/v1/runs/{run_id}/cancel", {})
        self._until(lambda: self._get(f"/v1/runs/{run_id}").json()["status"] == "cancelled")
        return run_id

    def _said(self, path: str, body: dict[str, Any], own_prefix: str = "") -> str:
        """Its id; with a prefix, the id of its run."""
        told = self.post(path, body)
        assert told.status == 200, told
        found = str(told.json()["id"])
        return f"run-{found.removeprefix(own_prefix)}" if own_prefix else found

    def _chatting(self) -> str:
        """A chat whose client reads on."""
        caller = Caller(self.url)
        self._talking.append(caller)
        body = json.dumps({"messages": [_user(HOLD)], "stream": True}).encode()
        told = caller.open("/v1/chat/completions", body)
        run_id = told["x-tetrarch-run"]
        self._until(lambda: self._get(f"/v1/runs/{run_id}").json()["status"] == "decoding")
        return run_id.replace("run-", "chatcmpl-")

    def post(self, path: str, body: Any) -> Answered:
        """One call."""
        return self.caller.call("POST", path, json.dumps(body).encode())

    def _get(self, target: str) -> Answered:
        return self.caller.call("GET", quote(target, safe="/?=&"))

    def _until(self, condition: Callable[[], Any], about: Callable[[], object] = str) -> None:
        deadline = time.monotonic() + 2 * SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"what the test waits for does not come: {about()}"
            time.sleep(0.01)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
