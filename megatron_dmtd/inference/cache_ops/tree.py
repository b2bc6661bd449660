"""What is cached for requests with cache operations: a tree of prefixes, keyed by tokens and operations. Numbers only.

A node is one cycle of tokens (one token of an ordinary decoder) after its parent, with what took effect before it. K and V of a
token depend on nothing else, so equal paths have equal K and V. A node knows where its tokens are cached: at the position of
their birth, and at those to which repositions have moved them. A node whose K and V are gone stays as long as a descendant has
some.

There are two counts. `num_readers` counts the running requests whose path leads through a node. The owners of a page set (of the
store) are the tree and the requests that still read it. So a page set on the path of running requests that the tree alone owns
has been dropped by all of them, and goes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_dmtd.inference.cache_ops.pages import PageSet, StorePages
from megatron_dmtd.inference.kv.pages import PageTables

#: What distinguishes a node from its siblings: what takes effect before it, and its tokens.
NodeKey = tuple[object, tuple[int, ...]]
#: Which token of a node's cycle, at which position.
Occurrence = tuple[int, int]
#: A page set and an offset there.
Place = tuple[PageSet, int]


@dataclass(eq=False, slots=True)
class Node:
    """One cycle of tokens on a path."""

    parent: Node | None
    key: NodeKey
    depth: int
    children: dict[NodeKey, Node] = field(default_factory=dict)
    places: dict[Occurrence, Place] = field(default_factory=dict)
    num_readers: int = 0
    last_use: int = 0


class CacheTree:
    """The nodes, and the page sets that they refer to. It is an owner of these."""

    def __init__(self, pages: StorePages, *, drop_aware: bool) -> None:
        """`drop_aware`: evict what all running readers have dropped first, and not last."""
        self.pages, self.drop_aware = pages, drop_aware
        self.root = Node(None, (None, ()), -1)
        self._held: dict[PageSet, set[tuple[Node, Occurrence]]] = {}
        self._clock = 0

    def child(self, node: Node, key: NodeKey) -> Node | None:
        """The node after `node`, if there is one."""
        return node.children.get(key)

    def grow(self, node: Node, key: NodeKey) -> Node:
        """The node after `node`, made if there is none."""
        found = node.children.get(key)
        if found is None:
            found = node.children[key] = Node(node, key, node.depth + 1)
        return found

    def lock(self, nodes: Sequence[Node]) -> None:
        """A running request's path leads through `nodes` from now on."""
        self._clock += 1
        for node in nodes:
            node.num_readers += 1
            node.last_use = self._clock

    def unlock(self, nodes: Sequence[Node]) -> None:
        """The request has ended, or begins again."""
        self._clock += 1
        for node in nodes:
            node.num_readers -= 1
            node.last_use = self._clock
            assert node.num_readers >= 0, node.depth
        for node in reversed(nodes):
            self._prune(node)

    def insert(self, node: Node, occurrence: Occurrence, place: Place) -> None:
        """Note where a token is cached. What is known already keeps its place."""
        if occurrence in node.places:
            return
        pages = place[0]
        if pages not in self._held:
            self.pages.share(pages)
            self._held[pages] = set()
        node.places[occurrence] = place
        self._held[pages].add((node, occurrence))

    def forget(self, node: Node, occurrence: Occurrence) -> None:
        """Remove one place. Its page set is returned with the last of them."""
        pages = node.places.pop(occurrence)[0]
        held = self._held[pages]
        held.remove((node, occurrence))
        if not held:
            del self._held[pages]
            self.pages.release(pages)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Remove a node without places, children and readers, and what that leaves of its ancestors."""
        while node.parent is not None and not (node.places or node.children or node.num_readers):
            if node.parent.children.get(node.key) is not node:
                return
            del node.parent.children[node.key]
            node = node.parent

    def evict(self, count: int) -> bool:
        """Forget page sets until `count` are free. False if that many cannot be had."""
        if self.pages.num_free >= count:
            return True
        for pages in sorted(self._evictable(), key=self._rank):
            self._forget_pages(pages)
            if self.pages.num_free >= count:
                return True
        return False

    def evict_one(self) -> bool:
        """Forget the page set that goes first. False if there is none."""
        victim = min(self._evictable(), key=self._rank, default=None)
        if victim is not None:
            self._forget_pages(victim)
        return victim is not None

    def _evictable(self) -> list[PageSet]:
        return [pages for pages in self._held if self.pages.is_sole_owner(pages)]

    def _rank(self, pages: PageSet) -> tuple[bool, int, int]:
        """Sorts page sets by when they go: dropped ones first, then the least recently used, the deepest of a path first."""
        nodes = [node for node, _ in self._held[pages]]
        is_read = any(node.num_readers for node in nodes)
        return is_read != self.drop_aware, max(node.last_use for node in nodes), -max(node.depth for node in nodes)

    def _forget_pages(self, pages: PageSet) -> None:
        for node, occurrence in list(self._held[pages]):
            self.forget(node, occurrence)

    def clear(self) -> None:
        """Forget everything. Paths of running requests stay, without K and V."""
        for pages in list(self._held):
            self._forget_pages(pages)

    def detach(self) -> None:
        """Forget everything, the paths of running requests included: what they compute is no longer what others would."""
        self.clear()
        self.root = Node(None, (None, ()), -1)

    def owned(self) -> Iterator[PageTables]:
        """What the tree owns, for the store's check."""
        return (pages.tables for pages in self._held)

    def check_integrity(self) -> None:
        """Every place is held once, and every node is on its parent's list."""
        places, stack = 0, [self.root]
        while stack:
            node = stack.pop()
            places += len(node.places)
            for occurrence, (pages, _) in node.places.items():
                assert (node, occurrence) in self._held[pages], (node.depth, occurrence)
            for child in node.children.values():
                assert child.parent is node and child.depth == node.depth + 1
                assert child.num_readers <= node.num_readers or node is self.root
                assert child.places or child.children or child.num_readers, "an empty node that nobody needs"
            stack += node.children.values()
        assert places == sum(map(len, self._held.values())), (places, len(self._held))
