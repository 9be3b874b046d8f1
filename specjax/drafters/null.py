"""The drafter that drafts nothing: with it the loop is plain decoding."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

from specjax.decoding.interfaces import ProposalLaw, Tap
from specjax.decoding.types import Acceptance, Context, Proposal, Verdict, Window


class NullDrafter(struct.PyTreeNode):
    """No nodes, ever: the baseline has the same kernels, loop and laws."""

    name = "none"
    taps: tuple[Tap, ...] = struct.field(pytree_node=False, default=())
    max_nodes: int = struct.field(pytree_node=False, default=0)
    max_depth: int = struct.field(pytree_node=False, default=0)
    law = ProposalLaw.DETERMINISTIC

    def init(self, batch: int, capacity: int) -> None:
        """Nothing to remember."""
        return None

    def propose(self, state: None, context: Context) -> tuple[Proposal, None]:
        """An empty proposal."""
        batch = context.lengths.shape[0]
        nothing = jnp.zeros((batch, 0), jnp.int32)
        return Proposal(nothing, nothing, jnp.zeros((batch,), jnp.int32)), None

    def observe(
        self,
        state: None,
        pending: Any,
        window: Window,
        verdict: Verdict,
        acceptance: Acceptance,
    ) -> None:
        """Nothing to learn."""
        return None
