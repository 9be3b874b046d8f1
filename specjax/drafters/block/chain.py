"""A chain of drafts, one from each slot of a block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.decoding.types import Context, Proposal, Window
from specjax.drafters.block.slots import OwnContext
from specjax.drafters.chain import ChainDrafter, Said
from specjax.drafters.features import safe_rows
from specjax.models.committed import CommittedState


class BlockChain(ChainDrafter, OwnContext):
    """At most ``k`` tokens, one from each of a block's first slots.

    One pass over the block, then a walk over its slots from left to right, which costs
    what the head makes of a slot. A drafted token's law is that of its slot given the
    tokens walked so far, so drawn drafts carry their true law. A head that judges its
    own drafts (``Slot.right``) takes the place of the law's best in the length policy.
    """

    name = "block-chain"

    def __post_init__(self) -> None:
        super().__post_init__()
        slots = getattr(getattr(self.head, "backbone", None), "slots", None)
        if isinstance(self.k, int) and isinstance(slots, int) and self.k > slots:
            raise ValueError(
                f"k = {self.k}: the block has {slots} slots to draft from, so k is "
                f"{slots} at most"
            )

    def propose(self, state: CommittedState, context: Context) -> tuple[Proposal, None]:
        """Fill in a block, then pick a token of each slot."""
        rows, ready = self.rows(state, context)
        reading = self.head.read(rows[:, : self.k])
        batch = context.lengths.shape[0]

        def said(
            step: jax.Array | int, tokens: Int[Array, "B K"], memory: Any
        ) -> tuple[Said, Any]:
            before = jnp.asarray(step, jnp.int32) - 1
            last = jax.lax.dynamic_index_in_dim(
                tokens, jnp.maximum(before, 0), axis=1, keepdims=False
            )
            previous = jnp.where(before < 0, jnp.maximum(context.anchor, 0), last)
            slot, memory = self.head.slot(reading, step, previous, memory)
            logits = self.head.backbone.over_target(slot.logits)
            laws = self.laws(
                safe_rows(logits[:, None]),
                _behind(tokens, before),
                context,
                counted=0,
            )
            return Said(laws, jnp.zeros((batch,), jnp.int32), slot.right), memory

        nothing = jnp.zeros((batch, self.k), jnp.int32)
        first, memory = said(0, nothing, self.head.start(batch))
        return self.draft(context, ready, first, said, memory), None


def _behind(tokens: Int[Array, "B K"], last: jax.Array) -> Window:
    """The drafts up to ``last``, as the ancestors of one row of laws."""
    batch, k = tokens.shape
    seen = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32) <= last, (batch, 1, k))
    return Window(
        tokens=tokens,
        positions=jnp.zeros((batch, k), jnp.int32),
        ancestors=seen,
        valid=seen[:, 0],
    )
