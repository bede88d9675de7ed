"""Which engine runs a turn: filter, cost in seconds, pick. And a bounded memory of what engines have seen.

Pure: no clock, no bus. Affinity is a bonus inside a cost, never a rule; a cache miss goes by load, then to
whoever was given a cold prompt least recently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .rates import ANSWER_TOKENS, Rates

STICKY_SECONDS = 3.0
"""An agent stays with its engine while another one would not be faster by more than this."""

COLD_SHARE = 0.5
"""A prompt of which less than this is covered anywhere is cold."""

MEMORY_BYTES = 64 << 20
MEMORY_PROMPTS = 32
"""Prompts kept per engine; both bounds hold for each."""


Reason = Literal["held", "kin", "cost", "cold", "resent"]
"""Why an engine got a turn. held: it has what the turn goes on from, an earlier attempt or a fork's parent.
kin: the agent's last turn went there, or its parent's, or its session's. cost: it takes the fewest seconds
to the first token. cold: no engine is believed to hold much of the prompt, so the least busy one. resent:
the engine before was lost.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine with room, as the router sees it."""

    engine_id: str
    covered_tokens: int  # of this prompt, believed to be in its cache
    queued_tokens: int  # uncached prompt tokens of turns that it holds and has not prefilled
    num_turns: int  # that it holds
    prefill_tokens_per_second: float = 0.0  # 0: not measured
    decode_tokens_per_second: float = 0.0  # of all its streams together; 0: not measured
    last_cold: int = 0  # a counter's value when it was last given a cold prompt


@dataclass(frozen=True, slots=True)
class Route:
    """The choice. `cold`: no engine was believed to hold much of the prompt."""

    engine_id: str
    uncached_tokens: int
    cold: bool
    is_sticky: bool = False  # it stays where it was


def cost_seconds(prompt_tokens: int, candidate: Candidate) -> float:
    """Roughly until the turn's first token: its own prefill, those ahead of it, what decoding takes."""
    rates = Rates.measured(candidate.prefill_tokens_per_second, candidate.decode_tokens_per_second)
    uncached = max(prompt_tokens - candidate.covered_tokens, 1)
    return rates.seconds(uncached + candidate.queued_tokens, candidate.num_turns * ANSWER_TOKENS)


def pick(prompt_tokens: int, candidates: Sequence[Candidate], sticky: str | None) -> Route | None:
    """The engine for a prompt; `sticky` is the last one of the agent or its kin. None without candidates."""
    if not candidates:
        return None
    costs = {candidate.engine_id: cost_seconds(prompt_tokens, candidate) for candidate in candidates}
    best = min(candidates, key=lambda candidate: costs[candidate.engine_id])
    cold = max(candidate.covered_tokens for candidate in candidates) < COLD_SHARE * prompt_tokens
    chosen = best
    for candidate in candidates:
        if candidate.engine_id == sticky and costs[sticky] <= costs[best.engine_id] + STICKY_SECONDS:
            return _route(prompt_tokens, candidate, cold=cold, is_sticky=True)
    if cold:
        chosen = min(candidates, key=lambda c: (c.queued_tokens, c.num_turns, c.last_cold, c.engine_id))
    return _route(prompt_tokens, chosen, cold=cold)


def _route(prompt_tokens: int, chosen: Candidate, *, cold: bool, is_sticky: bool = False) -> Route:
    return Route(chosen.engine_id, max(prompt_tokens - chosen.covered_tokens, 1), cold, is_sticky)


class Memory:
    """Each agent's last prompt at each engine's last incarnation (all unnamed callers count as one agent), as
    many of the newest as both bounds allow; and the last engine of each agent and session.
    """

    def __init__(self, num_bytes: int = MEMORY_BYTES, num_prompts: int = MEMORY_PROMPTS) -> None:
        self._num_bytes = num_bytes
        self._num_prompts = num_prompts
        self._prompts: dict[
            str, tuple[int, OrderedDict[str, bytes]]
        ] = {}  # engine -> incarnation, agent -> ids
        self._last_engine: OrderedDict[str, str] = OrderedDict()
        self._last_cold: dict[str, int] = {}
        self._num_cold = 0

    def note(
        self, agent: str, engine_id: str, incarnation: int, token_ids: bytes, *, cold: bool
    ) -> Callable[[], None]:
        """The prompt goes to that engine. The function forgets it again, for one that did not go."""
        if cold:
            self._num_cold += 1
            self._last_cold[engine_id] = self._num_cold
        known, prompts = self._prompts.get(engine_id, (incarnation, OrderedDict()))
        if known != incarnation:  # a new incarnation has an empty cache
            prompts = OrderedDict()
        self._prompts[engine_id] = (incarnation, prompts)
        before = prompts.get(agent)
        prompts[agent] = token_ids
        prompts.move_to_end(agent)
        while len(prompts) > self._num_prompts or sum(map(len, prompts.values())) > self._num_bytes:
            prompts.popitem(last=False)

        def forget() -> None:
            if prompts.get(agent) is not token_ids:
                return
            del prompts[agent]
            if before is not None:
                prompts[agent] = before

        return forget

    def covered_tokens(self, engine_id: str, incarnation: int, token_ids: bytes) -> int:
        """The longest prefix that a remembered prompt of that engine shares with this one."""
        known, prompts = self._prompts.get(engine_id, (incarnation, OrderedDict()))
        if known != incarnation:
            return 0
        return max((common_prefix_tokens(prompt, token_ids) for prompt in prompts.values()), default=0)

    def place(self, names: Iterable[str], engine_id: str) -> None:
        """An agent's turn goes to that engine; `names` are its own and its session's, "" for none."""
        for name in filter(None, names):
            self._last_engine[name] = engine_id
            self._last_engine.move_to_end(name)
            if len(self._last_engine) > 64 * self._num_prompts:
                self._last_engine.popitem(last=False)

    def last_engine(self, names: Iterable[str]) -> str | None:
        """Where the first known one of these was placed last: agent, parent, session."""
        return next((self._last_engine[name] for name in names if name in self._last_engine), None)

    def last_cold(self, engine_id: str) -> int:
        """A counter's value when that engine was last given a cold prompt; 0: never."""
        return self._last_cold.get(engine_id, 0)


def common_prefix_tokens(first: bytes, second: bytes) -> int:
    """Leading uint32 tokens that both have, by bisection over memory compares."""
    low, high = 0, min(len(first), len(second)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
