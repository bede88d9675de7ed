"""Where in the bus a gateway keeps what outlives its runs' streams, and for how long.

Knows key names; what they hold is said by the class that owns each.
"""

from __future__ import annotations

import hashlib

import msgspec

from workers.messages import KEY_PREFIX

DAY_SECONDS = 86_400
WEEK_SECONDS = 7 * DAY_SECONDS


def run_key(run_id: str, part: str) -> str:
    """One part of what is kept of a run."""
    return f"{KEY_PREFIX}run:{run_id}:{part}"


def grave_key(run_id: str) -> str:
    """That the run was deleted, or is to be once it has ended."""
    return run_key(run_id, "deleted")


def named_key(kind: str, *names: str) -> str:
    """A key for names that callers chose: hostile ones cannot make two keys one, nor a key long."""
    told = msgspec.json.encode([name.encode(errors="surrogatepass") for name in names])
    return f"{KEY_PREFIX}{kind}:{hashlib.blake2b(told, digest_size=16).hexdigest()}"
