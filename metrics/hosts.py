"""Names of machines: which mean this one, and what this one is called beside others. Knows no setting."""

from __future__ import annotations

import re
import socket

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
"""What only this machine can reach."""


def machine_name() -> str:
    """This machine's short name, at most 64 letters, digits, "-" and "_": its engine's id unless told."""
    short = socket.gethostname().partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", short).strip("-")[:64] or "engine"
