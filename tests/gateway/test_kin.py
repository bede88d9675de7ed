"""Trees of agents as calls tell them: subtrees, sessions through parents, bounds."""

from __future__ import annotations

from gateway.callers.hints import Names
from gateway.callers.kin import Kin


def family() -> Kin:
    kin = Kin()
    for agent, parent in (("root", ""), ("a", "root"), ("b", "root"), ("a1", "a"), ("a11", "a1")):
        kin.note("t", Names("s", agent, parent))
    kin.note("t", Names("other", "x", "a"))
    kin.note("u", Names("s", "y", "a"))
    return kin


def test_a_subtree_is_the_agent_and_all_below_it() -> None:
    kin = family()
    assert kin.subtree("t", "s", "a") == {"a", "a1", "a11"}
    assert kin.subtree("t", "s", "b") == {"b"}
    assert kin.subtree("t", "s", "root") == {"root", "a", "b", "a1", "a11"}
    assert kin.subtree("t", "s", "") == {"root", "a", "b", "a1", "a11"}
    assert kin.subtree("t", "nowhere", "") == frozenset()


def test_circles_end() -> None:
    kin = Kin()
    for agent, parent in (("a", "b"), ("b", "a"), ("c", "c")):
        kin.note("t", Names("s", agent, parent))
    assert kin.subtree("t", "s", "a") == {"a", "b"}
    assert kin.subtree("t", "s", "c") == {"c"}


def test_a_parent_once_told_stays() -> None:
    kin = family()
    kin.note("t", Names("s", "a1"))
    assert "a1" in kin.subtree("t", "s", "a")


def test_an_agent_without_a_session_belongs_to_its_parents() -> None:
    kin = Kin()
    root = kin.settle("t", Names("", "ses_1"))
    assert root == Names("ses_1", "ses_1")
    kin.note("t", root)
    child = kin.settle("t", Names("", "ses_2", "ses_1"))
    kin.note("t", child)
    assert child == Names("ses_1", "ses_2", "ses_1")
    assert kin.settle("t", Names("", "ses_3", "ses_2")).session == "ses_1"
    assert kin.settle("t", Names("", "ses_5", "ses_4")).session == "ses_4"
    assert kin.settle("u", Names("", "ses_3", "ses_2")).session == "ses_2"
    assert kin.settle("t", Names("s")) == Names("s")


def test_the_oldest_are_forgotten_first() -> None:
    kin = Kin(max_agents=10)
    for number in range(100):
        kin.note("t", Names("s", f"a{number}"))
    assert kin.subtree("t", "s", "") == {f"a{number}" for number in range(90, 100)}
