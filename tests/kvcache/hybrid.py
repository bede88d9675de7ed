"""A hybrid's cache driven by texts. Pages of 4 tokens; letters are tokens."""

from __future__ import annotations

from array import array

from kvcache.cache import Cache, Kept, Kind, Opening, PageCopy, Path


def ids(text: str) -> array[int]:
    return array("I", [ord(letter) for letter in text])


class Driver:
    """Opens and ends turns of agents; each step ends with an integrity check."""

    def __init__(self, num_pages: int = 24, num_states: int = 8, num_small_states: int = 0) -> None:
        self.cache = Cache(num_pages, page_tokens=4, num_states=num_states, num_small_states=num_small_states)

    def open(self, text: str, agent: str = "ann", *, max_match: int | None = None) -> Opening:
        opening = self.cache.open(
            b"", ids(text), max_match=len(text) if max_match is None else max_match, agent=agent
        )
        self.cache.check_integrity()
        return opening

    def restored(self, text: str, agent: str = "ann") -> int:
        """Where a turn would go on; nothing changes but the use."""
        path = self.open(text, agent).path
        self.cache.close(path, keep=False)
        return path.num_cached

    def cached(self, text: str) -> int:
        return self.cache.probe(b"", ids(text), max_match=len(text)).num_cached

    def matched(self, text: str) -> int:
        return self.cache.probe(b"", ids(text), max_match=len(text)).num_matched

    def step(self, path: Path, text: str) -> None:
        """Computes what `text` has beyond the path."""
        assert self.cache.reserve(path, len(text))
        self.cache.take_demotions()
        self.cache.commit(path, ids(text)[path.num_tokens :])
        self.cache.check_integrity()

    def keep(self, path: Path, text: str, kind: Kind = Kind.TURN) -> PageCopy | None:
        """A step whose state is kept."""
        assert self.cache.reserve_state(path) is not None
        self.step(path, text)
        copy = self.cache.keep_state(path, kind, path.writer.agent)
        self.cache.check_integrity()
        return copy

    def run(self, text: str, agent: str = "ann", kind: Kind = Kind.TURN) -> Kept:
        """A whole turn whose last state is kept."""
        path = self.open(text, agent).path
        assert self.cache.reserve_state(path) is not None
        self.step(path, text)
        kept = self.cache.kept(path)
        self.cache.close(path, kind=kind, agent=agent)
        self.cache.check_integrity()
        return kept

    def run_bare(self, text: str, agent: str = "ann") -> Kept:
        """A whole turn that keeps pages only."""
        path = self.open(text, agent).path
        self.step(path, text)
        kept = self.cache.kept(path)
        self.cache.close(path)
        self.cache.check_integrity()
        return kept
