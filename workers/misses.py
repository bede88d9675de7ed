"""Why a turn computes again what an earlier turn of its agent had. Remembers tokens; knows no cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from .messages import MissCause, Missed
from .pins import AgentKey
from .sharing import common_length

MIN_MISSED_TOKENS = 1000
"""Less is not worth a word."""

_NEAR_TOKENS = 256
"""Reuse that ends so close before the parting of two prefixes ends because of it."""
_NUM_SHOWN = 8
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class History:
    """What an agent's last turn left."""

    namespace: bytes
    tokens: array[int]  # prompt and answer
    was_published: bool  # False: the turn failed, or its pages went with a failed step


@dataclass(frozen=True, slots=True)
class Restart:
    """How a new prompt goes on from its agent's history."""

    common: int  # tokens that both begin with
    history: History

    @property
    def is_compaction(self) -> bool:
        """Most of what the agent had is left behind."""
        return 2 * self.common < len(self.history.tokens)


class Histories:
    """The last tokens of each agent, within a bound of bytes for all; the oldest go first."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._histories: dict[AgentKey, History] = {}

    def remember(self, key: AgentKey, history: History) -> None:
        """Keep it in place of the agent's earlier one."""
        self.forget(key)
        self._histories[key] = history
        self._num_bytes += _size(history)
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._histories)))

    def forget(self, key: AgentKey) -> None:
        history = self._histories.pop(key, None)
        if history is not None:
            self._num_bytes -= _size(history)

    def clear(self) -> None:
        self._histories.clear()
        self._num_bytes = 0

    def restart(self, key: AgentKey, prompt: array[int]) -> Restart | None:
        """How the prompt goes on from the agent's last tokens; None: they are not known."""
        history = self._histories.get(key)
        return None if history is None else Restart(common_length(history.tokens, prompt), history)


@dataclass(frozen=True, slots=True)
class Found:
    """What a prompt found in the cache."""

    namespace: bytes
    prompt: array[int]
    num_cached: int
    page_tokens: int
    is_shown: bool  # the caller may see the tokens on each side


def explain(restart: Restart, found: Found) -> Missed | None:
    """Why tokens that the earlier turn had are computed again; None: they are few."""
    history = restart.history
    recomputed = min(len(history.tokens), len(found.prompt)) - found.num_cached
    if recomputed <= MIN_MISSED_TOKENS:
        return None
    cause, position = _cause(restart, found)
    end = position + _NUM_SHOWN if found.is_shown else position
    return Missed(
        cause=cause,
        position=position,
        page=position // found.page_tokens,
        recomputed_tokens=recomputed,
        before=tuple(history.tokens[position:end]),
        now=tuple(found.prompt[position:end]),
    )


def _cause(restart: Restart, found: Found) -> tuple[MissCause, int]:
    if restart.history.namespace != found.namespace:
        return "other_namespace", 0
    common = restart.common
    parts = common < min(len(restart.history.tokens), len(found.prompt))
    if parts and found.num_cached >= common - _NEAR_TOKENS:
        return "diverged", common
    return "evicted" if restart.history.was_published else "never_published", found.num_cached


def _size(history: History) -> int:
    return len(history.tokens) * history.tokens.itemsize
