"""Checks that pool, tree and open paths agree: in property tests after each step, and by the idle engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .errors import IntegrityError
from .pool import Owner, PagePool
from .tree import Node, PrefixTree, walk


def check_tree(tree: PrefixTree) -> None:
    """Shape and counters of the tree."""
    num_nodes = num_pages = num_unlocked = 0
    for namespace, root in tree.roots.items():
        if root.parent is not None or root.pages or root.key != namespace:
            raise IntegrityError(f"root of namespace {namespace.hex()[:16]} is not a root")
        if not root.children and not root.locks:
            raise IntegrityError(f"root of namespace {namespace.hex()[:16]} is empty and unused")
        _check_children(root)
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
            if not node.is_hidden or not node.locks:
                raise IntegrityError(f"{_name(node)} is hidden but matchable or held by nobody")


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
    """free + tree + live = total, and each page has one owner."""
    pool.check()
    _same_pages("tree", pool.pages_of(Owner.TREE), (page for node in tree.nodes() for page in node.pages))
    _same_pages("live", pool.pages_of(Owner.LIVE), live)
    if pool.num_free + pool.num_tree + pool.num_live != pool.num_pages:
        raise IntegrityError(
            f"{pool.num_free} free + {pool.num_tree} tree + {pool.num_live} live pages != {pool.num_pages}"
        )


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
        if len(node.pages) != 1 or node.children or not node.tokens:
            raise IntegrityError(f"{_name(node)} is a tail with several pages, children or no tokens")
    elif len(node.tokens) != len(node.pages) * tree.page_bytes:
        raise IntegrityError(f"{_name(node)} has {len(node.tokens)} token bytes in {len(node.pages)} pages")
    if node.key != node.tokens[: tree.page_bytes]:
        raise IntegrityError(f"{_name(node)} has the key of another page")
    if node.parent is None or node.locks > node.parent.locks:
        raise IntegrityError(f"{_name(node)} has more locks than the node above it")
    _check_children(node)


def _check_children(node: Node) -> None:
    for key, child in node.children.items():
        if child.key != key or child.parent is not node:
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
