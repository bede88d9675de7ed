"""What turns cost in engine seconds: measured rates, learned answer lengths, and when a full line has room.

Pure: gets figures, measures nothing itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_PREFILL_TOKENS_PER_SECOND = 200.0
"""Of an engine that has not measured its own yet."""

OUTPUT_TOKEN_INPUTS = 19.0
"""What an output token costs in computed input tokens, where only one of the two rates is known."""

ANSWER_TOKENS = 256
"""How long an answer is taken to be when nothing is told or learned and `max_tokens` allows more."""

NEWEST_SHARE = 0.3
"""How much of a moving mean its newest value makes."""

MAX_AGENTS = 4096
MAX_RETRY_AFTER_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one engine, all its turns together; neither is 0."""

    prefill: float
    decode: float

    @classmethod
    def measured(cls, prefill: float, decode: float) -> Rates:
        """From measurements, of which 0 is none."""
        prefill = prefill or decode * OUTPUT_TOKEN_INPUTS or DEFAULT_PREFILL_TOKENS_PER_SECOND
        return cls(prefill, decode or prefill / OUTPUT_TOKEN_INPUTS)

    def seconds(self, computed_tokens: float, output_tokens: float) -> float:
        """Engine seconds of so many prompt tokens that no cache holds, and generated ones."""
        return computed_tokens / self.prefill + output_tokens / self.decode


def together(rates: Iterable[Rates]) -> Rates:
    """Those of engines that share their work; without any, those of one that has measured nothing."""
    known = list(rates) or [Rates.measured(0, 0)]
    return Rates(sum(each.prefill for each in known), sum(each.decode for each in known))


class MovingMean:
    """A mean in which older values fade."""

    def __init__(self, value: float) -> None:
        self.value = value

    def note(self, value: float) -> None:
        """One more value."""
        self.value += NEWEST_SHARE * (value - self.value)


class AnswerLengths:
    """How long each agent's answers were lately. The agents not seen for longest are forgotten."""

    def __init__(self, max_agents: int = MAX_AGENTS) -> None:
        self._max_agents = max_agents
        self._means: OrderedDict[str, MovingMean] = OrderedDict()

    def note(self, agent: str, num_tokens: int) -> None:
        """An answer has ended by itself. A nameless agent is not learned: it is many."""
        if not agent:
            return
        self._means.setdefault(agent, MovingMean(num_tokens)).note(num_tokens)
        self._means.move_to_end(agent)
        if len(self._means) > self._max_agents:
            self._means.popitem(last=False)

    def expected(self, agent: str, max_tokens: int, told: int | None) -> int:
        """Tokens of its next answer: as told, else as learned, else a usual answer; never over the limit."""
        mean = self._means.get(agent)
        usual = ANSWER_TOKENS if mean is None else math.ceil(mean.value)
        return max(1, min(max_tokens, usual if told is None else told))


def retry_after_seconds(ahead_seconds: float, own_seconds: float, floor: float) -> float:
    """When half of what a class has in line will have been computed, whole seconds from 1 to 300.

    `ahead_seconds`: of the classes above, with all engines at work for it; `own_seconds`: of the class. They
    go first, but its floor's share of the engines comes to it all the same.
    """
    half = own_seconds / 2
    seconds = min(ahead_seconds + half, half / floor if floor else math.inf)
    return float(math.ceil(min(max(seconds, 1.0), MAX_RETRY_AFTER_SECONDS)))
