"""Which agent called which: trees of sessions, as far as calls told. Bounded, the oldest forgotten first.

Pure: knows names and no runs.
"""

from __future__ import annotations

from collections import OrderedDict

from .hints import Names

MAX_AGENTS = 8192


class Kin:
    """The agents seen lately. A tenant's sessions are its own."""

    def __init__(self, max_agents: int = MAX_AGENTS) -> None:
        self._max_agents = max_agents
        self._parents: OrderedDict[tuple[str, str, str], str] = OrderedDict()  # tenant, session, agent
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()  # tenant, agent -> its last session

    def settle(self, tenant: str, names: Names) -> Names:
        """The names with a session: the parent's where only that is known, else the tree begins here."""
        if names.session or not names.agent:
            return names
        known = self._sessions.get((tenant, names.parent)) if names.parent else None
        return Names(known or names.parent or names.agent, names.agent, names.parent)

    def note(self, tenant: str, names: Names) -> None:
        """A call under these complete names."""
        key = (tenant, names.session, names.agent)
        parent = names.parent or self._parents.get(key, "")
        self._parents[key] = parent
        self._parents.move_to_end(key)
        self._sessions[tenant, names.agent] = names.session
        self._sessions.move_to_end((tenant, names.agent))
        for known in (self._parents, self._sessions):
            while len(known) > self._max_agents:
                known.popitem(last=False)

    def subtree(self, tenant: str, session: str, agent: str) -> frozenset[str]:
        """The agent and all its descendants; agent "" is the whole session."""
        in_session = {
            name: parent
            for (of, where, name), parent in self._parents.items()
            if (of, where) == (tenant, session)
        }
        if not agent:
            return frozenset(in_session)
        found = {agent}
        fresh = found
        while fresh:
            fresh = {name for name, parent in in_session.items() if parent in fresh} - found
            found = found | fresh
        return frozenset(found)
