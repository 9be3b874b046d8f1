"""A tree of drafts from what the slots of a block say each by itself: DDTree
(2604.12989).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from specjax.decoding.interfaces import ProposalLaw
from specjax.decoding.laws import Laws
from specjax.decoding.trees.dynamic import from_marginals
from specjax.decoding.types import Context, Proposal
from specjax.drafters.block.slots import OwnContext
from specjax.drafters.features import anchor_window, safe_rows
from specjax.models.committed import CommittedState


class BlockTree(OwnContext):
    """The ``nodes`` most probable paths through a block, were its slots independent.

    Tokens are chosen by probability and not drawn, so the tree is a deterministic
    proposal. A path's probability is the product of its slots' marginals, at the row's
    temperature where it has one: the law that a sampled row will be compared with.
    """

    name = "block-tree"
    makes_trees = True
    nodes: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        if isinstance(self.nodes, int) and self.nodes < 1:
            raise ValueError(f"nodes = {self.nodes}: a tree needs at least one node")

    @property
    def law(self) -> ProposalLaw:
        """Chosen, not drawn."""
        return ProposalLaw.DETERMINISTIC

    @property
    def max_nodes(self) -> int:
        """``nodes``."""
        return self.nodes

    @property
    def max_depth(self) -> int:
        """A path has a node a slot, and a tree no more than its nodes."""
        return min(self.nodes, self.head.backbone.slots)

    def propose(self, state: CommittedState, context: Context) -> tuple[Proposal, None]:
        """Fill in a block, then choose the best paths through it."""
        rows, ready = self.rows(state, context)
        anchor = jnp.maximum(context.anchor, 0)
        logits = self.head.marginals(rows[:, : self.max_depth], anchor)
        log_probs = self._marginals(logits, context)
        # a token of a lower rank at a depth has as many better siblings
        width = min(self.nodes, log_probs.shape[-1])
        values, tokens = jax.lax.top_k(log_probs, width)
        tree = from_marginals(values, tokens, self._possible(width)).proposal
        missing = self.nodes - tree.tokens.shape[1]
        if missing:
            wide = [(0, 0), (0, missing)]
            tree = tree.replace(
                tokens=jnp.pad(tree.tokens, wide), parents=jnp.pad(tree.parents, wide)
            )
        # the last token a row has room for needs no draft
        useful = jnp.where(ready & (context.room > 1), tree.num_nodes, 0)
        return tree.replace(num_nodes=useful), None

    def _possible(self, width: int) -> int:
        """No more nodes than there are paths."""
        paths = sum(width**depth for depth in range(1, self.max_depth + 1))
        return min(self.nodes, paths)

    def _marginals(
        self, logits: Float[Array, "B K Vd"], context: Context
    ) -> Float[Array, "B K V"]:
        """Log-laws of the slots, under the request's bias, penalties and temperature.

        Penalties count the committed text; the drafts above a slot are not known to it.
        """
        sampling, anchor = context.sampling, anchor_window(context)
        backbone = self.head.backbone

        def of_slot(slot: Float[Array, "B Vd"]) -> Float[Array, "B V"]:
            row = safe_rows(backbone.over_target(slot)[:, None])
            laws = Laws(row, anchor, sampling, context.counts)
            adjusted = laws.adjusted_at(jnp.zeros(slot.shape[:1], jnp.int32))
            if sampling.temperature is not None:
                warm = sampling.temperature[:, None]
                adjusted = adjusted / jnp.where(warm > 0, warm, 1.0)
            return jax.nn.log_softmax(adjusted, axis=-1)

        return jax.vmap(of_slot, in_axes=1, out_axes=1)(logits)
