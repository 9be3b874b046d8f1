"""The first drafter that has something to say, row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.types import Context, Proposal
from specjax.drafters.several import Several


class Cascade(Several):
    """Each row takes the proposal of the first drafter that proposes anything.

    Whether a drafter proposes must not depend on what it has drawn; of the drafters
    here none does that. All are asked in every round, so the cost is the sum: cheap
    ones that are right when they speak (looked-up text) go first.
    """

    name = "cascade"

    @property
    def max_nodes(self) -> int:
        """The largest proposal's."""
        return max(drafter.max_nodes for drafter in self.drafters)

    def propose(
        self, state: tuple[Any, ...], context: Context
    ) -> tuple[Proposal, tuple[Any, ...]]:
        """Ask all, and choose by row."""
        proposals, pending = self._proposals(state, context)
        chosen = proposals[-1]
        for proposal in reversed(proposals[:-1]):
            chosen = _where(proposal.num_nodes > 0, proposal, chosen)
        return chosen, pending


def _where(first: jax.Array, a: Proposal, b: Proposal) -> Proposal:
    return jax.tree.map(
        lambda x, y: jnp.where(first.reshape(-1, *[1] * (x.ndim - 1)), x, y), a, b
    )
