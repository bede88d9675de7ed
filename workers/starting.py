"""How a turn begins: a path over what the cache has of it, with pages for the rest. Knows no queue."""

from __future__ import annotations

from kvcache.cache import Cache, Opening, Path

from .agents import agent_name
from .cuts import MAX_CUTS, Cut, Stretch, due_cuts
from .leaving import discard
from .plan import Segment
from .sharing import InFlight
from .turn import Turn


def open_path(cache: Cache, turn: Turn, *, is_alone: bool = False) -> Opening | None:
    """A path with pages for all tokens so far and a page's worth more; None where there are too few.

    A hybrid's may hold all tokens already: its checkpoint has the hidden row that the next token comes from.
    is_alone: nobody else will give pages back, so that less than what is kept is better than to wait.
    """
    tokens, agent = turn.tokens(0, turn.num_tokens), agent_name(turn)
    num_wanted = len(tokens) + min(turn.max_tokens - len(turn.generated), cache.page_tokens)
    most = len(tokens) if cache.has_states else len(tokens) - 1
    while True:
        opening = cache.open(turn.namespace, tokens, max_match=most, agent=agent)
        has_source, most = opening.path.source is not None, _most_without_source(opening)
        if _has_pages(cache, opening.path, num_wanted):
            return opening
        # The page that it begins from was locked beside its own. Without that the rest may just fit; a
        # dense path loses less than a page by it, a hybrid's perhaps all of its prefix.
        if not has_source or (cache.has_states and not is_alone):
            return None


def _most_without_source(opening: Opening) -> int:
    """How much of the match a path can have that begins from no page beside its own."""
    if opening.copy is not None:
        return opening.path.num_cached - opening.copy.num_tokens
    return opening.path.num_cached - 1


def _has_pages(cache: Cache, path: Path, num_tokens: int) -> bool:
    """Reserve them; a path that lacks them is closed."""
    has_pages = False
    try:
        has_pages = cache.reserve(path, num_tokens)
    finally:
        if not has_pages:
            discard(cache, path)
    return has_pages


def cuts_ahead(turn: Turn, flight: InFlight) -> tuple[Cut, ...]:
    """Checkpoints that are still to be taken in the turn's prefill."""
    forks = flight.forks()
    if turn.hints.fork_tokens:
        forks.add(turn.hints.fork_tokens)
    stretch = Stretch(
        start=turn.kept_tokens,
        num_matched=turn.num_matched,
        system_tokens=turn.hints.system_tokens,
        turn_tokens=turn.hints.turn_tokens,
        is_last=turn.hints.is_last,
        forks=frozenset(forks),
        num_allowed=MAX_CUTS - turn.num_checkpoints,
    )
    return due_cuts(stretch)


def decode_segment(turn: Turn, proposed: list[int]) -> Segment:
    """The row of the turn's last token, and those of tokens that may follow it."""
    assert turn.path is not None and turn.worker is not None
    start = turn.path.num_tokens
    token_ids = [*turn.tokens(start, turn.num_tokens), *proposed]
    return Segment(
        turn.worker, start, token_ids, turn.path.pages, turn.row_sampling(), num_proposed=len(proposed)
    )
