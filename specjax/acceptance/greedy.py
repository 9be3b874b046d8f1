"""Greedy acceptance: a draft is kept if it is the target's argmax."""

from __future__ import annotations

import jax
from flax import struct

from specjax.acceptance.descend import descend
from specjax.decoding.draws import Draws
from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.types import Acceptance, Proposal, Window


class Greedy(struct.PyTreeNode):
    """The argmax after bias and penalties; temperature and cut-offs do not move it.

    Exact for any proposal, because how a draft came about does not matter to it. Among
    equal logits the lowest id wins, as in plain greedy decoding.
    """

    name = "greedy"
    takes = frozenset(ProposalLaw)
    samples = False

    def accept(
        self,
        proposal: Proposal,
        window: Window,
        laws: Laws,
        draws: Draws,
        *,
        max_depth: int,
    ) -> Acceptance:
        """Walk down while a child is the argmax."""

        def choose(rows: jax.Array, depths: jax.Array, walking: jax.Array) -> jax.Array:
            return laws.best_at(rows)

        return descend(proposal, window, choose, max_depth=max_depth)
