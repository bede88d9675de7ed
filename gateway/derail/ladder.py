"""What is done about a run that has gone astray: reported, steered or stopped. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase

from gateway.runs.spec import RunSpec
from workers.messages import Derail, DerailAction

from .rules import DerailRules

_STEERED = ("tool_repeat", "tool_cycle")
"""What a further turn follows anyway, with the calls' results: a note costs no turn of its own."""


def is_unattended(spec: RunSpec, rules: DerailRules) -> bool:
    """Whether nobody watches the run, as its caller or the settings say."""
    by_session = bool(spec.session) and any(fnmatchcase(spec.session, name) for name in rules.unattended)
    return spec.is_unattended or by_session or "*" in rules.unattended


def action_for(found: Derail, spec: RunSpec, rules: DerailRules, *, may_stop: bool) -> DerailAction:
    """Who watches a run decides himself: what a detector guesses never ends it for him. `may_stop`: its
    caller does not want all tokens whatever they are.
    """
    is_critical = found.severity == "critical"
    if is_critical and may_stop and is_unattended(spec, rules):
        return "stop"
    is_steered = spec.kind == "run" and found.derail in _STEERED and bool(rules.note)
    return "steer" if is_steered else "report"
