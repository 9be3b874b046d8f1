"""Static trees from a description, and how long a round they promise.

Nodes stand by depth, then by the ranks on their path, so that a tree without its
deepest nodes is the first nodes of the whole one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from specjax.decoding.trees.static import Tree
from specjax.decoding.types import ANCHOR

Choice = tuple[int, ...]
"""A node, by the ranks on its path: ``(0, 2)`` is the third child of the first."""


def chain(k: int) -> Tree:
    """``k`` nodes, each the child of the one before."""
    if k < 0:
        raise ValueError(f"k = {k}: a chain has 0 nodes or more")
    return full([1] * k)


def full(branching: Sequence[int]) -> Tree:
    """Nodes at depth ``d`` have ``branching[d]`` children each; the anchor is at 0."""
    parents: list[int] = []
    level = [ANCHOR]
    for depth, children in enumerate(branching):
        if children < 0:
            raise ValueError(f"branching[{depth}] = {children}: 0 children or more")
        first = len(parents)
        parents += [parent for parent in level for _ in range(children)]
        level = list(range(first, len(parents)))
    return Tree(tuple(parents))


def from_choices(choices: Iterable[Sequence[int]]) -> Tree:
    """The tree of these nodes, as Medusa's ``medusa_choices`` list it (2401.10774).

    ``[(0,), (0, 0), (0, 2)]`` is the most probable first token and, below it, the first
    and the third candidate for the second. The order of the list does not matter. Gaps
    among ranks stay in ``Tree.ranks``; a node without its parent is an error.
    """
    listed = [tuple(choice) for choice in choices]
    ordered = sorted(set(listed), key=lambda choice: (len(choice), choice))
    if len(ordered) < len(listed):
        twice = sorted({choice for choice in ordered if listed.count(choice) > 1})
        raise ValueError(f"choices listed more than once: {_names(twice)}")
    if () in ordered:
        raise ValueError("the choice () is the anchor, which is not listed")
    place = {(): ANCHOR} | {choice: node for node, choice in enumerate(ordered)}
    above = {choice[:depth] for choice in ordered for depth in range(len(choice))}
    if missing := above - place.keys():
        raise ValueError(
            f"choices whose children are listed, and they are not: {_names(missing)}"
        )
    return Tree(
        parents=tuple(place[choice[:-1]] for choice in ordered),
        ranks=tuple(choice[-1] for choice in ordered),
    )


def best_first(
    marginals: Sequence[Sequence[float]], num_nodes: int, max_depth: int | None = None
) -> Tree:
    """The ``num_nodes`` nodes that are most probably right.

    ``marginals[d][r]`` is the probability, measured once, that the candidate of rank
    ``r`` at depth ``d + 1`` is right given that its parent is. A node is as probable as
    the product along its path; of equal ones the shallower comes first, then the one
    whose path has the lower ranks. A child is no more probable than its parent, so
    taking the best node next to the tree, again and again, takes the best of all: no
    tree of that size has a larger ``expected_length`` under these marginals.

    Medusa's sparse trees are built like this (2401.10774, section 2.3.3).
    """
    _check_marginals(marginals)
    deepest = len(marginals) if max_depth is None else min(max_depth, len(marginals))
    if num_nodes < 0:
        raise ValueError(f"num_nodes = {num_nodes}: a tree has 0 nodes or more")
    chosen: list[Choice] = []
    # Minus the probability, so that the heap's least entry is the best; then the depth.
    border: list[tuple[float, int, Choice]] = [(-1.0, 0, ())]
    while border and len(chosen) < 1 + num_nodes:  # the anchor is chosen as well
        cost, depth, choice = heapq.heappop(border)
        chosen.append(choice)
        for rank, marginal in enumerate(marginals[depth]) if depth < deepest else ():
            heapq.heappush(border, (cost * marginal, depth + 1, (*choice, rank)))
    if len(chosen) < 1 + num_nodes:
        raise ValueError(
            f"num_nodes = {num_nodes}, but these marginals have only "
            f"{len(chosen) - 1} nodes down to depth {deepest}"
        )
    return from_choices(chosen[1:])


def expected_length(tree: Tree, marginals: Sequence[Sequence[float]]) -> float:
    """Tokens a round commits on average, the one after the last accepted included.

    1 and, for every node, the probability that it and all above it are right (see
    ``best_first``): of the nodes of one depth at most one is accepted.
    """
    _check_marginals(marginals)
    reached = {ANCHOR: 1.0}
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        depth = int(tree.depths[node])
        if depth > len(marginals) or rank >= len(marginals[depth - 1]):
            raise ValueError(f"no marginal for rank {rank} at depth {depth}")
        reached[node] = reached[parent] * marginals[depth - 1][rank]
    return math.fsum(reached.values())


def _check_marginals(marginals: Sequence[Sequence[float]]) -> None:
    for depth, row in enumerate(marginals):
        for rank, marginal in enumerate(row):
            if not 0.0 <= marginal <= 1.0:
                raise ValueError(
                    f"marginals[{depth}][{rank}] = {marginal} is no probability"
                )


def _names(choices: Iterable[Choice]) -> str:
    ordered = sorted(choices, key=lambda choice: (len(choice), choice))
    return ", ".join(map(str, ordered))
