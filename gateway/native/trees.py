"""A session's runs as a tree of agents. Pure. Hostile names make no endless tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gateway.runs.outcomes import FINAL
from gateway.store.index import RunNote

from .bodies import RunUsage, TreeAgent
from .showing import show_line

MAX_DEPTH = 50
"""Agents below that are shown beside each other: no client need follow deeper."""


def tree_of(notes: Sequence[RunNote]) -> list[TreeAgent]:
    """The agents nobody has called, or whose callers are not here, each with all below. Oldest runs first."""
    by_agent: dict[str, list[RunNote]] = defaultdict(list)
    for note in notes:
        by_agent[note.agent].append(note)
    parents = {agent: _parent(agent, runs, by_agent) for agent, runs in by_agent.items()}
    children: dict[str, list[str]] = defaultdict(list)
    for agent, parent in parents.items():
        if parent is not None:
            children[parent].append(agent)
    roots = [agent for agent, parent in parents.items() if parent is None]
    seen: set[str] = set()
    # Those that call each other in a circle have no root: each circle is shown from its first agent on.
    return [_subtree(agent, by_agent, children, seen) for agent in (*roots, *by_agent) if agent not in seen]


def sum_usage(usages: Sequence[RunUsage]) -> RunUsage:
    """Together."""
    return RunUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        total_tokens=sum(usage.total_tokens for usage in usages),
    )


def _parent(agent: str, runs: Sequence[RunNote], known: dict[str, list[RunNote]]) -> str | None:
    told = next((note.parent for note in runs if note.parent), "")
    return told if told in known and told != agent else None


def _subtree(
    root: str, by_agent: dict[str, list[RunNote]], children: dict[str, list[str]], seen: set[str]
) -> TreeAgent:
    """Without recursion: a chain of agents may be long."""
    order: list[tuple[str, str]] = []  # an agent, and the one it is shown below
    stack = [(root, "", 0)]
    while stack:
        name, above, depth = stack.pop()
        if name not in seen:
            seen.add(name)
            order.append((name, above))
            place = (name, depth + 1) if depth < MAX_DEPTH else (above, depth)
            stack += [(child, *place) for child in reversed(children[name])]
    built: dict[str, list[TreeAgent]] = defaultdict(list)
    for name, above in reversed(order[1:]):
        built[above].append(_shown(name, by_agent[name], built.pop(name, [])))
    return _shown(root, by_agent[root], built.pop(root, []))


def _shown(agent: str, runs: Sequence[RunNote], below: Sequence[TreeAgent]) -> TreeAgent:
    lines = [show_line(note) for note in runs]
    return TreeAgent(
        agent=agent,
        parent=next((note.parent for note in runs if note.parent), ""),
        status=runs[-1].status,
        runs=lines,
        usage=sum_usage([*(line.usage for line in lines), *(child.usage for child in below)]),
        num_live=sum(note.status not in FINAL for note in runs) + sum(child.num_live for child in below),
        children=list(reversed(below)),
    )
