"""Routing: cost in seconds, affinity as a bonus, cold prompts by load, a bounded memory."""

from __future__ import annotations

import random
from array import array

from gateway.flow.router import Candidate, Memory, common_prefix_tokens, pick


def candidate(
    engine_id: str, covered: int = 0, queued: int = 0, turns: int = 0, last_cold: int = 0
) -> Candidate:
    return Candidate(
        engine_id,
        covered_tokens=covered,
        queued_tokens=queued,
        num_turns=turns,
        prefill_tokens_per_second=100,
        decode_tokens_per_second=256,
        last_cold=last_cold,
    )


def chosen(tokens: int, *candidates: Candidate, sticky: str | None = None) -> str | None:
    route = pick(tokens, candidates, sticky)
    return route.engine_id if route is not None else None


def test_the_choice_says_whether_the_turn_stays_where_it_was() -> None:
    near = candidate("a", covered=600), candidate("b", covered=600)
    for sticky, is_sticky in (("a", True), (None, False), ("c", False)):
        route = pick(1000, near, sticky)
        assert route is not None and route.is_sticky is is_sticky


def test_nobody_is_no_choice() -> None:
    assert chosen(100) is None


def test_the_cache_wins_while_it_saves_more_than_the_queue_costs() -> None:
    assert chosen(1000, candidate("a", covered=900), candidate("b")) == "a"
    assert chosen(1000, candidate("a", covered=900, queued=2000), candidate("b")) == "b"


def test_an_agent_stays_for_three_seconds_and_no_longer() -> None:
    near = candidate("a", covered=600, queued=250), candidate("b", covered=600)
    assert chosen(1000, *near, sticky="a") == "a"
    far = candidate("a", covered=600, queued=350), candidate("b", covered=600)
    assert chosen(1000, *far, sticky="a") == "b"


def test_a_saturated_engine_loses_even_its_own_agents() -> None:
    assert chosen(1000, candidate("a", covered=1000, turns=20), candidate("b"), sticky="a") == "b"


def test_cold_prompts_go_to_the_least_loaded_not_to_the_first() -> None:
    assert chosen(1000, candidate("a", queued=500), candidate("b", queued=400, turns=3)) == "b"


def test_cold_prompts_at_rest_go_round() -> None:
    last = {"a": 0, "b": 0, "c": 0}
    order = []
    for number in range(1, 7):
        name = chosen(1000, *(candidate(engine, last_cold=last[engine]) for engine in last))
        assert name is not None
        last[name] = number
        order.append(name)
    assert order == ["a", "b", "c", "a", "b", "c"]


def ids(*values: int) -> bytes:
    return array("I", values).tobytes()


def test_common_prefix_equals_the_plain_count() -> None:
    chance = random.Random(5)
    for _ in range(300):
        first = [chance.randrange(3) for _ in range(chance.randrange(12))]
        second = first[: chance.randrange(len(first) + 1)] + [
            chance.randrange(3) for _ in range(chance.randrange(6))
        ]
        expected = 0
        while expected < min(len(first), len(second)) and first[expected] == second[expected]:
            expected += 1
        assert common_prefix_tokens(ids(*first), ids(*second)) == expected


def test_memory_knows_what_an_incarnation_has_seen() -> None:
    memory = Memory()
    memory.note("agent", "e1", 1, ids(1, 2, 3, 4), cold=True)
    assert memory.covered_tokens("e1", 1, ids(1, 2, 9)) == 2
    assert memory.covered_tokens("e2", 1, ids(1, 2, 9)) == 0
    assert memory.covered_tokens("e1", 2, ids(1, 2, 9)) == 0
    assert memory.last_cold("e1") == 1
    memory.note("other", "e1", 2, ids(5), cold=False)
    assert memory.covered_tokens("e1", 1, ids(1, 2, 9)) == 0


def test_an_agent_goes_where_it_was_else_where_its_parent_or_its_session_was() -> None:
    memory = Memory()
    memory.place(("root", "session"), "e1")
    memory.place(("child", "session"), "e2")
    memory.place(("", ""), "e3")
    assert memory.last_engine(("child", "root", "session")) == "e2"
    assert memory.last_engine(("new", "root", "session")) == "e1"
    assert memory.last_engine(("new", "", "session")) == "e2"
    assert memory.last_engine(("new", "", "")) is None


def test_memory_stays_bounded() -> None:
    memory = Memory(num_bytes=4000, num_prompts=8)
    for number in range(1000):
        memory.note(f"agent-{number}", "e1", 1, ids(*range(200)), cold=False)
        memory.place((f"agent-{number}", "session"), "e1")
    _, prompts = memory._prompts["e1"]
    assert sum(map(len, prompts.values())) <= 4000
    assert len(memory._last_engine) <= 512
