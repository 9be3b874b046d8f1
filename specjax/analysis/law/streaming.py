"""When tokens arrive: in bursts, one burst a round.

The mean gap falls by the speed-up, but no gap is near the mean: the first token of a
round comes a round after the last, the others at once. Source: the lecture's section
on streaming.
"""

from __future__ import annotations

import dataclasses

from specjax.analysis.law.acceptance_length import chain_tau
from specjax.analysis.law.sizes import Number, positive


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Seconds between a token and the one before it."""

    round_seconds: float
    """The long gap; the short one is 0."""
    mean: float
    long_share: float
    """Of tokens, those that come after a long gap: 1 / tau."""
    committed: tuple[float, ...]
    """The probability that a round commits 1, 2, ... tokens."""

    def quantile(self, share: Number) -> float:
        """The gap that this share of tokens does not exceed."""
        return 0.0 if share <= 1 - self.long_share else self.round_seconds


def gaps(step_seconds: Number, alpha: Number, k: int, cost: Number) -> Gaps:
    """Gaps of chains of ``k`` drafts whose round costs ``cost`` plain steps."""
    positive("step_seconds", step_seconds)
    tau = chain_tau(alpha, k)
    seconds = step_seconds * positive("cost", cost)
    short = [alpha**n * (1 - alpha) for n in range(k)]
    return Gaps(seconds, seconds / tau, 1 / tau, (*short, alpha**k))
