"""Reads a trace of calls and makes their token ids. Knows no engine, no cache and no clock.

A trace has one JSON object a line. With `session`: `agent`, `think`, `input_length`, `output_length`, `stop`
and `hash_ids` of 64-token blocks, each id naming its block and all before it. Without: one call a session,
blocks of 512 tokens (Mooncake's format).
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec

from .errors import TraceError

BLOCK_TOKENS = 64
MOONCAKE_BLOCK_TOKENS = 512
_TOKEN_BYTES = 4


class _Line(msgspec.Struct):
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: int | str | None = None
    agent: str = ""
    think: float = 0.0
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one agent. blocks: ids of the prompt's first blocks."""

    session: str
    agent: str
    parent: str  # the agent that called this one; "": nobody
    think_seconds: float  # between the end of the session's call before it and this one
    prompt_tokens: int
    output_tokens: int
    waits_for_tool: bool  # its answer was a tool call
    is_final: bool  # its agent does not call again
    blocks: tuple[int, ...]
    block_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together."""
        return self.prompt_tokens + self.output_tokens

    @property
    def repeatable_tokens(self) -> int:
        """The prompt's first tokens that the trace names; the rest are new in each call."""
        return min(len(self.blocks) * self.block_tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Trace:
    """All sessions, each with its calls in order."""

    sessions: tuple[tuple[Call, ...], ...]
    has_sessions: bool  # False: single calls, whose order in the file means something

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest call, its answer included."""
        return max(call.num_tokens for session in self.sessions for call in session)

    def within(self, context_tokens: int) -> Trace:
        """Without the calls that such a context cannot hold, and without the sessions that this empties."""
        kept = (
            tuple(call for call in session if call.num_tokens <= context_tokens) for session in self.sessions
        )
        return Trace(tuple(session for session in kept if session), self.has_sessions)

    def without_hints(self) -> Trace:
        """As callers tell it that say nothing about their next calls."""
        return Trace(
            tuple(
                tuple(replace(call, parent="", waits_for_tool=False, is_final=False) for call in session)
                for session in self.sessions
            ),
            self.has_sessions,
        )

    @property
    def num_calls(self) -> int:
        return sum(map(len, self.sessions))


def read_trace(path: Path) -> Trace:
    """Parse a file of JSON lines, gzipped or not. Raises TraceError that names the line and what is wrong."""
    lines: dict[str, list[_Line]] = {}
    has_sessions = False
    for number, line in enumerate(_lines(path), 1):
        try:
            parsed = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise TraceError(
                f"{path.name} line {number}: {error}: give one call as JSON in each line"
            ) from error
        if parsed.input_length < 1 or parsed.output_length < 0:
            raise TraceError(
                f"{path.name} line {number}: input_length is {parsed.input_length} and output_length "
                f"{parsed.output_length}: the first must be 1 or more, the second 0 or more"
            )
        has_sessions |= parsed.session is not None
        name = f"call {number}" if parsed.session is None else str(parsed.session)
        lines.setdefault(name, []).append(parsed)
    if not lines:
        raise TraceError(f"{path.name} holds no call: give a trace with one JSON object a line")
    block_tokens = BLOCK_TOKENS if has_sessions else MOONCAKE_BLOCK_TOKENS
    return Trace(tuple(_session(name, calls, block_tokens) for name, calls in lines.items()), has_sessions)


class Prompts:
    """Token ids of prompts: the same block id always gives the same tokens, all else is new."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}
        self._num_fresh = count()

    def of(self, call: Call) -> bytes:
        """Little-endian uint32 ids."""
        size = call.block_tokens * _TOKEN_BYTES
        known = b"".join([self._blocks.get(block) or self._block(block, size) for block in call.blocks])
        num_bytes = call.prompt_tokens * _TOKEN_BYTES
        if len(known) >= num_bytes:
            return known[:num_bytes]
        return known + _pseudo_random(f"call {next(self._num_fresh)}", num_bytes - len(known))

    def _block(self, block: int, size: int) -> bytes:
        made = self._blocks[block] = _pseudo_random(f"block {block}", size)
        return made


def _pseudo_random(name: str, num_bytes: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(num_bytes)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: {reason}: give the path of a readable trace") from error


def _session(name: str, lines: list[_Line], block_tokens: int) -> tuple[Call, ...]:
    last = {line.agent: index for index, line in enumerate(lines)}
    return tuple(
        Call(
            session=name,
            agent=line.agent or "main",
            parent=line.agent.rpartition("/")[0],
            think_seconds=max(line.think, 0.0),
            prompt_tokens=line.input_length,
            output_tokens=max(line.output_length, 1),
            waits_for_tool=line.stop == "tool_use",
            is_final=last[line.agent] == index,
            blocks=line.hash_ids,
            block_tokens=block_tokens,
        )
        for index, line in enumerate(lines)
    )
