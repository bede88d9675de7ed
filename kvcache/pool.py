"""Which pages are free and who owns the others; rows of states are counted by the same rules.

Knows numbers only: no bytes, tokens or readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from .errors import IntegrityError, PoolExhausted


class Owner(IntEnum):
    """Every page (or row) has exactly one owner."""

    FREE = 0
    LIVE = 1  # private to one open path; of rows: reserved for a checkpoint
    TREE = 2  # sealed: its bytes never change until the tree lets go of it


class PagePool:
    """Pages [0, num_pages), each FREE, LIVE or TREE; `noun` names one of them in errors."""

    def __init__(self, num_pages: int, noun: str = "page") -> None:
        self.num_pages = num_pages
        self._noun = noun
        self.num_live = 0
        self._owners = bytearray(num_pages)
        # A stack: the pages freed last are used first; a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_tree(self) -> int:
        return self.num_pages - self.num_live - len(self._free)

    def owner(self, page: int) -> Owner:
        return Owner(self._owners[page])

    def allocate(self, num_pages: int) -> list[int]:
        """Takes free pages; they become LIVE. Raises PoolExhausted and takes none if there are too few."""
        if num_pages > len(self._free):
            raise PoolExhausted(
                f"{num_pages} {self._noun}s asked for, {len(self._free)} of {self.num_pages} free"
            )
        if num_pages <= 0:
            return []
        pages = self._free[-num_pages:]
        pages.reverse()
        del self._free[-num_pages:]
        for page in pages:
            self._owners[page] = Owner.LIVE
        self.num_live += num_pages
        return pages

    def seal(self, pages: Sequence[int]) -> None:
        """LIVE pages become the tree's."""
        for page in pages:
            if self._owners[page] != Owner.LIVE:
                raise IntegrityError(f"{self._noun} {page} is sealed but it is {self.owner(page).name}")
            self._owners[page] = Owner.TREE
        self.num_live -= len(pages)

    def free(self, pages: Iterable[int]) -> None:
        """LIVE or TREE pages become FREE. Raises IntegrityError on a page that is free already."""
        for page in pages:
            owner = self._owners[page]
            if owner == Owner.FREE:
                raise IntegrityError(f"{self._noun} {page} is freed twice")
            self.num_live -= owner == Owner.LIVE
            self._owners[page] = Owner.FREE
            self._free.append(page)

    def pages_of(self, owner: Owner) -> set[int]:
        """Every page of one owner; for checks."""
        return {page for page, value in enumerate(self._owners) if value == owner}

    def check(self) -> None:
        """Raises IntegrityError when the free list and the owners disagree."""
        free = self.pages_of(Owner.FREE)
        if len(self._free) != len(free) or set(self._free) != free:
            raise IntegrityError(
                f"free list holds {len(self._free)} {self._noun}s, {len(free)} are marked free"
            )
        num_live = len(self.pages_of(Owner.LIVE))
        if num_live != self.num_live:
            raise IntegrityError(f"{self.num_live} live {self._noun}s counted, {num_live} are marked live")
