"""Builders of static trees against lists of paths."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decoding.trees import (
    Tree,
    best_first,
    chain,
    expected_length,
    from_choices,
    full,
)
from specjax.decoding.types import ANCHOR


def choices_of(tree: Tree) -> list[tuple[int, ...]]:
    """Every node by the ranks on its path."""
    choices: dict[int, tuple[int, ...]] = {ANCHOR: ()}
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        choices[node] = (*choices[parent], rank)
    return [choices[node] for node in range(tree.num_nodes)]


def all_choices(widths: list[int]) -> list[tuple[int, ...]]:
    """Every path of ranks, by depth and then by ranks."""
    return [
        choice
        for depth in range(1, len(widths) + 1)
        for choice in itertools.product(*map(range, widths[:depth]))
    ]


def test_a_chain_is_a_path():
    assert chain(0) == Tree(())
    assert chain(4) == Tree((-1, 0, 1, 2))
    assert chain(4).paths == ((0, 1, 2, 3),)


@pytest.mark.parametrize("branching", [[], [3], [2, 3], [3, 1, 2], [1, 1], [2, 0, 5]])
def test_a_full_tree_has_every_path(branching: list[int]):
    assert choices_of(full(branching)) == all_choices(branching)


def test_choices_come_in_any_order_and_keep_their_gaps():
    choices = [(1,), (0, 2, 1), (0,), (3,), (0, 2), (0, 0), (1, 0)]
    tree = from_choices(choices)
    assert choices_of(tree) == sorted(choices, key=lambda c: (len(c), c))
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 4)
    assert tree.ranks == (0, 1, 3, 0, 2, 0, 1)
    assert from_choices([list(choice) for choice in choices]) == tree
    assert from_choices([]) == Tree(())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0,), (1, 0, 2), (2, 0)], r"they are not: \(1,\), \(2,\), \(1, 0\)$"),
        ([(0,), (1,), (0,)], r"more than once: \(0,\)$"),
        ([(), (0,)], r"\(\) is the anchor"),
        ([(0,), (-1,)], "rank -1"),
    ],
)
def test_wrong_choices_are_named(choices, message):
    with pytest.raises(ValueError, match=message):
        from_choices(choices)


# Eighths: products of three are exact, and there are many ties.
eighths = st.integers(0, 8).map(lambda x: x / 8)
rows_of = st.lists(st.lists(eighths, min_size=1, max_size=3), min_size=1, max_size=3)


def products(marginals: list[list[float]]) -> dict[tuple[int, ...], float]:
    return {
        choice: math.prod(row[rank] for row, rank in zip(marginals, choice))  # noqa: B905
        for choice in all_choices([len(row) for row in marginals])
    }


@given(rows_of, st.data())
@settings(max_examples=80)
def test_best_first_takes_the_largest_products_of_all(marginals, data):
    max_depth = data.draw(st.none() | st.integers(1, 4))
    deepest = len(marginals) if max_depth is None else max_depth
    probable = {c: p for c, p in products(marginals).items() if len(c) <= deepest}
    count = data.draw(st.integers(0, len(probable)))
    tree = best_first(marginals, count, max_depth=max_depth)
    # ties: the shallower, then the lower ranks
    best = sorted(probable, key=lambda c: (-probable[c], len(c), c))[:count]
    assert choices_of(tree) == sorted(best, key=lambda c: (len(c), c))
    wanted = 1 + math.fsum(probable[choice] for choice in best)
    assert expected_length(tree, marginals) == wanted
    with pytest.raises(ValueError, match=f"only {len(probable)} nodes"):
        best_first(marginals, len(probable) + 1, max_depth=max_depth)


def test_expected_length_is_the_mean_over_all_that_may_happen():
    marginals = [[0.6, 0.2], [0.5, 0.3], [0.9]]
    tree = from_choices([(0,), (0, 0), (0, 0, 0), (1,), (1, 1)])
    mean = 0.0
    for right in itertools.product((0, 1, None), (0, 1, None), (0, None)):
        probability, node, tokens = 1.0, ANCHOR, 1
        for row, rank in zip(marginals, right, strict=True):
            probability *= 1 - sum(row) if rank is None else row[rank]
        for rank in right:
            below = {tree.ranks[child]: child for child in tree.children(node)}
            if rank not in below:
                break
            node, tokens = below[rank], tokens + 1
        mean += probability * tokens
    assert mean == pytest.approx(1 + 0.6 + 0.3 + 0.27 + 0.2 + 0.06)
    assert expected_length(tree, marginals) == pytest.approx(mean)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="k = -1"):
        chain(-1)
    with pytest.raises(ValueError, match=r"branching\[1\] = -2"):
        full([1, -2])
    with pytest.raises(ValueError, match="num_nodes = -1"):
        best_first([[0.5]], -1)
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=rf"marginals\[1\]\[0\] = {wrong}"):
            best_first([[0.5], [wrong]], 1)
    with pytest.raises(ValueError, match="no marginal for rank 1 at depth 1"):
        expected_length(full([2]), [[0.5]])
    with pytest.raises(ValueError, match="no marginal for rank 0 at depth 2"):
        expected_length(chain(2), [[0.5]])
