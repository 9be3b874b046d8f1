"""From what was timed to what is expected: speed-up, its spread, go or no-go.

    speed-up = tau / (mean over rounds of T(W) / T(1) + c_draft)

A round runs at the smallest compiled width that holds the batch's largest draft, so a
drafter that often drafts nothing pays for wide windows only where it drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.analysis.costs.calibrated import Curve
from specjax.analysis.costs.sample import Sample
from specjax.analysis.law import Limit, alpha_of_tau, break_even_alpha, limits
from specjax.analysis.law.sizes import Number
from specjax.decoding.engine import default_widths

DRAWS = 1000
"""Of the bootstrap."""
COVERED = (0.025, 0.975)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What one drafter at one longest draft is expected to give."""

    drafter: str
    k: int
    """The longest draft."""
    nodes: int
    """The most nodes of a draft; more than ``k`` for trees."""
    batch: int
    context: int
    alpha: float
    """The one at which chains of ``k`` would give ``tau``."""
    tau: float
    c_draft: float
    c_verify: float
    """The mean cost of a round without drafting, in plain steps."""
    break_even_alpha: float | None
    """Of such rounds; ``None``: even accepting every draft would not pay."""
    speedup: float
    low: float
    high: float
    """95 % of what costs and texts, drawn again from those that were seen, give."""
    limit: str
    """What holds it back most."""
    without_limit: float
    """The speed-up without that."""

    @property
    def go(self) -> bool:
        """Whether a gain is expected."""
        return self.speedup > 1

    @property
    def sure(self) -> bool:
        """Whether all of the spread lies on that side of 1."""
        return self.low > 1 or self.high < 1


def predict(
    curve: Curve,
    drafter: str,
    *,
    k: int,
    nodes: int,
    drafting: np.ndarray,
    found: Sample | Number,
    seed: int = 0,
) -> Prediction:
    """By a sample of rounds, or by a tau, every round then drafting all ``nodes``.

    ``drafting`` is a round's drafting in plain steps, turn by turn (``draft_ratios``).
    """
    widths = default_widths(nodes)
    costs = np.stack([curve.ratios(width) for width in widths])
    if isinstance(found, Sample):
        rounds, tokens = _by_width(found, widths), np.asarray(found.tokens, float)
        alpha = found.alpha(k)
    else:
        full = [[0.0] * (len(widths) - 1) + [1.0]]
        rounds, tokens = np.array(full), np.array([float(found)])
        alpha = alpha_of_tau(found, k)
    tau, c_verify = _law(rounds, tokens, np.median(costs, axis=1), curve.batch)
    c_draft = float(np.median(drafting))
    draw = np.random.default_rng(seed)
    drawn = [
        _redrawn(draw, rounds, tokens, costs, drafting, curve.batch)
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(drawn, COVERED)
    full = float(np.median(costs[-1]))
    first: Limit = limits(tau, k, c_draft, c_verify, full)[0]
    return Prediction(
        drafter=drafter,
        k=k,
        nodes=nodes,
        batch=curve.batch,
        context=curve.context,
        alpha=alpha,
        tau=tau,
        c_draft=c_draft,
        c_verify=c_verify,
        break_even_alpha=break_even_alpha(k, c_verify + c_draft),
        speedup=tau / (c_verify + c_draft),
        low=float(low),
        high=float(high),
        limit=first.name,
        without_limit=first.speedup_without,
    )


def best(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest that gains, the shorter of equals; ``None``: decode plainly."""
    gains = [each for each in predictions if each.go]
    return max(gains, key=lambda each: (each.speedup, -each.nodes), default=None)


def _by_width(sample: Sample, widths: Sequence[int]) -> np.ndarray:
    """``[text, width]``: rounds whose draft needs that width."""
    counts = np.zeros((len(sample.drafted), len(widths)))
    for text, drafts in enumerate(sample.drafted):
        for nodes in drafts:
            counts[text, np.searchsorted(widths, nodes + 1)] += 1
    return counts


def _law(
    rounds: np.ndarray, tokens: np.ndarray, costs: np.ndarray, batch: int
) -> tuple[float, float]:
    """``tau``, and the mean cost of a round, whose width is that of its largest draft.

    Of ``batch`` requests whose drafts are independent, all fit a width with the
    ``batch``-th power of the probability that one does.
    """
    counts = rounds.sum(axis=0)
    fits = np.cumsum(counts / counts.sum()) ** batch
    shares = np.diff(fits, prepend=0.0)
    return float(tokens.sum() / counts.sum()), float(shares @ costs)


def _redrawn(
    draw: np.random.Generator,
    rounds: np.ndarray,
    tokens: np.ndarray,
    costs: np.ndarray,
    drafting: np.ndarray,
    batch: int,
) -> float:
    """A speed-up from texts and turns drawn again, with replacement."""
    texts = draw.integers(0, len(tokens), len(tokens))
    turns = draw.integers(0, costs.shape[1], costs.shape[1])
    medians = np.median(costs[:, turns], axis=1)
    tau, c_verify = _law(rounds[texts], tokens[texts], medians, batch)
    return tau / (c_verify + float(np.median(drafting[turns])))
