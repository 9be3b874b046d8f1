"""Static trees against definitions node by node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decoding.trees import Tree, chain, full
from specjax.decoding.types import ANCHOR
from specjax.decoding.windows import ancestor_mask

# 0 and 1 below the anchor, 2 and 4 below 0, 3 below 2
SMALL = Tree((-1, -1, 0, 2, 0))

any_parents = st.lists(st.integers(0, 10**6), max_size=12).map(
    lambda draws: tuple(x % (node + 1) - 1 for node, x in enumerate(draws))
)


def path_to(tree: Tree, node: int) -> tuple[int, ...]:
    """Nodes from the anchor's child to this one, walked from below."""
    path = []
    while node != ANCHOR:
        path.append(node)
        node = tree.parents[node]
    return tuple(path[::-1])


@given(any_parents)
def test_everything_follows_from_the_path_to_each_node(parents):
    tree = Tree(parents)
    nodes = range(len(tree.parents))
    paths = {node: path_to(tree, node) for node in nodes}
    assert tree.num_nodes == len(tree.parents)
    assert tree.depths.tolist() == [len(paths[node]) for node in nodes]
    assert tree.max_depth == max(map(len, paths.values()), default=0)
    for row in range(tree.num_nodes + 1):
        above = {0, *(node + 1 for node in paths.get(row - 1, ()))}
        assert set(np.flatnonzero(tree.ancestors[row])) == above
    inner = {node for path in paths.values() for node in path[:-1]}
    assert tree.paths == tuple(paths[node] for node in nodes if node not in inner)
    assert sorted(node for level in tree.levels for node in level) == list(nodes)
    for depth, level in enumerate(tree.levels, start=1):
        assert list(level) == [node for node in nodes if len(paths[node]) == depth]
    for parent in (ANCHOR, *nodes):
        children = tree.children(parent)
        assert children == tuple(n for n in nodes if tree.parents[n] == parent)
        assert [tree.ranks[child] for child in children] == [*range(len(children))]


@pytest.mark.parametrize("tree", [SMALL, chain(9), full([3, 2]), full([0])])
def test_ancestors_are_those_of_a_window(tree: Tree):
    rows = jnp.asarray([tree.parents], jnp.int32).reshape(1, tree.num_nodes) + 1
    np.testing.assert_array_equal(tree.ancestors, ancestor_mask(rows)[0])


@given(any_parents, st.none() | st.integers(0, 14), st.none() | st.integers(0, 6))
@settings(max_examples=60)
def test_a_limited_tree_has_the_first_nodes_that_are_not_too_deep(
    parents, most, deepest
):
    tree = Tree(parents)
    limited = tree.limited(max_nodes=most, max_depth=deepest)
    kept = [n for n in range(tree.num_nodes) if tree.depths[n] <= (deepest or 0)]
    kept = list(range(tree.num_nodes)) if deepest is None else kept
    kept = kept if most is None else kept[:most]
    assert limited.num_nodes == len(kept)
    assert [tuple(kept[i] for i in path_to(limited, n)) for n in range(len(kept))] == [
        path_to(tree, node) for node in kept
    ]
    assert limited.ranks == tuple(tree.ranks[node] for node in kept)


def test_a_limited_tree_keeps_gaps_among_ranks():
    tree = Tree((-1, -1, 0, 1), ranks=(0, 3, 1, 0))
    assert tree.limited(max_nodes=3) == Tree((-1, -1, 0), ranks=(0, 3, 1))
    assert tree.limited(max_depth=1) == Tree((-1, -1), ranks=(0, 3))


def test_a_small_tree_by_hand():
    assert SMALL.depths.tolist() == [1, 1, 2, 3, 2]
    assert SMALL.ranks == (0, 1, 0, 0, 1)
    assert SMALL.paths == ((1,), (0, 2, 3), (0, 4))
    assert SMALL.levels == ((0, 1), (2, 4), (3,))
    assert SMALL.children(ANCHOR) == (0, 1)


def test_the_tree_without_nodes_is_a_tree():
    empty = Tree(())
    assert (empty.num_nodes, empty.max_depth) == (0, 0)
    assert (empty.paths, empty.levels, empty.children(ANCHOR)) == ((), (), ())
    assert empty.ancestors.tolist() == [[True]]
    assert empty.limited(max_nodes=3) == empty


def test_equal_trees_are_one_static_argument():
    traces = []

    def depths(x: jax.Array, tree: Tree) -> jax.Array:
        traces.append(tree)
        return x + jnp.asarray(tree.depths)

    jitted = jax.jit(depths, static_argnames="tree")
    one = jnp.ones((), jnp.int32)
    same = Tree(tuple(SMALL.parents), ranks=(0, 1, 0, 0, 1))
    assert hash(same) == hash(SMALL) and same == SMALL
    for tree in (SMALL, same, SMALL.limited()):
        assert jitted(one, tree=tree).tolist() == [2, 2, 3, 4, 3]
    assert len(traces) == 1
    assert Tree((-1, -1), ranks=(0, 2)) != Tree((-1, -1))


def test_cached_arrays_cannot_be_written_to():
    for array in (SMALL.depths, SMALL.ancestors):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert SMALL.depths is SMALL.depths


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((0,), r"node 0 has parent 0: a parent is the anchor \(-1\)"),
        ((-1, 0, 2), r"node 2 has parent 2: a parent is a node before it \(0 to 1\)"),
        ((-1, 2, -1), "node 1 has parent 2"),
        ((-1, -2), "node 1 has parent -2"),
    ],
)
def test_a_parent_that_is_not_before_its_child_is_named(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 1), "2 ranks for 3 nodes"),
        ((0, -1, 0), "node 1 has rank -1, and 1 is the lowest"),
        ((-1, 0, 0), "node 0 has rank -1, and 0 is the lowest"),
        ((2, 2, 0), "node 1 has rank 2, and 3 is the lowest"),
    ],
)
def test_ranks_that_do_not_increase_among_siblings_are_named(ranks, message):
    with pytest.raises(ValueError, match=message):
        Tree((-1, -1, 0), ranks=ranks)


def test_wrong_limits_and_nodes_are_named():
    with pytest.raises(ValueError, match="max_nodes = -1"):
        SMALL.limited(max_nodes=-1)
    with pytest.raises(ValueError, match="max_depth = -2"):
        SMALL.limited(max_depth=-2)
    for node in (-2, 5):
        with pytest.raises(IndexError, match=f"no node {node} in a tree of 5"):
            SMALL.children(node)
