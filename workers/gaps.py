"""How long agents stay away, learned by what they wait for. Knows tools by name and nothing of agents."""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_SECONDS = 300.0
"""No agent is expected for longer: most that stay away for so long do not come back soon."""

_TOOL_SECONDS = 60.0
_USER_SECONDS = LONGEST_SECONDS
"""Expected before anything was learned; an agent that waits for no tool waits for a person."""
_NEW_SHARE = 0.2
_MIN_OBSERVED = 3
_MAX_TOOLS = 256
_P90 = 1.2816
"""Standard deviations from the median to the 90th percentile of a normal distribution."""
_SHORTEST_SECONDS = 1e-3


@dataclass(slots=True)
class _Gap:
    """Moving mean and variance of the logarithm of one kind of gap."""

    num_observed: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def observe(self, value: float) -> None:
        self.num_observed += 1
        share = max(_NEW_SHARE, 1.0 / self.num_observed)
        off = value - self.mean
        self.mean += share * off
        self.variance = (1.0 - share) * (self.variance + share * off * off)


class Gaps:
    """Log-normal gaps by tool; "" is a person. All in seconds."""

    def __init__(self) -> None:
        self._gaps: dict[str, _Gap] = {}  # the least recently observed first

    def observe(self, tool: str, seconds: float) -> None:
        """An agent came back after so long."""
        gap = self._gaps.pop(tool, None) or _Gap()
        gap.observe(math.log(max(seconds, _SHORTEST_SECONDS)))
        self._gaps[tool] = gap
        if len(self._gaps) > _MAX_TOOLS:
            del self._gaps[next(iter(self._gaps))]

    def stay(self, tool: str) -> float:
        """How long an agent is worth waiting for: nine of ten are back by then, or LONGEST_SECONDS."""
        gap = self._gaps.get(tool)
        if gap is None or gap.num_observed < _MIN_OBSERVED:
            return _TOOL_SECONDS if tool else _USER_SECONDS
        return min(math.exp(gap.mean + _P90 * math.sqrt(gap.variance)), LONGEST_SECONDS)

    def median(self, tool: str) -> float:
        """When an agent that left now is expected back."""
        gap = self._gaps.get(tool)
        if gap is None or gap.num_observed < _MIN_OBSERVED:
            return self.stay(tool) / 2
        return math.exp(gap.mean)
