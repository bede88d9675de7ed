"""How all APIs tell that a turn has gone astray: one object with all its fields, whatever they hold. Pure."""

from __future__ import annotations

from msgspec import Struct

from workers.messages import Derail


class DerailBody(Struct, frozen=True, kw_only=True):
    """How it went astray, and what is done about it."""

    kind: str
    severity: str  # warning or critical
    first_token: int  # of the turn's: where it began
    excerpt: str  # what repeats
    action: str  # report, steer or stop


def derail_body(derail: Derail) -> DerailBody:
    """As callers get it."""
    return DerailBody(
        kind=derail.derail,
        severity=derail.severity,
        first_token=derail.first_token,
        excerpt=derail.excerpt,
        action=derail.action,
    )
