"""Draft trees: fixed ones, ones chosen in every round, and how to look at them."""

from specjax.decoding.trees.builders import (
    best_first,
    chain,
    expected_length,
    from_choices,
    full,
)
from specjax.decoding.trees.draw import draw
from specjax.decoding.trees.dynamic import (
    Candidates,
    Expansion,
    ScoredTree,
    choose,
    depths_of,
    from_marginals,
    grow,
    rerank,
    start,
)
from specjax.decoding.trees.static import Tree

__all__ = [
    "Candidates",
    "Expansion",
    "ScoredTree",
    "Tree",
    "best_first",
    "chain",
    "choose",
    "depths_of",
    "draw",
    "expected_length",
    "from_choices",
    "from_marginals",
    "full",
    "grow",
    "rerank",
    "start",
]
