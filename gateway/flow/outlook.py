"""When a turn's answer may begin, and who goes before it in line: estimates, from what is known and measured.

Pure: gets counts and rates. Turns that come later and go first are not foreseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .rates import Rates

DONE_SHARE = 0.5
"""How much of what is at work is taken to be done already."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """`queue_pos`: 1 goes next; None: it is in no line here. `seconds`: until its first token; None: it has
    that, or nothing can be said.
    """

    queue_pos: int | None = None
    seconds: float | None = None


NO_OUTLOOK = Outlook()


@dataclass(frozen=True, slots=True)
class Ahead:
    """A turn that an engine was sent before another one: what was left of it then."""

    uncached_tokens: int  # of its prompt; 0 once it has a token
    output_tokens: int


def in_line(
    engines: Sequence[Rates], at_work_seconds: float, ahead_seconds: float, own_tokens: float
) -> float | None:
    """For a turn that waits for a place at these engines; None: there are none. `at_work_seconds`: engine
    seconds that they have been given; `ahead_seconds`: of all together, for those before it in line;
    `own_tokens`: of its prompt, to be computed.
    """
    if not engines:
        return None
    prefill = sum(rates.prefill for rates in engines) / len(engines)
    return at_work_seconds * (1 - DONE_SHARE) / len(engines) + ahead_seconds + own_tokens / prefill


def at_engine(rates: Rates, ahead: Sequence[Ahead], num_workers: int, own_tokens: float) -> float:
    """For a turn that waits at an engine for a worker: the prompts before it, and answers where those before
    it have all workers.
    """
    tokens = own_tokens + sum(turn.uncached_tokens for turn in ahead)
    answers = sum(turn.output_tokens for turn in ahead) if len(ahead) >= num_workers else 0
    return rates.seconds(tokens, answers * (1 - DONE_SHARE))
