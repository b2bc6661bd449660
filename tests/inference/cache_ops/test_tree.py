"""The tree of prefixes: what matches, what stays as an empty node, and what is evicted first."""

import pytest

from megatron_dmtd.inference.cache_ops.pages import PageSet, StorePages
from megatron_dmtd.inference.cache_ops.tree import CacheTree, Node
from tests.inference.cache_ops.test_pages import store_of


class Path:
    """Nodes of one token each, every one in a page set of its own."""

    def __init__(self, tree: CacheTree, tokens: list[int], *, record_before_last=None) -> None:
        self.tree, self.nodes, self.pages = tree, list[Node](), list[PageSet]()
        node = tree.root
        for index, token in enumerate(tokens):
            node = tree.grow(node, (record_before_last if index == len(tokens) - 1 else None, (token,)))
            tree.lock([node])
            self.nodes.append(node)
            self.pages.append(tree.pages.new())
            tree.insert(node, (0, index), (self.pages[-1], 0))

    def let_go(self, *indices: int) -> None:
        """The request reads these no longer."""
        for index in indices:
            self.tree.pages.release(self.pages[index])

    def end(self) -> None:
        self.tree.unlock(self.nodes)


def tree_of(num_pages: int, *, drop_aware: bool = True) -> CacheTree:
    return CacheTree(StorePages(store_of(num_pages)), drop_aware=drop_aware)


def test_equal_tokens_after_other_operations_are_another_node():
    tree = tree_of(8)
    path = Path(tree, [1, 2, 3])
    assert tree.child(path.nodes[1], (None, (3,))) is path.nodes[2]
    assert tree.child(path.nodes[1], ((((0, 1),),), (3,))) is None
    assert tree.child(path.nodes[1], (None, (4,))) is None


def test_a_hole_in_an_ancestor_stays_as_an_empty_node_and_a_leaf_goes():
    tree = tree_of(8)
    path = Path(tree, [1, 2, 3])
    path.let_go(0, 1, 2)
    path.end()
    tree.forget(path.nodes[1], (0, 1))
    assert tree.child(path.nodes[0], (None, (2,))) is path.nodes[1] and not path.nodes[1].places
    tree.check_integrity()
    tree.forget(path.nodes[2], (0, 2))
    assert tree.child(path.nodes[0], (None, (2,))) is None, "nobody needs the hole any more"
    tree.insert(path.nodes[0], (0, 0), (path.pages[2], 0))
    assert path.nodes[0].places[0, 0][0] is path.pages[0], "what is known keeps its place"
    tree.check_integrity()


@pytest.mark.parametrize(("drop_aware", "expected"), [(True, ["dropped", "old", "new"]), (False, ["old", "new", "dropped"])])
def test_dropped_by_all_readers_goes_first_then_the_least_recently_used(drop_aware, expected):
    tree = tree_of(8, drop_aware=drop_aware)
    old, new, running = Path(tree, [1]), Path(tree, [2]), Path(tree, [3, 4])
    for path in (old, new):
        path.let_go(0)
        path.end()
    running.let_go(0)  # dropped: on its path, and not read; its second token is still read
    names = {id(old.nodes[0]): "old", id(new.nodes[0]): "new", id(running.nodes[0]): "dropped", id(running.nodes[1]): "read"}
    gone = []
    while tree.evict_one():
        gone += [names[id(p.nodes[i])] for p, i in ((old, 0), (new, 0), (running, 0), (running, 1)) if not p.nodes[i].places]
        gone = list(dict.fromkeys(gone))
    assert gone == expected
    assert running.nodes[1].places, "what is read stays"
    tree.check_integrity()


def test_the_deepest_of_a_path_goes_first_and_only_as_much_as_needed():
    tree = tree_of(4)
    path = Path(tree, [1, 2, 3])
    path.let_go(0, 1, 2)
    path.end()
    assert tree.evict(3) and not path.nodes[2].places and not path.nodes[1].places and path.nodes[0].places
    assert tree.evict(3) and path.nodes[0].places and not tree.evict(5)
    assert not path.nodes[0].places
    tree.check_integrity()
