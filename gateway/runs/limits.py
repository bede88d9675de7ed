"""What a run has used up: budgets, deadline, time in line. Pure: the clock comes in.

Level-triggered: whoever looks finds the same, so a limit needs no memory of having been reached.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from workers.messages import Cancelled, RunEnded

from .spec import Budget
from .state import Phase, RunState

EXCEEDED = "budget_exceeded"

MAX_SECONDS = 7 * 86_400.0
"""No deadline can be later, and what waits for a caller who never comes is not kept for ever."""

TOO_OLD = "The run is a week old, which is the most that any may take."


@dataclass(frozen=True, slots=True)
class Spent:
    """What counts against a budget. Of a tree: of present turns what paused ones have had, and thoughts."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    thinking_tokens: int = 0
    tool_calls: int = 0


_NOTHING, _NO_LIMITS = Spent(), Budget()
_COUNTED = tuple(field.name for field in fields(Spent))


@dataclass(frozen=True, slots=True)
class Accounts:
    """A run's own account and its tree's."""

    own: Spent
    tree: Spent = _NOTHING
    tree_budget: Budget = _NO_LIMITS
    turn: Spent = _NOTHING  # of `own`, the present turn's
    uncounted_thinking: int = 0  # of the present turn: what `tree` lacks


def expired(state: RunState, now: float) -> RunEnded | None:
    """The end of a run whose time is over; `now` in unix seconds."""
    spec = state.spec
    if spec.deadline is not None and now >= spec.deadline:
        return RunEnded(state="expired", error="deadline_exceeded", message="The run's deadline has passed.")
    ttl_ms = spec.queue_ttl_ms
    if ttl_ms is not None and _waits(state) and now - state.waiting_since > ttl_ms / 1000:
        message = f"The run found no worker within its queue_ttl_ms of {ttl_ms}."
        return RunEnded(state="expired", error="queue_ttl_exceeded", message=message)
    accepted_at = state.accepted_at
    age = 0.0 if accepted_at is None else now - accepted_at
    if spec.budget.wall_ms is not None and age > spec.budget.wall_ms / 1000:
        return _exceeded("wall_ms", spec.budget.wall_ms)
    tree_ms = spec.tree_budget.wall_ms
    tree_age = age if spec.tree_since is None else now - spec.tree_since
    if tree_ms is not None and tree_age > tree_ms / 1000:
        return _exceeded("tree_budget.wall_ms", tree_ms)
    if age > MAX_SECONDS:
        return RunEnded(state="expired", error="deadline_exceeded", message=TOO_OLD)
    return None


def _waits(state: RunState) -> bool:
    """Whether it has no worker, or was taken back before it got one."""
    was_taken_back = isinstance(state.turn_end, Cancelled) and state.cached_tokens is None
    return state.phase in (Phase.WAITING, Phase.DISPATCHED) or was_taken_back


def overspent(state: RunState, accounts: Accounts) -> RunEnded | None:
    """The end of a run that may go no further. Before a turn: it needs a token and its prompt; within one:
    it has more than it may. Reaching a limit exactly is no offence.
    """
    is_counted = isinstance(state.turn_end, Cancelled)  # in its tree, too
    is_waiting = state.phase in (Phase.WAITING, Phase.PAUSED)
    own, budget = accounts.own, state.spec.budget
    needs = 1 if is_waiting or is_counted else 0
    checks = [
        ("prompt_tokens", own.prompt_tokens, budget.prompt_tokens),
        ("output_tokens", own.output_tokens + needs, budget.output_tokens),
        ("thinking_tokens", own.thinking_tokens, budget.thinking_tokens),
        ("tool_calls", own.tool_calls, budget.tool_calls),
    ]
    prompt = state.prompt_tokens if needs and state.turn_cached is None else 0  # else it is counted
    checks += _of_tree(accounts, prompt, needs)
    for name, spent, most in checks:
        if most is not None and spent > most:
            return _exceeded(name, most)
    return None


def no_room(accounts: Accounts, prompt_tokens: int, age: float) -> tuple[str, int, int] | None:
    """What a tree has too little of for a turn with such a prompt: the limit's name, the limit, what is used
    of it. None: it has room. `age` in seconds, of the tree.
    """
    wall_ms, age_ms = accounts.tree_budget.wall_ms, round(1000 * age)
    if wall_ms is not None and age_ms > wall_ms:
        return "tree_budget.wall_ms", wall_ms, age_ms
    used = _of_tree(accounts, 0, 0)
    for (name, needed, most), (_, spent, _) in zip(_of_tree(accounts, prompt_tokens, 1), used, strict=True):
        if most is not None and needed > most:
            return name, most, spent
    return None


def _of_tree(accounts: Accounts, prompt_tokens: int, output_tokens: int) -> list[tuple[str, int, int | None]]:
    """Each limit's name, what is used of it with so many further tokens, and what it is."""
    tree, limit = accounts.tree, accounts.tree_budget
    thinking = tree.thinking_tokens + accounts.uncounted_thinking
    return [
        ("tree_budget.prompt_tokens", tree.prompt_tokens + prompt_tokens, limit.prompt_tokens),
        ("tree_budget.output_tokens", tree.output_tokens + output_tokens, limit.output_tokens),
        ("tree_budget.thinking_tokens", thinking, limit.thinking_tokens),
        ("tree_budget.tool_calls", tree.tool_calls, limit.tool_calls),
    ]


def cut_short(state: RunState, accounts: Accounts) -> RunEnded | None:
    """The end of a run whose turn ended in `length` because its output budget was its limit."""
    for name, spent, most in (
        ("output_tokens", accounts.own.output_tokens, state.spec.budget.output_tokens),
        ("tree_budget.output_tokens", accounts.tree.output_tokens, accounts.tree_budget.output_tokens),
    ):
        if most is not None and spent >= most:
            return _exceeded(name, most)
    return None


def overdrawn(state: RunState, accounts: Accounts) -> RunEnded | None:
    """The end of a run whose turn has ended by itself, but used of what is overspent: one that came in one
    piece was over before it could be stopped. No matter whether anything would go on from there.
    """
    for name in _COUNTED:
        for prefix, spent, budget in (
            ("", accounts.own, state.spec.budget),
            ("tree_budget.", accounts.tree, accounts.tree_budget),
        ):
            most = getattr(budget, name)
            if most is not None and getattr(accounts.turn, name) and getattr(spent, name) > most:
                return _exceeded(prefix + name, most)
    return None


def most_tokens(wanted: int, state: RunState, accounts: Accounts) -> int:
    """How many tokens a turn may have, those that it has already included."""
    for spent, most in (
        (accounts.own.output_tokens, state.spec.budget.output_tokens),
        (accounts.tree.output_tokens, accounts.tree_budget.output_tokens),
    ):
        if most is not None:
            wanted = min(wanted, most - spent + state.turn_tokens)
    return max(wanted, 1)


def _exceeded(name: str, limit: int) -> RunEnded:
    message = f"The run has used up its budget: {name} is {limit}. Its partial result is kept."
    return RunEnded(state="failed", error=EXCEEDED, message=message)
