"""How many tokens a round commits: tau.

Acceptance is taken as independent from position to position with probability alpha,
which is a first approximation: ``tau_by_depth`` needs no such assumption. Sources:
Leviathan et al. 2023 (2211.17192, eq. 1) for chains; for trees the lecture, and
2401.10774, section 2.3.3.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from specjax.analysis.law.sizes import Number, at_least, probability
from specjax.decoding.trees import Tree, expected_length
from specjax.decoding.types import ANCHOR


def chain_tau(alpha: Number, k: int) -> float:
    """Tokens a round of a chain of ``k`` drafts: 1 + alpha + ... + alpha^k."""
    at_least("k", k, 0)
    probability("alpha", alpha)
    return math.fsum(alpha**depth for depth in range(k + 1))


def chain_tau_limit(alpha: Number) -> float:
    """What no chain exceeds, however long: 1 / (1 - alpha)."""
    probability("alpha", alpha)
    return 1 / (1 - alpha) if alpha < 1 else math.inf


def tau_by_depth(conditional: Sequence[Number]) -> float:
    """Tokens a round of a chain whose draft at depth ``d`` is accepted with
    probability ``conditional[d - 1]``, given that those above it were."""
    for depth, value in enumerate(conditional, start=1):
        probability(f"the probability at depth {depth}", value)
    return 1 + math.fsum(itertools.accumulate(conditional, operator.mul))


def tree_tau(tree: Tree, nodes: Sequence[Number]) -> float:
    """Tokens a round of a tree whose node ``v`` is accepted with probability
    ``nodes[v]``, given that its parent is: 1 + the sum of the products along paths.

    Of the children of a node at most one is accepted, so their probabilities add up to
    1 at most; more is an error, for no drafter can be as good.
    """
    if len(nodes) != tree.num_nodes:
        raise ValueError(f"{len(nodes)} probabilities for {tree.num_nodes} nodes")
    reached: dict[int, Number] = {ANCHOR: 1.0}
    for parent in range(ANCHOR, tree.num_nodes):
        children = tree.children(parent)
        shares = [probability(f"node {v}", nodes[v]) for v in children]
        if math.fsum(shares) > 1 + 1e-9:
            raise ValueError(
                f"the children of node {parent} are accepted with {math.fsum(shares):g}"
                " together: one of them at most is right, so at most 1"
            )
        for node in children:
            reached[node] = reached[parent] * nodes[node]
    return math.fsum(reached.values())


def tree_tau_by_rank(tree: Tree, ranks: Sequence[Number]) -> float:
    """The same where only a node's rank among its siblings decides, at every depth.

    With one rank the tree is a chain, and this is ``chain_tau``.
    """
    total = math.fsum(ranks)
    if total > 1 + 1e-9:
        raise ValueError(f"the ranks' probabilities add up to {total:g}, above 1")
    return expected_length(tree, [[float(rank) for rank in ranks]] * tree.max_depth)


def alpha_of_tau(tau: Number, k: int) -> float:
    """The alpha at which chains of ``k`` drafts commit ``tau`` tokens a round."""
    at_least("k", k, 1)
    if not 1 <= tau <= k + 1:
        raise ValueError(f"tau = {tau}: chains of {k} commit between 1 and {k + 1}")
    return bisect(lambda alpha: chain_tau(alpha, k) - tau, 0.0, 1.0)


def bisect(function, low: Number, high: Number, steps: int = 100) -> float:
    """The last place where an increasing function is not above 0."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) <= 0 else (low, middle)
    return (low + high) / 2
