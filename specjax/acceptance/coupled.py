"""Coupled acceptance: sample first, then compare.

The token at position ``t`` of a row is ``argmax(log p + G)`` with Gumbel noise ``G``
keyed by the row's seed and ``t`` alone. A draft is kept if it is that token. What is
emitted is therefore the same token, for the same seed, whatever was drafted: the rule
is exact token by token, not only in law. (Maximal couplings of this kind: Daliri,
Musco, Suresh, 2408.07978.)
"""

from __future__ import annotations

import jax
from flax import struct

from specjax.acceptance.descend import descend
from specjax.decoding.draws import Draws
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Window


class Coupled(struct.PyTreeNode):
    """Sample-then-compare with noise keyed by position. Exact for any proposal.

    Siblings share the draw of their depth. Rows at temperature 0 take the argmax.
    """

    name = "coupled"
    takes = frozenset(ProposalLaw)

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """Walk down while a child is the token the target draws."""

        def choose(rows: jax.Array, depths: jax.Array, walking: jax.Array) -> jax.Array:
            return draws.coupled(laws.scores_at(rows), depths, walking)

        return descend(proposal, window, choose, max_depth=max_depth)
