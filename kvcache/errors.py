"""What can go wrong in the cache room.

KVCacheError
├── PoolExhausted    more pages were asked for than are free
├── PathClosed       a path was used after its close or poison
├── PathTooShort     rows were committed beyond the pages that the path reserved
├── StateNotReserved a checkpoint was to be kept without a row that holds its state
├── PathsOpen        the cache was cleared under a running path
└── IntegrityError   pages, locks or tree disagree: a bug in this room, or pages changed behind its back
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of the room."""


class PoolExhausted(KVCacheError):
    """More pages were asked for than are free."""


class PathClosed(KVCacheError):
    """A path was used after its close or poison."""


class PathTooShort(KVCacheError):
    """Rows were committed beyond the pages that the path reserved."""


class StateNotReserved(KVCacheError):
    """A checkpoint was to be kept without a row that holds its state."""


class PathsOpen(KVCacheError):
    """The cache was cleared under a running path."""


class IntegrityError(KVCacheError):
    """Pages, locks or tree disagree; the message names the page or node."""
