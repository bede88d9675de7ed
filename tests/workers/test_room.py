"""Which agents have room in the pool together: let in up to a share of it, kept up to a larger one."""

from __future__ import annotations

import pytest

from kvcache.cache import Cache
from tests.fakes import fake_rules, fake_submit
from workers.agents import Agents
from workers.line import Line
from workers.pace import Pace, PaceLimits
from workers.pins import AgentKey
from workers.turn import Turn, open_turn

POOL_TOKENS = 10_240


class Room:
    """Agents, the line before them, and a time."""

    def __init__(self) -> None:
        cache = Cache(POOL_TOKENS // 64)
        self.agents = Agents(cache)
        self.line = Line(cache, self.agents, Pace(PaceLimits()))
        self.now = 0.0
        self.expects = "search"
        self._num_turns = 0

    def arrive(self, agent: str, num_tokens: int) -> Turn:
        """A turn of the agent waits."""
        self._num_turns += 1
        prompt = [sum(agent.encode()) % 251, *[index % 241 for index in range(num_tokens - 1)]]
        submit = fake_submit(
            f"turn {self._num_turns}", prompt, max_tokens=1, session="s", agent=agent, expects=self.expects
        )
        turn = open_turn(submit, fake_rules(context_length=POOL_TOKENS), self.now)
        turn.number = self._num_turns
        self.agents.arrived(turn, self.now)
        self.line.add(turn)
        return turn

    def next(self) -> Turn | None:
        return self.line.choose(self.now, lambda turn: True)

    def run(self, turn: Turn) -> None:
        """The turn starts and ends at once."""
        self.line.remove(turn)
        turn.started_at = self.now
        self.agents.started(turn, 0, None)
        turn.is_answered = True
        self.agents.ended(turn, self.now, was_published=True)

    def visit(self, agent: str, num_tokens: int) -> None:
        """A whole turn, which must not have to wait."""
        turn = self.arrive(agent, num_tokens)
        assert self.next() is turn
        self.run(turn)


@pytest.fixture
def room() -> Room:
    return Room()


def test_agents_are_let_in_up_to_the_hot_share(room: Room) -> None:
    room.visit("a", 4000)
    room.visit("b", 4000)
    room.arrive("c", 4000)
    assert room.next() is None


def test_an_agent_that_grows_keeps_its_room_beyond_that_share(room: Room) -> None:
    room.visit("a", 4000)
    room.visit("b", 4000)
    room.visit("b", 5500)


def test_where_the_pool_is_full_the_one_let_in_last_waits(room: Room) -> None:
    room.visit("a", 4000)
    room.visit("b", 4000)
    room.visit("a", 5500)
    junior = room.arrive("b", 5000)
    assert room.next() is None
    senior = room.arrive("a", 6000)
    assert room.next() is senior
    assert junior in room.line


def test_the_one_that_had_to_wait_is_let_in_as_a_new_one_is(room: Room) -> None:
    room.visit("a", 4000)
    room.visit("b", 4000)
    room.visit("a", 5500)
    junior = room.arrive("b", 5000)
    assert room.next() is None
    room.visit("a", 3500)  # 8,500 would fit what is kept, not what is let in
    assert room.next() is None
    room.visit("a", 3000)
    assert room.next() is junior


def test_a_waiting_agent_that_lost_its_room_keeps_nobody_out(room: Room) -> None:
    room.visit("a", 4000)
    room.visit("b", 4000)
    room.visit("a", 5500)
    room.arrive("b", 5000)
    assert room.next() is None
    other = room.arrive("c", 2000)
    assert room.next() is other


def test_room_is_kept_for_five_minutes_and_then_given_up(room: Room) -> None:
    room.visit("a", 4000)
    room.visit("b", 4000)
    turn = room.arrive("c", 4000)
    room.now = 299.0
    assert room.next() is None
    room.now = 301.0
    assert room.next() is turn


def test_an_agent_larger_than_the_share_runs_where_nobody_else_has_room(room: Room) -> None:
    room.visit("a", 9900)


def test_nobody_in_particular_is_never_held(room: Room) -> None:
    room.visit("a", 8000)
    room.visit("", 8000)


def test_room_of_an_agent_that_is_done_for_is_free_at_once(room: Room) -> None:
    room.visit("a", 4000)
    room.visit("b", 4000)
    turn = room.arrive("c", 4000)
    assert room.next() is None
    room.agents.cancel({AgentKey("", "s", "a")})
    assert room.next() is turn


def test_no_room_is_kept_for_those_that_came_once_and_said_nothing(room: Room) -> None:
    room.expects = ""
    room.visit("a", 4000)
    room.visit("b", 4000)
    room.visit("c", 4000)


def come_back(room: Room, *agents: str) -> None:
    """Agents that said nothing, and were here twice."""
    room.expects = ""
    for agent in agents * 2:
        room.visit(agent, 3500)
        room.now += 1.0


def test_nobody_waits_for_agents_that_came_back_once_and_say_nothing(room: Room) -> None:
    come_back(room, "a", "b")
    room.visit("c", 4000)


def test_beside_one_that_is_sure_to_come_they_count_until_they_are_late(room: Room) -> None:
    come_back(room, "a", "b")
    room.expects = "search"
    room.visit("d", 1100)
    turn = room.arrive("c", 4000)
    assert room.next() is None, "a and b have the room of two"
    room.now += 250.0
    assert room.next() is None
    room.now += 51.0
    assert room.next() is turn
