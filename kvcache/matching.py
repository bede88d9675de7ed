"""How much of a prompt the tree holds, token-exact, and from which checkpoint it can go on.

Changes nothing. Knows no locks and no pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from .nodes import TOKEN_BYTES, Checkpoint, Node, common_tokens


@dataclass(frozen=True, slots=True)
class Partial:
    """The first tokens of a page that are used where no whole page matches."""

    node: Node  # holds the page, as its first once the match's whole pages are locked
    page: int
    num_tokens: int  # 1 .. page_tokens


@dataclass(frozen=True, slots=True)
class Match:
    """The longest kept prefix of some tokens. Valid until the tree changes."""

    node: Node  # the last node with whole pages in the match, or the root
    num_node_pages: int  # how many of that node's pages match
    pages: list[int]
    num_tokens: int  # token-exact, the part of a page included
    partial: Partial | None  # with states: only where a checkpoint lies in it
    checkpoint: Checkpoint | None  # the deepest within the match


def find_match(root: Node, tokens: bytes, page_bytes: int, *, has_states: bool) -> Match:
    """The longest kept prefix of `tokens`. With states, its deepest checkpoint decides the partial page."""
    node, start = root, 0
    pages: list[int] = []
    while start + page_bytes <= len(tokens):
        child = node.children.get(tokens[start : start + page_bytes])
        if child is None:
            break
        if not tokens.startswith(child.tokens, start):
            return _match_inside(child, pages, tokens, page_bytes, has_states=has_states)
        pages += child.pages
        start += len(child.tokens)
        node = child
    rest = tokens[start : start + page_bytes]
    num_whole = start // TOKEN_BYTES
    partial = _longest_partial(node, rest)
    num_tokens = num_whole + (partial.num_tokens if partial is not None else 0)
    if not has_states:
        return Match(node, len(node.pages), pages, num_tokens, partial, None)
    best = _deepest_in(node, rest, None) or _deepest_along(node, num_whole, tokens, page_bytes)
    partial = _partial_of(best, num_whole, page_bytes)
    return Match(node, len(node.pages), pages, num_tokens, partial, best)


def deepest_above(node: Node | None, limit: int) -> Checkpoint | None:
    """The deepest checkpoint at a position of at most `limit` in this node or those above it."""
    while node is not None:
        found = node.deepest(limit)
        if found is not None:
            return found
        node = node.parent
    return None


def equal_pages(node: Node, tokens: bytes | bytearray, start: int, page_bytes: int) -> int:
    """How many of the node's pages equal the tokens from `start` (in bytes), by halving; copies nothing."""
    low = 0
    high = min(len(node.tokens), len(tokens) - start) // page_bytes
    with memoryview(node.tokens) as run:
        while low < high:
            middle = (low + high + 1) // 2
            first, last = low * page_bytes, middle * page_bytes
            if tokens.startswith(run[first:last], start + first):
                low = middle
            else:
                high = middle - 1
    return low


def _match_inside(node: Node, pages: list[int], tokens: bytes, page_bytes: int, *, has_states: bool) -> Match:
    """The match ends in the middle of this node's run, after at least one page."""
    num_pages = equal_pages(node, tokens, node.start * TOKEN_BYTES, page_bytes)
    border = num_pages * page_bytes
    first = node.start * TOKEN_BYTES + border
    num_partial = common_tokens(node.tokens[border : border + page_bytes], tokens[first : first + page_bytes])
    num_whole = first // TOKEN_BYTES
    pages = pages + node.pages[:num_pages]
    if not has_states:
        partial = Partial(node, node.pages[num_pages], num_partial) if num_partial else None
        return Match(node, num_pages, pages, num_whole + num_partial, partial, None)
    best = _deepest_along(node, num_whole + num_partial, tokens, page_bytes)
    partial = _partial_of(best, num_whole, page_bytes)
    return Match(node, num_pages, pages, num_whole + num_partial, partial, best)


def _longest_partial(node: Node, rest: bytes) -> Partial | None:
    """The child or tail whose first page shares most tokens with `rest`."""
    best: Node | None = None
    num_best = 0
    probe = rest[:TOKEN_BYTES]
    if not probe:
        return None
    for among in (node.children, node.tails):
        for key, child in among.items():
            if key.startswith(probe):
                best, num_best = child, common_tokens(key, rest)
                if num_best * TOKEN_BYTES == len(rest):
                    return Partial(best, best.pages[0], num_best)
                probe = rest[: (num_best + 1) * TOKEN_BYTES]
    return Partial(best, best.pages[0], num_best) if best is not None else None


def _deepest_along(node: Node, limit: int, tokens: bytes, page_bytes: int) -> Checkpoint | None:
    """The deepest checkpoint on the way from the root to `limit` in `node`, or in a first page beside it."""
    while node.parent is not None:
        found = node.deepest(limit)
        first = node.start * TOKEN_BYTES
        if found is None or (found.position - node.start) * TOKEN_BYTES < page_bytes:
            found = _deepest_in(
                node.parent, tokens[first : min(first + page_bytes, limit * TOKEN_BYTES)], found
            )
        if found is not None:
            return found
        node = node.parent
    return None


def _deepest_in(node: Node, rest: bytes, best: Checkpoint | None) -> Checkpoint | None:
    """The deepest of `best` and the checkpoints in the first pages below `node`, as far as `rest` agrees."""
    probe = rest[:TOKEN_BYTES]
    if not probe:
        return best
    for among in (node.tails, node.children):
        for key, child in among.items():
            if child.checkpoints and key.startswith(probe):
                found = child.deepest(child.start + common_tokens(key, rest))
                if found is not None and (best is None or found.position > best.position):
                    best = found
    return best


def _partial_of(checkpoint: Checkpoint | None, num_whole: int, page_bytes: int) -> Partial | None:
    """The page that a checkpoint beyond the whole pages of a match lies in."""
    if checkpoint is None or checkpoint.position <= num_whole:
        return None
    node = checkpoint.node
    page = node.pages[(num_whole - node.start) * TOKEN_BYTES // page_bytes]
    return Partial(node, page, checkpoint.position - num_whole)
