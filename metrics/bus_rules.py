"""What a bus must be, whoever runs it: where it may be, how old, and that it loses nothing it was given.

Both processes ask, each with its own client. Pure: opens nothing.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from .hosts import LOOPBACK_HOSTS
from .settings import mask

OLDEST_VERSION = (6, 2)
"""The first with XADD NOMKSTREAM."""


class UnfitBus(Exception):
    """A bus that must not be used. Its text is one line with the remedy."""


def check_url(url: str) -> None:
    """Refuses a bus on another machine without TLS and a password. Raises UnfitBus; it shows no password."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or "localhost"
    except ValueError as error:
        raise UnfitBus(f"the bus's URL {mask(url)} cannot be read: {error}") from error
    if parts.scheme == "unix" or host in LOOPBACK_HOSTS:
        return
    if parts.scheme != "rediss":
        raise UnfitBus(f"the bus at {host} is not this machine: use rediss:// (TLS) with a password")
    if not parts.password:
        raise UnfitBus(f"the bus at {host} needs a password: rediss://:PASSWORD@{host}")


def doubts(version: str, policy: str | None, appendonly: str | None) -> list[str]:
    """A line for each setting that may lose calls; the last two are None where the bus does not show them.

    Raises UnfitBus.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_VERSION:
        raise UnfitBus(f"the bus has version {version}: Redis 6.2 or any Valkey is needed")
    told = []
    if policy is None:
        told.append("the bus does not show its settings: see that its maxmemory-policy is noeviction")
    elif policy != "noeviction":
        raise UnfitBus(
            f"the bus evicts keys ({policy}), which loses calls: run CONFIG SET maxmemory-policy noeviction"
        )
    if appendonly == "no":
        told.append(
            "the bus keeps no append-only file, so its restart loses calls: CONFIG SET appendonly yes"
        )
    return told
