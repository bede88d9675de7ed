"""Up to where many streams have been read, and the XREAD that goes on there, kept packed.

Packing hundreds of names for each read of a few events costs more than all else that is done with these.
Knows the protocol's framing; knows no connection and no message.
"""

from __future__ import annotations

from collections.abc import Iterator


class Positions:
    """The id behind which each stream is read. Iterates over (stream, id)."""

    def __init__(self, count: int, block_seconds: float) -> None:
        words = (b"XREAD", b"COUNT", b"%d" % count, b"BLOCK", b"%d" % (1000 * block_seconds), b"STREAMS")
        self._head = b"".join(map(_bulk, words))
        self._num_head = len(words)
        self._ids: dict[str, str] = {}
        self._packed_keys: dict[str, bytes] = {}
        self._packed_ids: dict[str, bytes] = {}  # all three in the same order

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._ids.items())

    def get(self, key: str) -> str | None:
        """None: the stream is not read."""
        return self._ids.get(key)

    def set(self, key: str, after: str) -> None:
        """The stream is read behind this id from now on."""
        if key not in self._ids:
            self._packed_keys[key] = _bulk(key.encode())
        self._ids[key] = after
        self._packed_ids[key] = _bulk(after.encode())

    def remove(self, key: str) -> None:
        """The stream is not read any more."""
        del self._ids[key], self._packed_keys[key], self._packed_ids[key]

    def command(self) -> bytes:
        """The XREAD as it is sent."""
        num_words = self._num_head + 2 * len(self._ids)
        words = [b"*%d\r\n" % num_words, self._head, *self._packed_keys.values(), *self._packed_ids.values()]
        return b"".join(words)


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)
