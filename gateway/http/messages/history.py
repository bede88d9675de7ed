"""The conversation of a Messages body as chat messages, in the order in which it was.

An assistant's blocks become one message again, as the model wrote it, so that its prompt begins the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from gateway.dialects.messages.signature import thought_of

from .blocks import Block, block_text, blocks_of, join, joined_text, may, need, wrong
from .tools import Tools

ChatMessage = dict[str, Any]

MAX_OPENED_CHARS = 32 << 20
"""What the thoughts that signatures carry may unpack to, all together."""

ONLY_OWN = (
    "'text', 'thinking' or 'tool_use': blocks of Anthropic's server tools hold what this server cannot read"
)


class MessageParam(Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]
    clear_at: Literal["next_user_message", "never"] | None = None  # of a system message


@dataclass(slots=True)
class History:
    """Chat messages. `num_changed`: thoughts that came back other than they were told."""

    tools: Tools
    messages: list[ChatMessage] = field(default_factory=list)
    num_changed: int = 0
    num_opened: int = 0  # characters that signatures carried
    _names: dict[str, str] = field(default_factory=dict)  # of tools, by the ids of their calls

    def add(self, message: MessageParam, where: str) -> None:
        """One more message. Raises InvalidField."""
        match message.role:
            case "user":
                self._add_user(message.content, where)
            case "assistant":
                self._add_assistant(message.content, where)
            case "system":
                self._add_system(message.content, where)

    def _add_user(self, content: Any, where: str) -> None:
        """Tool results as messages of their own, what is said between them in its place."""
        texts: list[str] = []
        blocks = blocks_of(content, f"{where}.content")
        for path, block in blocks:
            if block.get("type") != "tool_result":
                texts.append(block_text(block, path))
                continue
            if texts:
                self._say("user", texts)
                texts = []
            self.messages.append(self._result(block, path))
        if texts or not blocks:
            self._say("user", texts)

    def _add_system(self, content: Any, where: str) -> None:
        texts = []
        for path, block in blocks_of(content, f"{where}.content"):
            match block.get("type"):
                case "tool_addition":
                    texts.append(self._addition(need(block, "tool", dict, path), f"{path}.tool"))
                case "tool_removal":
                    tool = need(block, "tool", dict, path)
                    texts.append(f"The tool {need(tool, 'name', str, f'{path}.tool')} is no longer there.")
                case _:
                    texts.append(block_text(block, path))
        if texts:
            self._say("system", texts)

    def _add_assistant(self, content: Any, where: str) -> None:
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for path, block in blocks_of(content, f"{where}.content"):
            match block.get("type"):
                case "text":
                    texts.append(need(block, "text", str, path))
                case "thinking":
                    thoughts.append(self._thought(block, path))
                case "tool_use":
                    calls.append(self._call(block, path))
                case "redacted_thinking" | "fallback":
                    pass  # of another server; nobody here can read it
                case "compaction":
                    texts.append(may(block, "content", str, path, ""))
                case other:
                    raise wrong(f"{path}.type", other, ONLY_OWN)
        text = "".join(texts)
        message: ChatMessage = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning := "\n".join(filter(None, thoughts)):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        if text or reasoning or calls:
            self.messages.append(message)

    def _thought(self, block: Block, where: str) -> str:
        signature = may(block, "signature", str, where, "")
        text = block.get("thinking")
        if not isinstance(text, str):
            raise wrong(f"{where}.thinking", text, "a string")
        thought = thought_of(text, signature)
        self.num_opened += 0 if text else len(thought.text)
        if self.num_opened > MAX_OPENED_CHARS:
            remedy = f"left out: the conversation's thoughts have more than {MAX_OPENED_CHARS} characters"
            raise wrong(f"{where}.signature", "a packed thought", remedy)
        self.num_changed += thought.is_changed
        return thought.text

    def _call(self, block: Block, where: str) -> dict[str, Any]:
        call_id, name = need(block, "id", str, where), need(block, "name", str, where)
        self._names[call_id] = name
        function = {"name": name, "arguments": need(block, "input", dict, where)}
        return {"id": plain_id(call_id), "type": "function", "function": function}

    def _result(self, block: Block, where: str) -> ChatMessage:
        call_id = need(block, "tool_use_id", str, where)
        texts: list[str] = []
        loaded: list[str] = []
        content = block.get("content")
        for path, item in blocks_of("" if content is None else content, f"{where}.content"):
            if item.get("type") == "tool_reference":
                loaded.append(need(item, "tool_name", str, path))
            else:
                texts.append(block_text(item, path))
        if loaded:
            texts.append(self.tools.definitions(loaded))
        text = join(texts)
        if may(block, "is_error", bool, where, default=False) and "error" not in text[:200].lower():
            text = f"Error: {text}"
        message: ChatMessage = {"role": "tool", "tool_call_id": plain_id(call_id), "content": text}
        return {**message, "name": self._names[call_id]} if call_id in self._names else message

    def _addition(self, tool: Block, where: str) -> str:
        if tool.get("type") == "tool_definition":
            tool, where = need(tool, "definition", dict, where), f"{where}.definition"
            self.tools.define(tool, where)
        return self.tools.definitions([need(tool, "name", str, where)])

    def _say(self, role: str, texts: Sequence[str]) -> None:
        self.messages.append({"role": role, "content": join([*texts])})


def plain_id(call_id: str) -> str:
    """Nine letters and digits: Mistral's templates refuse other ids, and none needs the client's."""
    return hashlib.blake2b(call_id.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def read_history(system: Any, messages: Sequence[MessageParam], tools: Tools) -> History:
    """The whole conversation. Raises InvalidField, also where an assistant's message is to be continued."""
    history = History(tools)
    if text := joined_text(system, "system"):
        history.messages.append({"role": "system", "content": text})
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for index, message in enumerate(messages):
        if message.clear_at != "next_user_message" or index > last_user:
            history.add(message, f"messages[{index}]")
    if messages[-1].role == "assistant":
        remedy = "'user': this server does not continue an assistant's message (prefill)"
        raise wrong(f"messages[{len(messages) - 1}].role", "assistant", remedy)
    return history
