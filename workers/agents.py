"""What is known of the agents that call: who is at work, expected back or done, and what is kept for each.

Knows turns and kept prefixes; neither queue nor workers.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import structlog

from kvcache.cache import Cache, Kept

from .errors import IntegrityError
from .gaps import LONGEST_SECONDS, Gaps
from .misses import Histories, History, Restart
from .pins import AgentKey, Pin, PinReason, Pins
from .turn import Turn

log = structlog.get_logger(__name__)

MAX_AGENTS = 4096
JOIN_SECONDS = 300.0
"""A parent is kept for its children's results for so long at most."""
RETAIN_SECONDS = 3600.0
MAX_ANSWER_TOKENS = 4096
"""An answer is expected to take no more of the pool than this."""


class AgentState(Enum):
    """RUNNING has a turn in the engine; WAIT_TOOL said what it waits for; DEAD does not come back."""

    RUNNING = "running"
    WAIT_TOOL = "wait_tool"
    IDLE = "idle"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class Agent:
    """One agent; times on the engine's clock."""

    key: AgentKey
    parent: AgentKey | None = None
    counted_by: AgentKey | None = None  # the parent among whose children at work it is
    num_turns: int = 0  # waiting or running
    num_running: int = 0  # of these, those that have had a worker
    num_children: int = 0  # of its children, those that have turns here
    num_tokens: int = 0  # that its last path held, or its running one is going to
    num_shared: int = 0  # of these, what others had before it came
    num_returns: int = 0  # times that it came back after an answer
    waits_for: str = ""
    left_at: float | None = None
    hot_until: float = 0.0  # the pool has room for it until then; infinity: it came back in time, and waits
    seniority: int = 0  # order in which hot agents were let into the pool; 0: it was not, or has to be again
    is_dead: bool = False
    kept: Kept | None = None

    @property
    def state(self) -> AgentState:
        if self.num_turns:
            return AgentState.RUNNING
        if self.is_dead:
            return AgentState.DEAD
        return AgentState.WAIT_TOOL if self.waits_for else AgentState.IDLE

    @property
    def working_tokens(self) -> int:
        """What it would take to have it all in the pool, over what others need anyway."""
        return max(self.num_tokens - self.num_shared, 0)

    @property
    def is_due(self) -> bool:
        """At work or waiting for that, or sure to come back: it waits for a tool or for its children."""
        return self.state in (AgentState.RUNNING, AgentState.WAIT_TOOL) or self.num_children > 0

    def is_hot(self, now: float) -> bool:
        """At work, or expected back."""
        return self.num_running > 0 or (self.state is not AgentState.DEAD and now < self.hot_until)


def key_of(turn: Turn) -> AgentKey | None:
    """None: nobody in particular."""
    return AgentKey(turn.tenant, turn.session, turn.agent) if turn.agent else None


def agent_name(turn: Turn) -> str:
    """Whose checkpoints supersede each other: the agent's; a turn of nobody in particular is on its own."""
    key = key_of(turn)
    return f"run {turn.run_id}" if key is None else name_of(key)


def name_of(key: AgentKey) -> str:
    """The same of an agent; no two agents have one name, whatever theirs hold."""
    return "".join(f"{len(part)}:{part}" for part in key)


class Agents:
    """The agents of one engine, those that were here least recently first."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._agents: dict[AgentKey, Agent] = {}
        self._hot: dict[AgentKey, Agent] = {}  # all that are hot, and some that no longer are
        self._gaps = Gaps()
        self._num_let_in = 0
        self.pins = Pins(cache)
        self.histories = Histories()

    def __len__(self) -> int:
        return len(self._agents)

    def of(self, turn: Turn) -> Agent | None:
        """The turn's agent; None for nobody in particular."""
        key = key_of(turn)
        return None if key is None else self._agents.get(key)

    def arrived(self, turn: Turn, now: float) -> None:
        """A turn is waiting from now on."""
        key = key_of(turn)
        if key is None:
            return
        agent = self._agents.pop(key, None) or Agent(key)
        self._agents[key] = agent
        if turn.parent and turn.parent != turn.agent:
            agent.parent = AgentKey(turn.tenant, turn.session, turn.parent)
        if agent.left_at is not None and not agent.num_turns and not agent.is_dead:
            self._gaps.observe(agent.waits_for, now - agent.left_at)
            agent.num_returns += 1
        if agent.is_hot(now):
            agent.hot_until = math.inf
        else:
            agent.seniority = 0
        agent.num_turns += 1
        agent.is_dead = False
        if agent.num_turns == 1:
            self._child_came(agent, now)
        self._bound()

    def started(self, turn: Turn, num_matched: int, restart: Restart | None) -> None:
        """A turn holds a path for the first time; what was held for it is its own now."""
        self.pins.drop_run(turn.run_id)
        agent = self.of(turn)
        if agent is None:
            return
        agent.num_running += 1
        self._hot[agent.key] = agent
        kept = agent.kept
        if kept is not None and restart is not None and restart.is_compaction and agent.num_turns == 1:
            agent.kept = None
            self._retire(kept)
        if not agent.seniority:
            self._num_let_in += 1
            agent.seniority = self._num_let_in
        if not agent.num_tokens:
            agent.num_shared = num_matched
        agent.num_shared = min(agent.num_shared, num_matched)
        agent.num_tokens = turn.num_tokens + answer_tokens(turn)
        self.pins.drop(agent.key, PinReason.TOOL, PinReason.JOIN)

    def ended(self, turn: Turn, now: float, *, was_published: bool) -> None:
        """A turn is over."""
        agent = self.of(turn)
        if agent is None:
            return
        agent.num_turns -= 1
        agent.num_running -= turn.started_at is not None
        agent.left_at = now if turn.is_answered else None
        agent.waits_for = turn.hints.expects if turn.is_answered else ""
        agent.is_dead = turn.hints.is_last and not agent.num_turns and not turn.is_paused
        until = now + self._expected_seconds(agent)
        agent.hot_until = until if turn.started_at is not None else min(agent.hot_until, until)
        tokens = turn.tokens(0, turn.num_tokens) if turn.started_at is not None else array("I")
        if tokens:
            agent.num_tokens = len(tokens)
            self.histories.remember(agent.key, History(turn.namespace, tokens, was_published))
        if not agent.num_turns:
            self._child_left(agent)

    def keeps(self, turn: Turn, kept: Kept, now: float) -> None:
        """What an ended turn published stays under this handle: held, left to age or the first to go."""
        if turn.hold_seconds:
            owner = AgentKey(turn.tenant, turn.session, turn.agent)
            self.pins.put(PinReason.PAUSE, turn.run_id, Pin(kept, now + turn.hold_seconds, now, owner))
        agent = self.of(turn)
        if agent is None:
            if turn.hints.is_last and not turn.is_paused:
                self._retire(kept)
            return
        agent.kept = kept
        if turn.hints.retain == "pin":
            self.pins.put(PinReason.RETAIN, agent.key, Pin(kept, now + RETAIN_SECONDS, now))
        if agent.is_dead:
            self._retire(kept)
            return
        if agent.waits_for:
            until, back_at = now + self._gaps.stay(agent.waits_for), now + self._gaps.median(agent.waits_for)
            self.pins.put(PinReason.TOOL, agent.key, Pin(kept, until, back_at))
        if agent.num_children:
            self._pin_for_join(agent, now)

    def subtree(self, top: AgentKey) -> set[AgentKey]:
        """An agent and all its descendants; the whole session for the agent ""."""
        family = {key for key in self._agents if key[:2] == top[:2]}
        if not top.agent:
            return family | {top}
        children: dict[AgentKey | None, list[AgentKey]] = {}
        for key in family:
            children.setdefault(self._agents[key].parent, []).append(key)
        found, waiting = {top}, [top]
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in found:  # callers may name their parents in a circle
                    found.add(child)
                    waiting.append(child)
        return found

    def cancel(self, keys: set[AgentKey]) -> None:
        """Agents that are done for: nothing is held for them, and what they alone had is freed."""
        self.pins.drop_runs_of(keys)
        for key in keys:
            self.pins.drop(key)
            self.histories.forget(key)
            agent = self._agents.get(key)
            if agent is None:
                continue
            agent.is_dead = True
            agent.hot_until = 0.0
            kept, agent.kept = agent.kept, None
            if kept is not None:
                self._retire(kept)  # what others still use leaves with the last of them
        try:
            self._cache.drop([name_of(key) for key in keys])
        except Exception:  # nobody's turn: what they keep leaves later, first of all
            log.exception("what cancelled agents kept was not freed")

    def hot_tokens(self, besides: Agent, now: float) -> int:
        """What the others at work and those expected back need of the pool; 0 where none of them is due."""
        others = self._others(besides, now)
        return sum(agent.working_tokens for agent in others) if any(a.is_due for a in others) else 0

    def senior_tokens(self, junior: Agent, now: float) -> int:
        """The same of those that were let in before it."""
        others = self._others(junior, now)
        return sum(agent.working_tokens for agent in others if agent.seniority < junior.seniority)

    def cool(self, agent: Agent) -> None:
        """The pool has no room for a waiting agent any more: it has to be let in again."""
        agent.hot_until = 0.0
        agent.seniority = 0

    def is_hot(self, turn: Turn, now: float) -> bool:
        """Whether the pool was made to hold the turn's agent already."""
        agent = self.of(turn)
        return agent is not None and agent.num_tokens > 0 and agent.is_hot(now)

    def next_cooling(self, now: float) -> float:
        """When the next agent is no longer expected; infinity: nobody is."""
        return min((a.hot_until for a in self._hot.values() if a.hot_until > now), default=math.inf)

    def _expected_seconds(self, agent: Agent) -> float:
        """How long room is kept for one that has its answer: one that said nothing has to have come back
        before, or it may be somebody's only call."""
        if agent.waits_for:
            return LONGEST_SECONDS
        return self._gaps.stay("") if agent.num_returns else 0.0

    def _others(self, besides: Agent, now: float) -> list[Agent]:
        for key, agent in list(self._hot.items()):
            if not agent.is_hot(now):
                del self._hot[key]
        return [agent for agent in self._hot.values() if agent is not besides]

    def check_integrity(self, turns: Iterable[Turn]) -> None:
        """Raises IntegrityError when agents and their turns disagree, or a pin is past its deadline."""
        self.pins.check_integrity()
        counted = Counter(key_of(turn) for turn in turns)
        for key, agent in self._agents.items():
            if agent.num_turns != counted[key] or not 0 <= agent.num_running <= agent.num_turns:
                raise IntegrityError(f"an agent counts {agent.num_turns} turns and has {counted[key]}")

    def forget_kept(self) -> None:
        """The cache was cleared."""
        self.pins.clear()
        for agent in self._agents.values():
            agent.kept = None

    def forget(self) -> None:
        """Nobody was ever here; gaps stay learned."""
        self.pins.clear()
        self.histories.clear()
        self._agents.clear()
        self._hot.clear()

    def _retire(self, kept: Kept) -> None:
        try:
            self._cache.retire(kept)
        except Exception:  # nobody's turn: what it keeps leaves later, by age
            log.exception("a prefix was not retired")

    def _child_came(self, agent: Agent, now: float) -> None:
        parent = None if agent.parent is None else self._agents.get(agent.parent)
        if parent is not None:
            agent.counted_by = parent.key
            parent.num_children += 1
            self._pin_for_join(parent, now)

    def _child_left(self, agent: Agent) -> None:
        counted_by, agent.counted_by = agent.counted_by, None
        parent = None if counted_by is None else self._agents.get(counted_by)
        if parent is not None and parent.num_children:
            parent.num_children -= 1
            if not parent.num_children:
                self.pins.drop(parent.key, PinReason.JOIN)

    def _pin_for_join(self, parent: Agent, now: float) -> None:
        if parent.kept is None or parent.num_turns or parent.is_dead:
            return
        parent.hot_until = max(parent.hot_until, now + JOIN_SECONDS)
        self._hot[parent.key] = parent
        back_at = now + self._gaps.median("")
        self.pins.put(PinReason.JOIN, parent.key, Pin(parent.kept, now + JOIN_SECONDS, back_at))

    def _bound(self) -> None:
        while len(self._agents) > MAX_AGENTS:
            key = next((key for key, agent in self._agents.items() if not agent.num_turns), None)
            if key is None:
                return
            self._hot.pop(key, None)
            self.pins.drop(key)
            self.histories.forget(key)
            del self._agents[key]


def answer_tokens(turn: Turn) -> int:
    """How many tokens the answer is expected to add at most."""
    return min(turn.max_tokens - len(turn.generated), MAX_ANSWER_TOKENS)
