"""Checks that pool, tree and open paths agree: in property tests after each step, and by the idle engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from .checkpoints import Checkpoint, Checkpoints
from .errors import IntegrityError
from .nodes import Node, walk
from .paths import Path
from .pins import Pins, chain
from .pool import Owner, PagePool
from .tree import PrefixTree


def check_all(
    pool: PagePool, tree: PrefixTree, states: Checkpoints, paths: Collection[Path], pins: Pins
) -> None:
    """Everything below."""
    check_tree(tree)
    held = [path.node for path in paths]
    held += [path.source for path in paths if path.source is not None]
    held += [pin.node for pin in pins]
    check_locks(tree, held)
    for path in paths:
        check_page_table(path.pages, path.num_published, path.node, path.private_pages())
    check_owners(pool, tree, (page for path in paths for page in path.private_pages()))
    check_states(tree, states, paths, pins)
    check_counts(pool, tree, states, paths)


def check_counts(pool: PagePool, tree: PrefixTree, states: Checkpoints, paths: Collection[Path]) -> None:
    """free + tree + live = total, for pages and for rows of states, by counters alone."""
    num_live = sum(len(path.twins) + len(path.pages) - path.num_published for path in paths)
    if pool.num_free + tree.num_pages + num_live != pool.num_pages:
        raise IntegrityError(
            f"{pool.num_free} free + {tree.num_pages} tree + {num_live} live pages != {pool.num_pages}"
        )
    num_reserved = sum(path.state_row is not None for path in paths)
    exact, small = states.rows.exact, states.rows.small
    num_kept = exact.num_tree + small.num_tree
    if (exact.num_live, small.num_live, num_kept) != (num_reserved, 0, len(states)):
        raise IntegrityError(
            f"{exact.num_live} rows are reserved and {num_kept} kept, by {num_reserved} paths and "
            f"{len(states)} checkpoints"
        )


def check_path(path: Path) -> None:
    """A path's lengths and the chain of nodes that it holds. Costs by depth."""
    num_pages = sum(len(node.pages) for node in chain(path.node))
    if num_pages != path.num_published:
        raise IntegrityError(f"a path published {path.num_published} pages but holds locks on {num_pages}")
    if not all(node.locks for node in chain(path.node)):
        raise IntegrityError(f"path {path.number} holds a node without a lock")


def check_states(tree: PrefixTree, states: Checkpoints, paths: Iterable[Path], pins: Pins) -> None:
    """Each row has one owner; each checkpoint lies in its node and is held by whoever needs it."""
    _check_rows(states, [path.state_row for path in paths if path.state_row is not None])
    holders = Counter(path.restored for path in paths if path.restored is not None)
    holders.update(pin.checkpoint for pin in pins if pin.checkpoint is not None)
    for checkpoint in states:
        if checkpoint.num_holders != holders[checkpoint]:
            raise IntegrityError(
                f"{_named(checkpoint)} has {checkpoint.num_holders} holders, {holders[checkpoint]} hold it"
            )
    placed = Counter(found for node in tree.nodes() for found in node.checkpoints)
    expected = Counter(found for found in states if not found.is_forgotten)
    for checkpoint in (placed - expected) + (expected - placed):
        raise IntegrityError(f"{_named(checkpoint)} is kept but in no node, or the other way round")


def _check_rows(states: Checkpoints, reserved: list[int]) -> None:
    rows = states.rows
    rows.exact.check()
    rows.small.check()
    exact = rows.exact.num_pages
    small = {exact + row for row in rows.small.pages_of(Owner.TREE)}
    _same_pages("kept", rows.exact.pages_of(Owner.TREE) | small, (found.row for found in states))
    _same_pages("reserved", rows.exact.pages_of(Owner.LIVE), reserved)
    _same_pages("small and reserved", rows.small.pages_of(Owner.LIVE), ())
    moves = rows.demotions
    sources = {move.source for move in moves}
    if len(sources) < len(moves) or any(rows.exact.owner(row) == Owner.TREE for row in sources):
        raise IntegrityError("a state is to move from a row that another checkpoint's state is in")
    if not small.issuperset(move.target for move in moves):
        raise IntegrityError("a state is to move to a row of no checkpoint")


def check_tree(tree: PrefixTree) -> None:
    """Shape and counters of the tree."""
    num_nodes = num_pages = num_unlocked = 0
    for namespace, root in tree.roots.items():
        if root.parent is not None or root.pages or root.key != namespace:
            raise IntegrityError(f"root of namespace {namespace.hex()[:16]} is not a root")
        if not (root.children or root.tails or root.locks):
            raise IntegrityError(f"root of namespace {namespace.hex()[:16]} is empty and unused")
        _check_children(tree, root)
    for node in tree.nodes():
        _check_node(tree, node)
        num_nodes += 1
        num_pages += len(node.pages)
        num_unlocked += 0 if node.locks else len(node.pages)
    counted = (tree.num_nodes, tree.num_pages, tree.num_unlocked_pages)
    if counted != (num_nodes, num_pages, num_unlocked):
        raise IntegrityError(
            f"tree counts (nodes, pages, unlocked) {counted}, it has {(num_nodes, num_pages, num_unlocked)}"
        )
    for top in tree.hidden:
        for node in walk(top):
            if not node.is_hidden or not node.locks or node.checkpoints:
                raise IntegrityError(f"{_name(node)} is hidden but matchable, or held by nobody")


def check_locks(tree: PrefixTree, held: Iterable[Node]) -> None:
    """Each held node and all above it carry one lock for it, and there are no other locks."""
    expected: Counter[Node] = Counter()
    for node in held:
        current: Node | None = node
        while current is not None:
            expected[current] += 1
            current = current.parent
    everything = set(tree.nodes()) | set(tree.roots.values())
    for node in expected.keys() - everything:
        raise IntegrityError(f"{_name(node)} is held by a path but not in the tree")
    for node in everything:
        if node.locks != expected[node]:
            raise IntegrityError(f"{_name(node)} has {node.locks} locks, paths hold {expected[node]}")


def check_owners(pool: PagePool, tree: PrefixTree, live: Iterable[int]) -> None:
    """Each page has one owner."""
    pool.check()
    _same_pages("tree", pool.pages_of(Owner.TREE), (page for node in tree.nodes() for page in node.pages))
    _same_pages("live", pool.pages_of(Owner.LIVE), live)


def check_page_table(pages: list[int], num_published: int, node: Node, private: Iterable[int]) -> None:
    """A path's published pages are those of its locked nodes or its own; the rest are its own."""
    own = set(private)
    chain: list[int] = []
    current: Node | None = node
    while current is not None:
        chain[:0] = current.pages
        current = current.parent
    if len(chain) != num_published:
        raise IntegrityError(f"a path published {num_published} pages but holds locks on {len(chain)}")
    for index, page in enumerate(pages):
        if page not in own and (index >= num_published or chain[index] != page):
            raise IntegrityError(f"page {page} at {index} of a page table is neither locked nor private")


def _check_node(tree: PrefixTree, node: Node) -> None:
    if not node.pages:
        raise IntegrityError(f"node {node.key.hex()[:16]} has no pages")
    if tree.is_tail(node):
        if len(node.pages) != 1 or node.children or node.tails or not node.tokens:
            raise IntegrityError(f"{_name(node)} is a tail with several pages, children or no tokens")
    elif len(node.tokens) != len(node.pages) * tree.page_bytes:
        raise IntegrityError(f"{_name(node)} has {len(node.tokens)} token bytes in {len(node.pages)} pages")
    if node.key != node.tokens[: tree.page_bytes]:
        raise IntegrityError(f"{_name(node)} has the key of another page")
    if node.parent is None or node.locks > node.parent.locks:
        raise IntegrityError(f"{_name(node)} has more locks than the node above it")
    if node.start != node.parent.end:
        raise IntegrityError(
            f"{_name(node)} starts at {node.start}, the node above ends at {node.parent.end}"
        )
    _check_children(tree, node)
    _check_checkpoints(tree, node)


def _check_checkpoints(tree: PrefixTree, node: Node) -> None:
    for checkpoint in node.checkpoints:
        if checkpoint.node is not node or not node.start < checkpoint.position <= node.end:
            raise IntegrityError(
                f"{_named(checkpoint)} is not where {_name(node)} ({node.start}, {node.end}] is"
            )
        if checkpoint.num_holders and not node.locks:
            raise IntegrityError(f"{_named(checkpoint)} is held but its node may be evicted")
    if tree.checkpoints is not None and tree.is_tail(node) and not (node.checkpoints or node.locks):
        raise IntegrityError(f"{_name(node)} is a tail without a checkpoint")


def _check_children(tree: PrefixTree, node: Node) -> None:
    for among, is_tail in ((node.children, False), (node.tails, True)):
        for key, child in among.items():
            if child.key != key or child.parent is not node or tree.is_tail(child) != is_tail:
                raise IntegrityError(f"{_name(child)} hangs under a wrong key or parent")


def _same_pages(owner: str, marked: set[int], found: Iterable[int]) -> None:
    counts = Counter(found)
    twice = [page for page, count in counts.items() if count > 1]
    if twice:
        raise IntegrityError(f"page {twice[0]} has two {owner} owners")
    if counts.keys() != marked:
        page = min(counts.keys() ^ marked)
        what = (
            f"held as {owner} but not marked so" if page in counts else f"marked {owner} but nobody holds it"
        )
        raise IntegrityError(f"page {page} is {what}")


def _name(node: Node) -> str:
    return f"node at page {node.pages[0]}" if node.pages else "a node without pages"


def _named(checkpoint: Checkpoint) -> str:
    return f"checkpoint at {checkpoint.position} in row {checkpoint.row}"
