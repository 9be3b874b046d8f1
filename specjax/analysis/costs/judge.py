"""Every drafter, and drafts that cost nothing, judged by a calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.analysis.costs.calibrated import Calibrated, Curve
from specjax.analysis.costs.predict import Prediction, predict
from specjax.analysis.costs.sample import Sample
from specjax.analysis.costs.session import Candidate
from specjax.analysis.law import chain_tau, tree_tau_by_rank
from specjax.decoding.trees import Tree, best_first

FREE = "free drafts"


def judge(
    found: Calibrated,
    candidates: Sequence[Candidate],
    samples: Sequence[Sample],
    ranks: Sequence[float] = (),
) -> list[Prediction]:
    """A prediction for each candidate under each curve.

    ``samples`` has one for each candidate; if there are none, ``ranks`` says with what
    probability the first, the second, ... child of a node is right. Then drafts that
    cost nothing are judged too, as chains and as the best trees of every width.
    """
    predictions = []
    for curve in found.curves:
        for index, each in enumerate(candidates):
            nodes = each.drafter.max_nodes
            known = samples[index] if samples else _tau(ranks, each.k, nodes)
            predictions.append(
                predict(
                    curve,
                    each.name,
                    k=each.k,
                    nodes=nodes,
                    drafting=curve.draft_ratios(each.key),
                    found=known,
                )
            )
        if ranks:
            predictions += _free(curve, ranks)
    return predictions


def _tau(ranks: Sequence[float], k: int, nodes: int) -> float:
    """Of a chain; of a drafter of more nodes, that of the best tree of that size."""
    if nodes == k or len(ranks) == 1:
        return chain_tau(ranks[0], k)
    return tree_tau_by_rank(best_first([list(ranks)] * k, nodes), ranks)


def _free(curve: Curve, ranks: Sequence[float]) -> list[Prediction]:
    """Each width as a chain, and as a tree where that is another shape."""
    shapes: list[tuple[str, Tree]] = []
    for rows in curve.widths[1:]:
        nodes = rows - 1
        shapes.append((f"{FREE}, a chain", best_first([ranks[:1]] * nodes, nodes)))
        tree = best_first([list(ranks)] * nodes, nodes)
        if tree.max_depth < nodes:
            shapes.append((f"{FREE}, a tree", tree))
    return [
        predict(
            curve,
            name,
            k=tree.max_depth,
            nodes=tree.num_nodes,
            drafting=np.zeros(len(curve.rounds[1])),
            found=tree_tau_by_rank(tree, ranks),
        )
        for name, tree in shapes
    ]
