"""How much of its budget a run has used. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.native.bodies import RunUsage

from .fields import Budget


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """`left` names only what is limited. Thinking is told at the end of a run, tool calls are not."""

    limits: Budget
    used: Budget
    left: Budget


def budget_use(limits: Budget, usage: RunUsage, wall_ms: int) -> BudgetUse:
    """Of a run's own budget."""
    used = Budget(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        thinking_tokens=usage.reasoning_tokens,
        wall_ms=wall_ms,
    )
    left = Budget(
        prompt_tokens=_left(limits.prompt_tokens, used.prompt_tokens),
        output_tokens=_left(limits.output_tokens, used.output_tokens),
        thinking_tokens=_left(limits.thinking_tokens, used.thinking_tokens),
        wall_ms=_left(limits.wall_ms, used.wall_ms),
    )
    return BudgetUse(limits, used, left)


def _left(limit: int | None, used: int | None) -> int | None:
    return None if limit is None or used is None else max(0, limit - used)
