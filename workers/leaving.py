"""How paths end: closed at once, or kept for one step more until their worker's state has been saved.

Knows cache and agents; neither the line nor how a turn ends for its caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvcache.cache import Cache, Kind, Path

from .agents import Agents, agent_name, key_of
from .pins import AgentKey
from .plan import StateSave
from .sharing import MIN_SHARED_TOKENS, common_length
from .turn import Turn

MIN_BORDER_TOKENS = 256
"""A turn that is stopped half way leaves a checkpoint if it would lose so many tokens."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Leaver:
    """A path whose turn has left its worker; the live state there is saved at the start of the next step."""

    turn: Turn
    path: Path
    save: StateSave
    kind: Kind
    is_over: bool  # False: the turn was preempted and waits


class Leaving:
    """The paths of turns that left."""

    def __init__(self, cache: Cache, agents: Agents) -> None:
        self._cache = cache
        self._agents = agents
        self._leavers: list[Leaver] = []

    def __len__(self) -> int:
        return len(self._leavers)

    def holds(self, turn: Turn) -> bool:
        """Whether the turn does better to begin a step later, when what a path leaves can be had."""
        return any(_leads_to(leaver.turn, turn) for leaver in self._leavers)

    def saves(self) -> tuple[StateSave, ...]:
        """To be done at the start of the next step."""
        return tuple(leaver.save for leaver in self._leavers)

    def leave(self, turn: Turn, path: Path, last: Kind | None, now: float, *, is_over: bool) -> None:
        """End a path that its turn gave up; a step later, where a checkpoint is worth that."""
        row = None
        try:
            is_wanted = turn.is_paused or not (is_over and turn.hints.is_last)
            if is_wanted and last is not None and self._is_worth(turn, path, last):
                row = self._cache.reserve_state(path)
        except Exception:  # it ends without this checkpoint
            log.exception("a checkpoint was lost", run=turn.run_id, attempt=turn.attempt)
        if row is None or last is None or turn.worker is None:
            self._close(turn, path, now, is_over=is_over)
        else:
            self._leavers.append(Leaver(turn, path, StateSave(turn.worker, row), last, is_over))

    def finish(self, now: float) -> None:
        """The step ran: what was saved becomes checkpoints and the paths end."""
        leavers, self._leavers = self._leavers, []
        for leaver in leavers:
            self._close(leaver.turn, leaver.path, now, kind=leaver.kind, is_over=leaver.is_over)

    def give_up(self, is_unwanted: Callable[[Turn], bool], now: float) -> None:
        """The states of these turns are not waited for."""
        dropped = [leaver for leaver in self._leavers if is_unwanted(leaver.turn)]
        self._leavers = [leaver for leaver in self._leavers if not is_unwanted(leaver.turn)]
        for leaver in dropped:
            self._close(leaver.turn, leaver.path, now, is_over=leaver.is_over)

    def hold(self, turn: Turn, now: float) -> None:
        """Hold what a paused turn computed before it lost its worker."""
        if turn.kept is None or not turn.is_paused:
            return
        try:
            self._agents.keeps(turn, turn.kept, now)
        except Exception:  # the turn has its end already, and goes on from less
            log.exception("a prefix was not held", run=turn.run_id, attempt=turn.attempt)

    def release_run(self, run_id: str) -> None:
        """What its paused turn computed is not held for it."""
        for leaver in self._leavers:
            if leaver.turn.run_id == run_id and leaver.turn.is_paused:
                leaver.turn.hold_seconds = 0.0

    def drop(self) -> None:
        """End all paths and keep nothing new: the step failed, or the engine begins again."""
        leavers, self._leavers = self._leavers, []
        for leaver in leavers:
            discard(self._cache, leaver.path)

    def poison(self, turn: Turn, path: Path) -> None:
        """End a path whose data is wrong, and what was built on it."""
        try:
            self._cache.poison(path)
        except Exception:  # tried once more: what it wrote must not be shared
            log.exception("a path was not poisoned at once", run=turn.run_id, attempt=turn.attempt)
            if path.is_open:
                self._cache.poison(path)

    def _is_worth(self, turn: Turn, path: Path, kind: Kind) -> bool:
        if not self._cache.has_states:
            return False
        fewest = MIN_BORDER_TOKENS if kind is Kind.BORDER and not turn.is_paused else 1
        return path.num_tokens - turn.kept_tokens >= fewest

    def _close(self, turn: Turn, path: Path, now: float, *, is_over: bool, kind: Kind | None = None) -> None:
        """End a path and keep what it computed; if that breaks, it is not kept and nobody else notices."""
        try:
            turn.kept = kept = self._cache.kept(path)
            self._cache.close(path, kind=kind, agent=agent_name(turn))
            if is_over or turn.is_paused:
                self._agents.keeps(turn, kept, now)
        except Exception:  # the border of one path: its turn has its end already, or goes on from less
            log.exception("a prefix was not kept", run=turn.run_id, attempt=turn.attempt)
            if path.is_open:
                discard(self._cache, path)


def _leads_to(left: Turn, turn: Turn) -> bool:
    """Whether the checkpoint that a turn leaves is likely to be worth waiting for."""
    if left.run_id == turn.run_id or (turn.agent and key_of(left) == key_of(turn)):
        return True
    parent = AgentKey(turn.tenant, turn.session, turn.parent) if turn.parent else None
    if parent is not None and parent == key_of(left) and turn.hints.fork_tokens > left.kept_tokens:
        return True
    if left.namespace != turn.namespace:
        return False
    return common_length(left.prompt, turn.prompt) - left.kept_tokens >= MIN_SHARED_TOKENS


def discard(cache: Cache, path: Path) -> None:
    """End a path and keep no more of it than is published."""
    try:
        cache.close(path, keep=False)
    except Exception:  # the border of one path: tried once more, as it may still hold pages
        log.exception("a path did not close at once", path=path.number)
        if path.is_open:
            cache.close(path, keep=False)
