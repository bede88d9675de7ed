"""Which runs descend from one: by the runs that made them, and by the agents that called theirs. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """A run's place in its tenant. Names are "" where there is none."""

    run_id: str
    session: str = ""
    agent: str = ""
    parent: str = ""  # the agent that called its agent
    parent_run: str = ""


def descendants(root: Member, members: Iterable[Member]) -> list[str]:
    """The ids of all runs below one, without its own."""
    found: dict[str, None] = {root.run_id: None}
    agents = {root.agent} - {""}
    left, num_found = list(members), 0
    while num_found != len(found):
        num_found = len(found)
        for member in left:
            below = member.parent in agents and member.session == root.session and bool(root.session)
            if member.run_id not in found and (member.parent_run in found or below):
                found[member.run_id] = None
                agents |= {member.agent} - {""}
    return [run_id for run_id in found if run_id != root.run_id]


def under_agents(agents: Container[str], members: Iterable[Member]) -> list[str]:
    """The ids of the runs of these agents and of all that they called."""
    left, known, found = list(members), set[str](), dict[str, None]()
    num_known = -1
    while num_known != len(known):
        num_known = len(known)
        for member in left:
            if member.agent in agents or member.parent in known or member.agent in known:
                found[member.run_id] = None
                known |= {member.agent} - {""}
    return list(found)
