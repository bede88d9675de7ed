"""A small random hybrid on disk that chats, and agents that talk to it over HTTP. Knows no engine."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import AddedToken, Tokenizer

from tests.models import make_model

from .served import Answer

ARGUMENTS = {"path": "notes.md", "line": 7}
CALL_TEXT = f'<tool_call>\n{{"name": "read", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
"""One token of the model: a bias makes it call the tool."""
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads from a line of a file on.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        },
    },
}

NO_MARKERS = {str(token_id): -100 for token_id in range(256, 320)}
"""A bias for answers of bytes alone: a trained model does not write turn markers into one either."""

_TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ message.content or '' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
{{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_chatting_hybrid(folder: Path) -> Path:
    """A tiny qwen3_next whose tokens are bytes, turn markers and one tool call."""
    return make_chatting(folder, "qwen3_next", max_position_embeddings=8192)


def make_chatting(folder: Path, model_type: str, **changes: Any) -> Path:
    """The same of any family; `changes` go to the model's config."""
    make_model(folder, model_type, **changes)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(CALL_TEXT, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def call_token(folder: Path) -> int:
    """The id of CALL_TEXT."""
    token_id: int | None = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(CALL_TEXT)
    assert token_id is not None
    return token_id


def words(seed: int, num_chars: int) -> str:
    """Text that no other seed begins with: as many tokens as characters."""
    chance = random.Random(seed)
    return f"{seed}: {''.join(chance.choices('abcdefghij ', k=num_chars))}"[:num_chars]


@dataclass(frozen=True, slots=True)
class Said:
    """One answer, as far as two servers must agree on it, and what it cost one of them."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = field(compare=False)


@dataclass(slots=True)
class Agent:
    """One agent of a session and its conversation; greedy."""

    http: aiohttp.ClientSession
    url: str
    name: str
    session: str = "session"
    parent: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        told = {"Session": self.session, "Agent": self.name, "Parent": self.parent}
        return {f"X-Tetrarch-{name}": value for name, value in told.items() if value}

    def body(self, max_tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "tools": [TOOL],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": NO_MARKERS,
            **more,
        }

    async def ask(self, max_tokens: int, *messages: dict[str, Any], **more: Any) -> Said:
        """Adds messages and the answer, as its text, to the conversation."""
        self.messages += messages
        body = self.body(max_tokens, **more)
        call = self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers)
        async with call as response:
            answer = await response.json()
            assert response.status == 200, answer
        said = said_in(answer)
        self.messages.append({"role": "assistant", "content": said.text})
        return said

    async def stream(self, max_tokens: int, answer: Answer) -> None:
        """Follows a streamed answer to its end, whatever that is. It does not become history."""
        body = self.body(max_tokens, stream=True)
        call = self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=self.headers)
        async with call as response:
            assert response.status == 200, await response.json()
            async for line in response.content:
                answer.take(line.decode().rstrip("\n"))


def said_in(body: dict[str, Any]) -> Said:
    """From the body of an unstreamed chat answer. A call that came apart is CALL_TEXT again."""
    message, usage = body["choices"][0]["message"], body["usage"]
    text = message["content"]
    if message.get("tool_calls"):
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        text = CALL_TEXT
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return Said(text, usage["prompt_tokens"], usage["completion_tokens"], cached_tokens)


def call_message() -> dict[str, Any]:
    """The call as a client sends it back: arguments in another order, and without spaces."""
    arguments = json.dumps(dict(reversed(ARGUMENTS.items())), separators=(",", ":"))
    function = {"name": "read", "arguments": arguments}
    calls = [{"id": "call-1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


class Metrics:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._text = text

    @staticmethod
    async def scrape(http: aiohttp.ClientSession, url: str) -> Metrics:
        async with http.get(f"{url}/metrics") as response:
            return Metrics(await response.text())

    @staticmethod
    async def until(
        http: aiohttp.ClientSession, url: str, condition: Callable[[Metrics], bool], seconds: float = 20.0
    ) -> Metrics:
        """The first scrape of which this is so; what engines say of themselves is up to two seconds old."""
        deadline = time.monotonic() + seconds
        while True:
            metrics = await Metrics.scrape(http, url)
            if condition(metrics):
                return metrics
            assert time.monotonic() < deadline, metrics.engine
            await asyncio.sleep(0.1)

    @property
    def engine(self) -> str:
        """The engine's own figures, to read."""
        return "\n".join(re.findall(r"^tetrarch_engine_.*", self._text, re.MULTILINE))

    def __call__(self, name: str, label: str = "") -> float:
        """The value of `tetrarch_<name>`, of the series with this label where there are several."""
        found = re.findall(rf"^tetrarch_{name}(?:\{{(.*)\}})? (\S+)$", self._text, re.MULTILINE)
        values = [float(value) for labels, value in found if label in labels]
        assert len(values) == 1, (name, label, found)
        return values[0]
